"""The notebooks of `examples/` with their outputs; each runs only once, even for several processes."""

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
SECONDS_A_CELL = 300


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the interpreter that runs the tests, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def stored(name: str) -> Any:
    return nbformat.read(next(path for path in NOTEBOOKS if path.stem == name), as_version=4)


def digest(notebook: Any) -> str:
    return _short("\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code"))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def executed(name: str) -> Any:
    """The notebook with its outputs, stored in the folder ATTNMECH_EXECUTED if that is set."""
    folder = os.environ.get("ATTNMECH_EXECUTED")
    if not folder:
        return _run(stored(name))
    kept = Path(folder) / f"{name}-{_short(nbformat.writes(stored(name)))}.ipynb"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        nbformat.write(_run(stored(name)), draft)
        draft.replace(kept)
    return nbformat.read(kept, as_version=4)


def _run(notebook: Any) -> Any:
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "IPYTHONDIR": folder, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        client = NotebookClient(
            notebook, km=ThisInterpreter(), timeout=SECONDS_A_CELL, resources={"metadata": {"path": folder}}
        )
        client.execute(env=environment)
    return notebook
