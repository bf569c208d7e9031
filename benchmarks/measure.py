"""Measures a step: its peak memory, in a separate process, and its time, in turns with other steps.

Also compares the tensors of two devices.
"""

import ctypes
import gc
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor

Step = Callable[[], object]
T = TypeVar("T")


class StepError(Exception):
    """A step failed; the message is short enough for a table."""


def in_own_process(function: Callable[..., T], *arguments: object) -> T:
    """The function's result, from a fresh process that ends with it.

    Raises `StepError` if the function raises or its process is killed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_with_short_errors, function, *arguments).result()
        except BrokenProcessPool:
            raise StepError("its process was killed, as a rule for want of memory") from None


def _with_short_errors(function: Callable[..., T], *arguments: object) -> T:
    try:
        return function(*arguments)
    except Exception as error:  # errors of other libraries may not be picklable
        raise StepError(f"{type(error).__name__}: {error}".splitlines()[0]) from None


def memory_growth(step: Step) -> int:
    """Bytes by which the process grows up to the peak of the step; Linux only."""
    gc.collect()
    # Memory that was freed while loading, but is still held by the C library, would hide growth of the step.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def alternating_times(steps: Mapping[str, Step], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step in each round; in a round, every step runs once."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            gc.collect()
            start = perf_counter()
            result = step()
            times[name].append(perf_counter() - start)
            del result  # freed here, outside the timed part
    return times


def difference(one: "Tensor", other: "Tensor") -> float:
    """The largest difference, relative to the largest value; infinite if shapes differ, or only one is finite."""
    import torch

    one, other = (value.detach().cpu().double() for value in (one, other))
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return torch.inf
    one, other = (value.nan_to_num(0.0, 0.0, 0.0) for value in (one, other))
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) if one.numel() else 0.0


def installed(contenders: Mapping[str, object], module_of: Mapping[str, str]) -> list[str]:
    """The contenders whose libraries are installed; `module_of` names the module that a contender needs."""
    return [name for name in contenders if name not in module_of or find_spec(module_of[name]) is not None]


def write(
    path: Path | None, about: Mapping[str, object], settings: Any, tables: Iterable[Table], **raw: object
) -> None:
    """Writes all figures and the printed tables, from which `tables.py` makes the tables of README.md."""
    if path is None:
        return
    kept = {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()}
    kept.pop("json", None)
    printed = [_data_of(table) for table in tables]
    figures = {"machine": about, "settings": kept, **raw, "tables": printed}
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _data_of(table: Table) -> dict[str, object]:
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return {
        "title": str(table.title or ""),
        "columns": [str(column.header) for column in table.columns],
        "rows": [list(row) for row in zip(*cells, strict=True)],
        "caption": str(table.caption or ""),
    }


def machine(packages: Iterable[str]) -> dict[str, object]:
    """Describes the machine and the packages. A load average above 0 at the start shows that others use the cores
    too.
    """
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
