"""Measures `prune_heads` with and without streams that are kept from step to step.

    pip install -c constraints.txt .
    python benchmarks/pruning.py --json benchmarks/results/pruning.json

Each step measures every remaining head together with those removed before. In the slowest way, each measurement is a
whole pass; in the intermediate way, it begins at the first block with a removed head. All ways must find the same
order, or nothing is printed. On an idle machine; the defaults take five minutes on two cores.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ablation import PROMPTS, prompts
from measure import alternating_times, in_own_process, machine, write
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, build

if TYPE_CHECKING:
    import attnmech as am

SHARING = "attnmech, prune_heads"
EACH, WHOLE = f"{SHARING}, each from its first removed head", f"{SHARING}, nothing shared"


@dataclass(frozen=True)
class Row:
    """One way to prune one model."""

    shape: str
    layers: int
    tokens: int
    prompts: int
    steps: int
    contender: str
    seconds: list[float]


def times_of(shape: str, layers: int, tokens: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, measured in turns, in a separate process."""
    import attnmech as am
    from attnmech.runs.engine import Engine

    model = am.load(build(SHAPES[shape], tokens, layers))
    ids: Any = prompts(tokens)

    def prune() -> "am.results.PruningCurve":
        return am.prune_heads(model, ids, steps=steps, random=0)

    def from_first_removed() -> "am.results.PruningCurve":
        with patch.object(Engine, "share", _never):
            return prune()

    def nothing_shared() -> "am.results.PruningCurve":
        with patch.object(Engine, "start_of", lambda *_: 0):
            return from_first_removed()

    ways: dict[str, Callable[[], am.results.PruningCurve]] = {
        SHARING: prune, EACH: from_first_removed, WHOLE: nothing_shared,
    }  # fmt: skip
    orders = {name: way().order for name, way in ways.items()}
    if len(set(orders.values())) > 1:
        raise ValueError(f"the orders differ: {orders}")
    return alternating_times(ways, repeats)


def _never(*_: object, **__: object) -> bool:
    return False


def table_of(rows: list[Row]) -> Table:
    """The table that compares all ways."""
    one = rows[0]
    title = f"{SHAPES[one.shape].title} of {one.layers} layers, {one.prompts} prompts of {one.tokens} tokens"
    table = Table(f"{one.steps} steps", title=title, title_justify="left")
    for heading in ("seconds", "(from - to)", "×"):
        table.add_column(heading, justify="right")
    ours = median(one.seconds)
    for row in rows:
        ends = f"{min(row.seconds):.2f} - {max(row.seconds):.2f}"
        table.add_row(row.contender, f"{median(row.seconds):.2f}", ends, f"{median(row.seconds) / ours:.2f}")
    return table


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1, help="rounds (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    about = machine(("attnmech", "torch", "transformers"))
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    case = chosen.shape, chosen.layers, chosen.tokens
    times = in_own_process(times_of, *case, chosen.steps, chosen.repeats)
    rows = [Row(*case, PROMPTS, chosen.steps, name, seconds) for name, seconds in times.items()]
    tables = [table_of(rows)]
    Console().print(tables[0])
    write(chosen.json, about, chosen, tables, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
