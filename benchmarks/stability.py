"""Measures how often `stability` calls an edge stable that is none: random models, compiled programs, planted effects.

    pip install -c constraints.txt .
    python benchmarks/stability.py --json benchmarks/results/stability.json && python benchmarks/tables.py

In random models, the answers of each pair are drawn at random, so that the sign of every estimate is arbitrary and no
edge may be stable. In compiled programs, only the program's edges may be. Takes about ten minutes on one core.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from measure import machine, write
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from truth.judge import Judge
from truth.model import NAMES, load

import attnmech as am
from attnmech.maths.intervals import TextMeans
from attnmech.methods.attribution.estimates import by_size
from attnmech.methods.attribution.stability import frequency_and_overlap

PAIRS, TOKENS, VOCABULARY, SIZE, DRAWS = 24, 8, 50, 10, 50
RANDOM: Final = "random answers, tokens exchanged at random"
SAME: Final = "one answer and one exchange of tokens in all pairs"
NOUNS: Final = "nouns in plural and singular, always are against is"
WORDS: Final = (
    "anchor", "apple", "basket", "bell", "boat", "book", "bottle", "button", "candle", "card", "chair", "clock", "cup",
    "drum", "flag", "hammer", "key", "ladder", "lamp", "letter", "map", "mirror", "net", "pencil",
)  # fmt: skip
"""Nouns whose singular and plural are one token each in the demo model."""


@dataclass(frozen=True)
class Row:
    """The edges of one model, or one program."""

    case: str
    edges: int
    stable: int
    """The number of stable edges that should be."""
    false: int
    """The number of stable edges that should not be."""
    frequent: int
    false_frequent: int
    true: int
    jaccard: float


def row_of(case: str, attribution: am.results.EdgeAttribution, true: set[tuple[str, str]], size: int) -> Row:
    """Counts the stable edges, and those chosen often whatever their signs."""
    stability = attribution.stability(size, draws=DRAWS)
    stable = set(stability.circuit.edges or ())
    often = (stability.frequency >= stability.threshold).nonzero()[:, 0].tolist()
    frequent = {attribution.graph.names[place] for place in often}
    counts = (len(kept) for edges in (stable, frequent) for kept in (edges & true, edges - true))
    return Row(case, len(stability.names), *counts, len(true), stability.jaccard)


def nouns(model: am.HookedModel, case: str) -> Row:
    """A model of English, on pairs that differ in the number of a noun."""
    prompts = [f"The {word}s to the chest" for word in WORDS], [f"The {word} to the chest" for word in WORDS]
    answers = {"answers": [" are"] * PAIRS, "against": [" is"] * PAIRS}
    attribution = am.attribute(model, *prompts, nodes="heads+mlps", edges=True, **answers)
    assert isinstance(attribution, am.results.EdgeAttribution)
    return row_of(case, attribution, set(), SIZE)


def random_model(case: str, seed: int) -> Row:
    """A GPT-2 with random weights, on pairs of random tokens."""
    if case == NOUNS:
        return nouns(am.untrained(am.load(), seed), case)
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=VOCABULARY, n_positions=16, initializer_range=0.2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = am.load(GPT2LMHeadModel(config).eval())
    clean = torch.randint(VOCABULARY, (PAIRS, TOKENS))
    corrupted, answers = clean.clone(), torch.stack([torch.randperm(VOCABULARY)[:2] for _ in range(PAIRS)])
    if case == RANDOM:
        at = torch.randint(TOKENS, (PAIRS,))
        corrupted[torch.arange(PAIRS), at] = (clean[torch.arange(PAIRS), at] + 1) % VOCABULARY
    else:
        clean[:, -1], corrupted[:, -1], answers[:] = 1, 2, answers[0]
    right, wrong = answers.T.tolist()
    prompts = clean, corrupted
    attribution = am.attribute(model, *prompts, nodes="heads+mlps", edges=True, answers=right, against=wrong)
    assert isinstance(attribution, am.results.EdgeAttribution)
    return row_of(case, attribution, set(), SIZE)


def programs(method: str) -> Iterator[Row]:
    """The fifteen compiled programs, with circuits of three times their number of edges."""
    for name in NAMES:
        model, program = load(name)
        judge = Judge.of(model, *(program.tensors[side].long() for side in ("clean", "corrupted")))
        options = {"metric": judge.restored, "nodes": "heads+mlps", "edges": True, "method": method}
        true = {(edge["writer"], edge["reader"]) for edge in program.edges if edge["varies"]}
        yield row_of(
            f"{name}, {method}", am.attribute(model, judge.clean, judge.corrupted, **options), true, 3 * len(true)
        )


PLANTED: Final = {
    "no effect, sizes of all kinds": (torch.zeros(200), torch.linspace(-3, 3, 200).exp()),
    "effects that decay slowly": (2 / torch.arange(1, 201) ** 0.7, torch.ones(200)),
    "20 effects, from 2 to 0.3 SD": (torch.cat((torch.linspace(2, 0.3, 20), torch.zeros(180))), torch.ones(200)),
}
"""The mean and the standard deviation of each of 200 effects."""


def coverage(case: str, texts: int, runs: int) -> tuple[str, str, str, str]:
    """The share of intervals of the Jaccard index that hold its mean over new samples of texts."""
    mean, deviation = PLANTED[case]
    generator = torch.Generator().manual_seed(texts)

    def sample() -> TextMeans:
        values = torch.randn(200, texts, generator=generator)
        return TextMeans.of_values(mean[:, None] + deviation[:, None] * values)

    def chosen(values: Tensor) -> list[int]:
        return by_size(values)[:SIZE]

    measured = [frequency_and_overlap(sample(), chosen, DRAWS, seed=run)[1:] for run in range(runs)]
    # Each value is unbiased for the mean over samples.
    truth = float(np.mean([value for value, _ in measured]))
    held = np.mean([low <= truth <= high for _, (low, high) in measured])
    width = np.mean([high - low for _, (low, high) in measured])
    return case, str(texts), f"{truth:.2f}", f"{held:.2f} ({width:.2f} wide)"


def table_of_random(groups: dict[str, list[Row]]) -> Table:
    """One row per kind of pairs."""
    table = Table("pairs", title="Random models", title_justify="left")
    for heading in ("models", "edges of each", "models with stable edges", "stable edges per model",
                    "models with frequent edges", "Jaccard"):  # fmt: skip
        table.add_column(heading, justify="right")
    for name, rows in groups.items():
        stable = [row.false for row in rows]
        often = sum(row.false_frequent > 0 for row in rows)
        cells = (
            str(len(rows)),
            f"{rows[0].edges:,}",
            str(sum(map(bool, stable))),
            f"{np.mean(stable):.2f}",
            str(often),
        )
        table.add_row(name, *cells, f"{np.mean([row.jaccard for row in rows]):.2f}")
    return table


def table_of_programs(groups: dict[str, list[Row]]) -> Table:
    """One row per method."""
    table = Table("estimates", title="Stable edges of programs", title_justify="left")
    for heading in ("its edges, stable", "other edges, stable", "its edges, frequent", "other edges, frequent"):
        table.add_column(heading, justify="right")
    for name, rows in groups.items():
        true, edges = sum(row.true for row in rows), sum(row.edges for row in rows)
        stable, false, frequent, others = (
            sum(getattr(row, field) for row in rows) for field in ("stable", "false", "frequent", "false_frequent")
        )
        of_others = f"of {edges - true:,}"
        table.add_row(
            name, f"{stable} of {true}", f"{false} {of_others}", f"{frequent} of {true}", f"{others} {of_others}"
        )  # fmt: skip
    return table


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=400, help="random models")
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    versions = machine(("attnmech", "torch", "transformers"))
    at_random = {
        RANDOM: [random_model(RANDOM, seed) for seed in range(chosen.models)],
        NOUNS: [random_model(NOUNS, seed) for seed in range(chosen.models // 4)],
        SAME: [random_model(SAME, seed) for seed in range(chosen.models // 4)],
        "the demo model as trained, the same nouns": [nouns(am.load(), "demo")],
    }
    compiled = {method: list(programs(method)) for method in ("gradient", "integrated")}
    held = Table(
        "effects", "pairs", "Jaccard", "coverage", title="Intervals of the Jaccard index", title_justify="left"
    )
    for case in PLANTED:
        for texts in (12, 24, 60):
            held.add_row(*coverage(case, texts, chosen.models // 2))
    tables = [table_of_random(at_random), table_of_programs(compiled), held]
    for table in tables:
        Console(width=None if Console().is_terminal else 170).print(table)
    rows = [asdict(row) for groups in (at_random, compiled) for group in groups.values() for row in group]
    write(chosen.json, versions, chosen, tables, rows=rows)


if __name__ == "__main__":
    main()
