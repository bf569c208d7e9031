"""What streaming costs beside a plain pass and beside the peers: time and peak memory.

    pip install -c constraints.txt . -r benchmarks/requirements.txt
    python benchmarks/streaming.py --json streaming.json

Prints a table for each shape and length, and the targets with what was measured. On an idle machine; the defaults
need about 20 GB of free memory and about an hour on two cores. What is and is not measured: benchmarks/README.md.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from contenders import CACHE, CONTENDERS, FUSED, OURS, PLAIN
from measure import StepError, alternating_times, in_own_process, machine, memory_growth
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from shapes import SHAPES, Shape, build, token_ids

PACKAGES = ("attnmech", "torch", "transformers", "transformer-lens", "nnsight")
WARM_UP = 16
"""Tokens of a first, unmeasured step, so that nobody pays for what is set up once in a process."""


@dataclass(frozen=True)
class Case:
    """A model and a length."""

    shape: Shape
    tokens: int
    layers: int | None
    """In place of the shape's own number of layers."""

    @property
    def title(self) -> str:
        """What stands over its table."""
        cut = "" if self.layers is None else f" cut to {self.layers} layers"
        return f"{self.shape.title}{cut}, {self.tokens} tokens"


@dataclass(frozen=True)
class Row:
    """What one contender took for one case."""

    shape: str
    tokens: int
    contender: str
    growth: int | None
    """Bytes of peak memory over the loaded model."""
    seconds: Sequence[float]
    failure: str = ""
    """Why there is no figure."""

    @property
    def time(self) -> float | None:
        """The median of the rounds, in seconds."""
        return median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Target:
    """A ratio that should not be exceeded."""

    name: str
    limit: float
    measured: float | None

    @property
    def verdict(self) -> str:
        """Whether it is reached."""
        return "not measured" if self.measured is None else "reached" if self.measured <= self.limit else "MISSED"


def growth_of(case: Case, contender: str) -> int:
    """The memory of one contender's step; in a process of its own."""
    step = CONTENDERS[contender](build(case.shape, case.tokens, case.layers))
    ids = token_ids(case.tokens)
    step(ids[:, :WARM_UP])
    return memory_growth(partial(step, ids))


def times_of(case: Case, contenders: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """The times of all contenders' steps, in turns; in a process of their own, on one set of weights."""
    model = build(case.shape, case.tokens, case.layers)
    ids = token_ids(case.tokens)
    steps = {name: CONTENDERS[name](model) for name in contenders}
    for step in steps.values():
        step(ids[:, :WARM_UP])
    return alternating_times({name: partial(step, ids) for name, step in steps.items()}, repeats)


def measure(case: Case, contenders: Sequence[str], repeats: int, console: Console) -> list[Row]:
    """Memory first: who has no memory figure is not timed, and says why."""
    growth, failures = {}, {}
    for name in contenders:
        with console.status(f"{case.title}: memory of {name}"):
            try:
                growth[name] = in_own_process(growth_of, case, name)
            except StepError as error:
                failures[name] = str(error)
    times: dict[str, list[float]] = {}
    with console.status(f"{case.title}: times"):
        try:
            times = in_own_process(times_of, case, list(growth), repeats)
        except StepError as error:
            failures |= dict.fromkeys(growth, f"not timed: {error}")
    return [
        Row(case.shape.name, case.tokens, name, growth.get(name), times.get(name, ()), failures.get(name, ""))
        for name in contenders
    ]


def ratio(of: float | None, to: float | None) -> float | None:
    """One figure over another, where both were measured."""
    return None if of is None or to is None else of / to


def targets(rows: Sequence[Row], short: int = 2048, long: int = 8192) -> list[Target]:
    """What streaming should reach on the BLOOM shape."""
    nothing = Row("bloom", short, "", None, ())
    found = {(row.contender, row.tokens): row for row in rows if row.shape == "bloom"}
    ours, far = found.get((OURS, short), nothing), found.get((OURS, long), nothing)
    eager, flash, cache = (found.get((name, short), nothing) for name in (PLAIN, FUSED, CACHE))
    return [
        Target("time / plain forward", 1.1, ratio(ours.time, eager.time)),
        Target("time / fused attention (an aim)", 1.33, ratio(ours.time, flash.time)),
        Target("time / run_with_cache", 0.8, ratio(ours.time, cache.time)),
        Target("memory / run_with_cache", 1 / 25, ratio(ours.growth, cache.growth)),
        Target("memory / plain forward", 1.0, ratio(ours.growth, eager.growth)),
        Target(f"memory at {long} / at {short} tokens", 4.5, ratio(far.growth, ours.growth)),
    ]


def table_of(case: Case, rows: Sequence[Row]) -> Table:
    """One shape at one length; ratios are to the plain forward."""
    table = Table("", title=case.title, title_justify="left", caption_justify="left")
    for heading in ("seconds", "(from - to)", "x plain", "memory, GB", "x plain"):
        table.add_column(heading, justify="right")
    eager = next((row for row in rows if row.contender == PLAIN), Row(case.shape.name, case.tokens, PLAIN, None, ()))
    for row in rows:
        table.add_row(
            row.contender,
            written(row.time, 3),
            f"{min(row.seconds):.3f} - {max(row.seconds):.3f}" if row.seconds else "",
            written(ratio(row.time, eager.time), 2),
            written(ratio(row.growth, 1e9), 3),
            written(ratio(row.growth, eager.growth), 2),
        )
    table.caption = "\n".join(escape(f"{row.contender}: {row.failure}") for row in rows if row.failure) or None
    return table


def table_of_targets(wanted: Sequence[Target]) -> Table:
    """Each target beside what was measured."""
    table = Table("", "at most", "measured", "", title="Targets: BLOOM-560m, 2048 tokens", title_justify="left")
    for target in wanted:
        table.add_row(target.name, written(target.limit, 3), written(target.measured, 3), target.verdict)
    return table


def written(value: float | None, digits: int) -> str:
    """A number for a table, empty where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="lengths for all contenders")
    parser.add_argument("--ours-to", type=int, default=8192, help="a further length for attnmech alone; 0 for none")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the times (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each process (default %(default)s)")
    parser.add_argument("--layers", type=int, help="layers in place of each shape's own, to try the script out")
    parser.add_argument("--json", type=Path, help="file for every figure")
    return parser.parse_args()


def main() -> None:
    """Measures, prints, writes."""
    chosen = arguments()
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    console = Console(width=None if Console().is_terminal else 150)
    about = machine(PACKAGES)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    rows: list[Row] = []
    for name in chosen.shapes:
        lengths = {tokens: list(CONTENDERS) for tokens in chosen.tokens}
        if chosen.ours_to:
            lengths.setdefault(chosen.ours_to, [OURS])
        for tokens, contenders in lengths.items():
            case = Case(SHAPES[name], tokens, chosen.layers)
            measured = measure(case, contenders, chosen.repeats, console)
            console.print(table_of(case, measured))
            rows += measured
    reached = targets(rows if chosen.layers is None else [])
    console.print(table_of_targets(reached))
    if chosen.json is not None:
        figures = {
            "machine": about,
            "settings": {name: value for name, value in vars(chosen).items() if name != "json"},
            "rows": [asdict(row) for row in rows],
            "targets": [asdict(target) | {"verdict": target.verdict} for target in reached],
        }
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
