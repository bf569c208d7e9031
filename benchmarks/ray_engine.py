"""Compares Ray's workers with one process: a pass over a corpus with 1 and 2 workers, adding results, and memory.

    pip install -c constraints.txt '.[ray]'
    python benchmarks/ray_engine.py --json ray_engine.json

On two cores, with the demo model and texts of its grammar. Comparisons use equal numbers of threads: one process with
one worker, both with one or two threads, and with two workers of one thread each. Times are wall-clock seconds and CPU
seconds over all processes; on a shared machine, only the CPU seconds can be compared. Starting Ray and the workers is
measured separately.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measure import machine, write
from rich.console import Console
from rich.table import Table
from safetensors.torch import load, save

import attnmech as am
from attnmech.runs.corpus import batches
from attnmech.runs.stream import Streaming
from attnmech.runs.total import merged_states, states_of, tensors_of

sys.path.append(str(Path(__file__).parents[1] / "examples" / "demo_model"))
from write_texts import documents

CORES = 2
TICK = os.sysconf("SC_CLK_TCK")
PARTS = 1000
"""The number of partial results that are added."""


@dataclass(frozen=True)
class Cost:
    """The cost of one run."""

    engine: str
    documents: int
    tokens: int
    start: float
    """Seconds until the workers have the model."""
    wall: float
    cpu: float
    """CPU seconds of the driver and its workers, without the start."""
    driver_cpu: float
    driver_growth_mb: float
    """The growth of the driver's memory at its peak."""


def texts(count: int) -> Iterator[str]:
    """Documents of the demo grammar; every block of documents has a different seed."""
    for first in range(0, count, 500):
        yield from (document.text for document in documents(min(500, count - first), seed=first))


def seconds_of(processes: list[int]) -> float:
    """The CPU seconds that processes have used so far."""
    fields = [Path(f"/proc/{each}/stat").read_text().rsplit(") ", 1)[1].split() for each in processes]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICK


def own_seconds() -> float:
    """The CPU seconds that this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak() -> int:
    """The peak of this process's memory since it was last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measured(name: str, model: am.HookedModel, count: int, engine: am.Ray | None) -> Cost:
    """One pass of attention focus over a corpus in a file."""
    start, workers = 0.0, []
    where = {} if engine is None else {"engine": engine}
    if engine is not None:
        before = time.perf_counter()
        workers = engine.processes()
        am.attention_focus(model, texts(64), **where)
        start = time.perf_counter() - before
    else:
        am.attention_focus(model, texts(64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.txt")
        path.write_text("\n".join(texts(count)))
        corpus = am.Corpus(path)
        Path("/proc/self/clear_refs").write_text("5")
        held, theirs, mine, before = peak(), seconds_of(workers), own_seconds(), time.perf_counter()
        found = am.attention_focus(model, corpus, **where)
        wall, driver = time.perf_counter() - before, own_seconds() - mine
        cpu = driver + seconds_of(workers) - theirs
    tokens = int(found.state["rows"].sum())
    return Cost(name, count, tokens, start, wall, cpu, driver, (peak() - held) / 1e6)


def merging(model: am.HookedModel) -> dict[str, float]:
    """The time in which the driver adds a partial result to its total, and 1,000 of them."""
    work = Streaming(model, (am.results.AttentionFocus.reducer(),), model.stack(), None)
    parts = [part for part, _ in zip(batches(texts(512), model), range(2), strict=False)]
    states = [work.of_part(part.batch, part.documents) for part in parts]
    whole = merged_states(work.reducers, *states, range(512))
    sent = save({name: x.contiguous() for name, x in tensors_of(whole).items()})
    before = time.process_time()
    for _ in range(100):
        merged_states(work.reducers, whole, states_of(load(sent), 1), range(512))
    one = (time.process_time() - before) / 100
    return {"bytes": float(len(sent)), "one_merge": one, "thousand": one * PARTS}


def costs_of(model: am.HookedModel, sizes: Sequence[int]) -> list[Cost]:
    """The costs of one process and of one worker with the same number of threads, then of two workers, on each
    corpus.
    """
    costs = []
    for threads in range(1, CORES + 1):
        torch.set_num_threads(threads)
        costs.append(measured(f"one process, {threads} threads", model, sizes[0], None))
        with am.Ray(workers=1, cpus_per_worker=threads) as engine:
            costs.append(measured(f"one worker, {threads} threads", model, sizes[0], engine))
    torch.set_num_threads(1)
    with am.Ray(workers=CORES) as engine:
        costs += [measured(f"{CORES} workers, 1 thread each", model, count, engine) for count in sizes]
    return costs


def table_of(costs: Sequence[Cost]) -> Table:
    """The table of the costs of each run; ratios leave out the start."""
    table = Table(title="Attention focus over a corpus, demo model")
    for column in (
        "",
        "documents",
        "tokens",
        "start, s",
        "wall, s",
        "CPU, s",
        "CPU per document, ms",
        "driver grows by, MB",
    ):
        table.add_column(column, justify="right")
    for each in costs:
        figures = f"{each.start:.1f}", f"{each.wall:.1f}", f"{each.cpu:.1f}", f"{1e3 * each.cpu / each.documents:.2f}"
        counts = f"{each.documents:,}", f"{each.tokens:,}"
        table.add_row(each.engine, *counts, *figures, f"{each.driver_growth_mb:.0f}")
    return table


def targets_of(costs: Sequence[Cost], merges: Mapping[str, float]) -> Table:
    """The table of targets: one worker against one process, the cost per document in the longest corpus, and
    adding results.
    """
    table = Table("", "at most", "measured", title="Targets")
    for here, there in zip(costs[: 2 * CORES : 2], costs[1 : 2 * CORES : 2], strict=True):
        ratios = f"{there.wall / here.wall:.2f} (CPU {there.cpu / here.cpu:.2f})"
        table.add_row(f"{there.engine} / {here.engine}, time beyond the start", "1.15", ratios)
    first, last = costs[2 * CORES], costs[-1]
    growth = (last.cpu / last.documents) / (first.cpu / first.documents)
    table.add_row(f"CPU per document, {last.documents:,} / {first.documents:,} documents", "constant", f"{growth:.2f}")
    size = f"{merges['bytes'] / 1e6:.1f} MB"
    table.add_row(f"adding a result of {size}, CPU of the driver", "", f"{1e3 * merges['one_merge']:.1f} ms")
    table.add_row(f"adding {PARTS:,}, CPU of the driver", "", f"{merges['thousand']:.1f} s")
    return table


def main() -> None:
    """Prints the tables and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[2000, 5000, 20_000], help="sizes of the corpora")
    parser.add_argument("--json", type=Path, help="file for every figure")
    given = parser.parse_args()
    about, model = machine(("attnmech", "torch", "ray")), am.load()
    costs, merges = costs_of(model, given.documents), merging(model)
    tables = [table_of(costs), targets_of(costs, merges)]
    console = Console(width=None if Console().is_terminal else 140)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), *tables, sep="\n")
    write(given.json, about, given, tables, costs=list(map(asdict, costs)), merge=merges)


if __name__ == "__main__":
    main()
