"""Compares methods on GPT-2s that were trained to compute programs head by head.

    pip install -c constraints.txt .
    python benchmarks/truth/trained.py --json benchmarks/results/trained.json && python benchmarks/tables.py

The models come from `interchange.py`. Takes about a minute on one idle core. See docs/truth.md.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from measure import machine, write
from rich.console import Console
from rich.table import Table
from torch import Tensor
from truth.interchange import NAMES, answers, inputs_of
from truth.leaderboard import HEADS, PACKAGES, Case, Claims, Row, claims_of, row_of, table_of
from truth.model import load_trained, module_of

from attnmech.reducers import Batch

PAIRS: Final = 24
SEED: Final = 7


@dataclass(frozen=True)
class Answers:
    """Pairs of inputs, and the program's answers on both at the positions at which it has one."""

    clean: Tensor
    corrupted: Tensor
    right: dict[tuple[int, ...], Tensor]
    pairs: dict[tuple[int, ...], tuple[Tensor, Tensor]]
    """For each input, the answers of its pair."""
    ends: dict[tuple[int, ...], tuple[float, float]]
    """For each input, the logit difference of the unchanged model on its pair, corrupted and clean."""

    @classmethod
    def of(cls, case: Case) -> "Answers":
        """Draws pairs with different answers; no input occurs twice."""
        generator = torch.Generator().manual_seed(SEED)
        inputs = inputs_of(case.program, 20 * PAIRS, generator).unique(dim=0)
        inputs = inputs[torch.randperm(len(inputs), generator=generator)]
        with torch.no_grad():
            right = answers(module_of(case.program.compiled)(inputs).logits)
        half = len(inputs) // 2
        differ = ((right[:half] != right[half : 2 * half]) & _both(right[:half], right[half : 2 * half])).any(dim=1)
        places = differ.nonzero()[:PAIRS, 0]
        chosen = torch.cat((places, places + half))
        logits = case.model.run(inputs[chosen], points=["logits"]).logits
        assert logits is not None
        keys = [tuple(row) for row in inputs[chosen].tolist()]
        pairs, ends = {}, {}
        for number in range(PAIRS):
            both = right[places[number]], right[places[number] + half]
            sizes = tuple(float(_difference(logits[at], *both)) for at in (PAIRS + number, number))
            for key in (keys[number], keys[PAIRS + number]):
                pairs[key], ends[key] = both, sizes
        clean, corrupted = inputs[places], inputs[places + half]
        return cls(clean, corrupted, dict(zip(keys, right[chosen], strict=True)), pairs, ends)

    @property
    def inputs(self) -> Tensor:
        """All inputs."""
        return torch.cat((self.clean, self.corrupted))

    def error(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean of −ln p of the program's answers, in nats."""
        losses = []
        for output, ids in zip(logits.double().log_softmax(dim=-1), batch.ids.tolist(), strict=True):
            right = self.right[tuple(ids)]
            there = right != -100
            losses.append(-output[there].gather(1, right[there, None]).mean())
        return torch.stack(losses)

    def restored(self, logits: Tensor, batch: Batch) -> Tensor:
        """How far the logit difference of the two answers lies from that of the corrupted input, 0, towards that of
        the clean input, 1.
        """
        shares = []
        for output, ids in zip(logits.double(), batch.ids.tolist(), strict=True):
            low, high = self.ends[tuple(ids)]
            shares.append((_difference(output, *self.pairs[tuple(ids)]) - low) / (high - low))
        return torch.stack(shares)


def _both(one: Tensor, other: Tensor) -> Tensor:
    return (one != -100) & (other != -100)


def _difference(logits: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The mean logit of one answer minus that of the other, where they differ."""
    there = _both(one, other) & (one != other)
    own = logits[there]
    difference: Tensor = (own.gather(1, one[there, None]) - own.gather(1, other[there, None])).mean()
    return difference


@dataclass(frozen=True)
class TrainedCase(Case):
    """A trained model with its inputs."""

    @cached_property
    def judge(self) -> Answers:  # type: ignore[override]
        """The metrics."""
        return Answers.of(self)

    @cached_property
    def wide(self) -> "TrainedCase":
        """The model in float64."""
        return TrainedCase(*load_trained(self.program.name, torch.float64))


def measured(name: str) -> tuple[list[Row], Claims]:
    """All methods on one model."""
    case, rows = TrainedCase(*load_trained(name)), []
    _ = case.judge, case.wide.judge
    for method, measure in HEADS.items():
        if method.startswith("TransformerLens"):
            continue
        start = perf_counter()
        scores = measure(case)
        seconds = perf_counter() - start
        by_head = dict(np.ndenumerate(scores.nan_to_num(0.0).numpy()))
        rows.append(row_of(method, name, by_head, case.program.circuit, seconds))
    return rows, claims_of(case)


def models_table(claims: list[Claims]) -> Table:
    """The models, with the verdicts on sets of heads."""
    table = Table("model", "layers × heads", "its heads", "its heads are", "unused heads are", title="")
    for own in claims:
        table.add_row(own.program, f"{own.layers} × {own.heads}", ", ".join(own.names), own.true, own.decoys)
    return table


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=NAMES, help="by default all")
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    versions = machine(PACKAGES)
    measurements = [measured(name) for name in chosen.models]
    rows, claims = [row for one, _ in measurements for row in one], [own for _, own in measurements]
    tables = [table_of("Heads of trained models", rows, "heads"), models_table(claims)]
    console = Console(width=None if Console().is_terminal else 170)
    for table in tables:
        console.print(table)
    write(chosen.json, versions, chosen, tables, heads=list(map(asdict, rows)), claims=list(map(asdict, claims)))


if __name__ == "__main__":
    main()
