"""Compares the time and the peak memory of streaming with a plain pass and with other libraries.

    pip install -c constraints.txt . -r benchmarks/requirements.txt
    python benchmarks/streaming.py --json streaming.json

Prints a table for each shape and length, and the targets with the measured figures. On an idle machine; the defaults
need about 20 GB of free memory and about an hour and a half on two cores; `--no-peers --layers 6` less than a tenth of
that. What is and is not measured: benchmarks/README.md.
"""

import argparse
import os
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from contenders import BARE, CACHE, CONTENDERS, FUSED, NEEDS, OURS, PEERS, PLAIN
from measure import StepError, alternating_times, in_own_process, installed, machine, memory_growth, write
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from shapes import SHAPES, Shape, build, token_ids

PACKAGES = ("attnmech", "torch", "transformers", "transformer-lens", "nnsight")
WARM_UP = 16
"""The tokens of a first, unmeasured step, so that no contender's time includes what a process sets up once."""


@dataclass(frozen=True)
class Case:
    """A model and a length."""

    shape: Shape
    tokens: int
    layers: int | None
    """Replaces the shape's own number of layers; None keeps it."""

    @property
    def model_title(self) -> str:
        """The model in words."""
        return self.shape.title + ("" if self.layers is None else f" cut to {self.layers} layers")

    @property
    def title(self) -> str:
        """The title of the case's table."""
        return f"{self.model_title}, {self.tokens} tokens"


@dataclass(frozen=True)
class Row:
    """The cost of one contender in one case."""

    shape: str
    tokens: int
    contender: str
    growth: int | None
    """Peak memory in excess of the loaded model, in bytes."""
    seconds: Sequence[float]
    failure: str = ""
    """Why there is no figure; empty if there is one."""

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
        """Whether the target is met."""
        return "not measured" if self.measured is None else "reached" if self.measured <= self.limit else "MISSED"


def growth_of(case: Case, contender: str) -> int:
    """The memory of one contender's step, in a separate process."""
    step = CONTENDERS[contender](build(case.shape, case.tokens, case.layers))
    ids = token_ids(case.tokens)
    step(ids[:, :WARM_UP])
    return memory_growth(partial(step, ids))


def times_of(case: Case, contenders: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """The times of all contenders' steps, measured in turns, in a separate process, on one set of weights."""
    model = build(case.shape, case.tokens, case.layers)
    ids = token_ids(case.tokens)
    steps = {name: CONTENDERS[name](model) for name in contenders}
    for step in steps.values():
        step(ids[:, :WARM_UP])
    return alternating_times({name: partial(step, ids) for name, step in steps.items()}, repeats)


def measure(case: Case, contenders: Sequence[str], repeats: int, console: Console) -> list[Row]:
    """Measures memory first; a contender without a memory figure is not timed, and its row says why."""
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
    """The ratio of two figures; None unless both were measured."""
    return None if of is None or to is None else of / to


def targets(rows: Sequence[Row], shape: str, middle: int = 2048, long: int = 8192) -> list[Target]:
    """The targets for streaming on a shape."""
    found = {(row.contender, row.tokens): row for row in rows if row.shape == shape}

    def time(of: str, to: str, tokens: int) -> float | None:
        nothing = Row(shape, tokens, "", None, ())
        return ratio(found.get((of, tokens), nothing).time, found.get((to, tokens), nothing).time)

    def memory(of: str, to: str, tokens: int = middle, to_tokens: int = middle) -> float | None:
        nothing = Row(shape, tokens, "", None, ())
        return ratio(found.get((of, tokens), nothing).growth, found.get((to, to_tokens), nothing).growth)

    near, far = (found.get((OURS, tokens), Row(shape, tokens, OURS, None, ())) for tokens in (middle, long))
    wanted = [
        Target(f"time / plain forward, {middle} tokens", 0.65, time(OURS, PLAIN, middle)),
        Target(f"time / fused attention, {middle} tokens", 1.15, time(OURS, FUSED, middle)),
        Target(f"time / run_with_cache, {middle} tokens", 0.8, time(OURS, CACHE, middle)),
        Target(f"memory / plain forward, {middle} tokens", 0.6, memory(OURS, PLAIN)),
        Target(f"memory / run_with_cache, {middle} tokens", 1 / 25, memory(OURS, CACHE)),
        Target(f"time at {long} / at {middle} tokens", (long / middle) ** 2, ratio(far.time, near.time)),
        Target(f"memory at {long} / at {middle} tokens", 4.5, memory(OURS, OURS, long)),
    ]
    return [target for target in wanted if target.measured is not None]


def table_of(case: Case, rows: Sequence[Row]) -> Table:
    """One shape at one length; ratios are to the plain forward."""
    table = Table("", title=case.title, title_justify="left", caption_justify="left")
    for heading in ("seconds", "(from - to)", "× plain", "× pass", "memory, GB", "× plain"):
        table.add_column(heading, justify="right")
    nothing = Row(case.shape.name, case.tokens, "", None, ())
    eager, bare = (next((row for row in rows if row.contender == name), nothing) for name in (PLAIN, BARE))
    for row in rows:
        table.add_row(
            row.contender,
            written(row.time, 3),
            f"{min(row.seconds):.3f} - {max(row.seconds):.3f}" if row.seconds else "",
            written(ratio(row.time, eager.time), 2),
            written(ratio(row.time, bare.time), 2),
            written(ratio(row.growth, 1e9), 3),
            written(ratio(row.growth, eager.growth), 2),
        )
    table.caption = "\n".join(escape(f"{row.contender}: {row.failure}") for row in rows if row.failure) or None
    return table


def table_of_targets(title: str, wanted: Sequence[Target]) -> Table:
    """The table of targets and measured ratios."""
    table = Table("target", "at most", "measured", "", title=f"{title}: targets", title_justify="left")
    for target in wanted:
        table.add_row(target.name, written(target.limit, 3), written(target.measured, 3), target.verdict)
    return table


def written(value: float | None, digits: int) -> str:
    """A number for a table; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="lengths for all contenders")
    parser.add_argument("--ours-to", type=int, default=8192, help="a further length for attnmech alone, once; 0: none")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peers", action=BooleanOptionalAction, default=True, help="those that hand out patterns, too")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the times (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each process (default %(default)s)")
    parser.add_argument("--layers", type=int, help="layers in place of each shape's own, to take less time")
    parser.add_argument("--json", type=Path, help="file for every figure")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes the results."""
    chosen = arguments()
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    console = Console(width=None if Console().is_terminal else 150)
    about = machine(PACKAGES)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    rows: list[Row] = []
    tables: list[Table] = []
    everyone = [name for name in installed(CONTENDERS, NEEDS) if chosen.peers or name not in PEERS]
    ours = [name for name in everyone if name in (OURS, BARE)]
    for name in chosen.shapes:
        lengths = dict.fromkeys(chosen.tokens, everyone)
        if chosen.ours_to:
            lengths.setdefault(chosen.ours_to, ours)
        for tokens, contenders in lengths.items():
            case = Case(SHAPES[name], tokens, chosen.layers)
            measured = measure(case, contenders, 1 if contenders is ours else chosen.repeats, console)
            rows += measured
            tables.append(table_of(case, measured))
            console.print(tables[-1])
        if reached := targets(rows, name):
            title = Case(SHAPES[name], 0, chosen.layers).model_title
            tables.append(table_of_targets(title, reached))
            console.print(tables[-1])
    write(chosen.json, about, chosen, tables, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
