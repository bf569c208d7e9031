"""Compares methods on compiled programs with known heads and edges.

    pip install -c constraints.txt .
    python benchmarks/truth/leaderboard.py --json benchmarks/results/truth.json && python benchmarks/tables.py

Each method scores the heads (or edges) of every program; a perfect method scores those of the program above all others.
Takes about four minutes on one idle core. See docs/truth.md.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from measure import machine, write
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score
from torch import Tensor
from truth.judge import Judge
from truth.model import NAMES, Edge, Head, Program, load
from truth.peer import Peer

import attnmech as am

PACKAGES: Final = ("attnmech", "torch", "transformers", "transformer-lens")
LEAST: Final = 0.01
"""A head or edge is named if patching it restores this share of the output or, for other methods, if its score is at
least this share of the program's largest."""
ATTENDS: Final = 0.3
"""A method that looks at attention alone names a head if it gives at least this share of it to a type's targets."""
STRONGEST: Final = 200
OTHERS: Final = 100
"""Exact effects are measured for the strongest edges by integrated gradients, and for other edges at random."""
RESAMPLES: Final = 10_000
SETS: Final = 200
"""Sets of heads that `am.confirm_heads` compares at most."""
FLAT: Final = {"induction": "induction, the head that shifts tokens", "histogram": "histogram, its only head"}
"""Programs whose L0H0 acts through saturated attention or through steps of an MLP."""
Scores = Mapping[Any, float]


@dataclass(frozen=True)
class Case:
    """One program with its inputs."""

    model: am.HookedModel
    program: Program

    @cached_property
    def judge(self) -> Judge:
        """The metrics."""
        clean, corrupted = (self.program.tensors[name].long() for name in ("clean", "corrupted"))
        return Judge.of(self.model, clean, corrupted)

    @cached_property
    def peer(self) -> Peer:
        """The program in TransformerLens."""
        return Peer(self.program, self.judge)

    @cached_property
    def wide(self) -> "Case":
        """The program in float64, in which relevance is conserved despite the slopes of the MLPs."""
        return Case(*load(self.program.name, torch.float64))

    def ablated(self, method: str) -> Tensor:
        """The mean absolute change of the output without each head."""
        options = {"reference": self.judge.inputs} if method == "mean" else {}
        return am.ablate_heads(
            self.model, self.judge.inputs, method=method, metric=self.judge.error, **options
        ).effect  # fmt: skip

    def patched(self, call: Callable[..., Any], **options: Any) -> Tensor:
        """The share of the output that a call of attnmech finds for each head, in pairs of prompts."""
        judge = self.judge
        effect: Tensor = call(self.model, judge.clean, judge.corrupted, metric=judge.restored, **options).effect
        return effect

    def edges(self, method: str, *, exact: bool = False) -> Scores:
        """The estimate for each edge, or the exact effect of those that are measured."""
        judge = self.judge
        prompts = self.model, judge.clean, judge.corrupted
        options = {"metric": judge.restored, "nodes": "heads+mlps", "edges": True, "method": method}
        result = am.attribute(*prompts, **options)
        if exact:
            confirm = min(STRONGEST, len(result.edges))
            result = am.attribute(*prompts, **options, confirm=confirm, controls=OTHERS)
        frame = result.to_frame()
        if exact:
            frame = frame[frame.exact.notna()]
        effects = frame.exact if exact else frame.effect
        return dict(zip(zip(frame.sender, frame.receiver, strict=True), effects, strict=True))


def typed(case: Case) -> Tensor:
    """The highest score of a type that looks elsewhere than at the token itself."""
    scores = am.head_types(case.model, case.judge.inputs).scores
    return torch.stack([scores[name].nan_to_num(0.0) for name in ("previous", "duplicate", "induction")]).amax(dim=0)


HEADS: Final[Mapping[str, Callable[[Case], Tensor]]] = {
    "attnmech, ablate_heads, zero": lambda case: case.ablated("zero"),
    "attnmech, ablate_heads, mean": lambda case: case.ablated("mean"),
    "attnmech, patch": lambda case: case.patched(am.patch),
    "attnmech, path_patch to the logits": lambda case: case.patched(am.path_patch),
    "attnmech, attribute, gradient": lambda case: case.patched(am.attribute),
    "attnmech, attribute, integrated": lambda case: case.patched(am.attribute, method="integrated"),
    "attnmech, attribute, relp": lambda case: case.wide.patched(am.attribute, method="relp"),
    "attnmech, residual_updates, size": lambda case: am.residual_updates(case.model, case.judge.inputs).magnitude,
    "attnmech, head_types": typed,
    "TransformerLens, attribution_patch": lambda case: case.peer.attribution(),
    "TransformerLens, detect_head": lambda case: case.peer.detected(),
}
EDGES: Final[Mapping[str, Callable[[Case], Scores]]] = {
    "attnmech, attribute(edges=True), exact": lambda case: case.edges("integrated", exact=True),
    "attnmech, attribute(edges=True), gradient": lambda case: case.edges("gradient"),
    "attnmech, attribute(edges=True), integrated": lambda case: case.edges("integrated"),
    "attnmech, attribute(edges=True), relp": lambda case: case.wide.edges("relp"),
}


@dataclass(frozen=True)
class Row:
    """How one method does on one program."""

    method: str
    program: str
    auc: float
    precision: float
    """The share of true ones among as many with the highest scores; ties in expectation."""
    hits: int
    """The true ones that are named."""
    true: int
    false: int
    """The others that are named."""
    others: int
    seconds: float
    scores: dict[str, float]
    """The scores of the true ones."""


def patches(method: str) -> bool:
    """Whether a method's scores are shares of the output that patching restores, or estimates of that."""
    return "patch" in method or "attribute" in method


def row_of(method: str, program: str, scores: Scores, true: Collection[Hashable], seconds: float) -> Row:
    """Compares scores with the truth."""
    sizes = {key: abs(score) for key, score in scores.items()}
    if missing := set(true) - set(sizes):
        raise ValueError(f"{method} has no score of {sorted(map(str, missing))}")
    labels, values = [key in true for key in sizes], list(sizes.values())
    least = sorted(values, reverse=True)[len(true) - 1]
    above = [label for label, value in zip(labels, values, strict=True) if value > least]
    ties = [label for label, value in zip(labels, values, strict=True) if value == least]
    expected = sum(above) + (len(true) - len(above)) * mean(ties)
    bound = LEAST if patches(method) else LEAST * max(values)
    bound = ATTENDS if method.endswith(("head_types", "detect_head")) else bound
    above_bound = {key for key, size in sizes.items() if size >= bound > 0}
    return Row(
        method, program, roc_auc_score(labels, values), expected / len(true), len(above_bound & set(true)), len(true),
        len(above_bound - set(true)), len(sizes) - len(true), seconds,
        {str(key): float(scores[key]) for key in sorted(true)},
    )  # fmt: skip


@dataclass(frozen=True)
class Claims:
    """What `am.confirm_heads` says about the program's heads, and about as many decoys in the same layers."""

    program: str
    summary: str
    layers: int
    heads: int
    names: list[str]
    edges: int
    true: str
    decoys: str


def claims_of(case: Case) -> Claims:
    """Tests the true set and a false one; each input is a separate group."""
    program, judge = case.program, case.judge
    cases = [am.Case(tuple(ids), group=str(number)) for number, ids in enumerate(judge.inputs.tolist())]
    task = am.Task(program.name, cases, metric=judge.error, higher_is_better=False)
    true = sorted(program.circuit)
    decoys = [(layer, program.n_heads - 1 - head) for layer, head in true]
    verdicts = [am.confirm_heads(case.model, heads, task, sets=SETS).verdict for heads in (true, decoys)]
    names = [f"L{head['layer']}H{head['head']} {head['name']}" for head in program.heads]
    return Claims(
        program.name, program.about, program.n_layers, program.n_heads, names, len(program.edges), *verdicts
    )  # fmt: skip


def measured(name: str) -> tuple[list[Row], list[Row], Claims]:
    """All methods on one program."""
    case = Case(*load(name))
    _ = case.judge, case.peer, case.wide.judge
    program, heads, edges = case.program, [], []
    for method, measure in HEADS.items():
        start = perf_counter()
        scores = measure(case)
        seconds = perf_counter() - start
        by_head: dict[Head, float] = dict(np.ndenumerate(scores.nan_to_num(0.0).numpy()))
        heads.append(row_of(method, name, by_head, program.circuit, seconds))
    true: set[Edge] = {(edge["writer"], edge["reader"]) for edge in program.edges if edge["varies"]}
    for method, score in EDGES.items():
        start = perf_counter()
        scores_of_edges = score(case)
        edges.append(row_of(method, name, scores_of_edges, true, perf_counter() - start))
    return heads, edges, claims_of(case)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile interval of the mean, from bootstrap samples of programs."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def table_of(title: str, rows: Sequence[Row], things: str) -> Table:
    """One row per method, over all programs."""
    table = Table("", title=title, title_justify="left")
    for heading in ("AUC", "(95 %)", "precision", "(95 %)", f"{things} named", f"other {things} named", "s"):
        table.add_column(heading, justify="right")
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        cells = []
        for values in ([row.auc for row in own], [row.precision for row in own]):
            low, high = interval(values)
            cells += [f"{mean(values):.2f}", f"{low:.2f} - {high:.2f}"]
        hits, true, false, others = (
            sum(getattr(row, name) for row in own) for name in ("hits", "true", "false", "others")
        )
        table.add_row(
            method, *cells, f"{hits} of {true}", f"{false:,} of {others:,}", f"{sum(row.seconds for row in own):.1f}"
        )
    return table


def programs_table(claims: Sequence[Claims]) -> Table:
    """The programs, with the verdicts on sets of heads."""
    table = Table(
        "program", "computes", "layers × heads", "its heads", "edges", "its heads are", "decoys are", title=""
    )
    for own in claims:
        size = f"{own.layers} × {own.heads}"
        table.add_row(own.program, own.summary, size, ", ".join(own.names), str(own.edges), own.true, own.decoys)
    return table


def flat_table(rows: Sequence[Row]) -> Table:
    """The effects of two heads that gradients do not see."""
    table = Table("", *FLAT.values(), title="Two effects", title_justify="left")
    effects = {(row.method, row.program): row.scores.get("(0, 0)", math.nan) for row in rows if patches(row.method)}
    for method in dict.fromkeys(method for method, _ in effects):
        table.add_row(method, *(f"{effects.get((method, name), math.nan):.2g}" for name in FLAT))
    return table


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=NAMES, help="by default all")
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    versions = machine(PACKAGES)
    measurements = [measured(name) for name in chosen.programs]
    heads, edges = ([row for one in measurements for row in one[place]] for place in (0, 1))
    claims = [one[2] for one in measurements]
    tables = [table_of("Heads", heads, "heads"), flat_table(heads), table_of("Edges", edges, "edges")]
    tables.append(programs_table(claims))
    console = Console(width=None if Console().is_terminal else 170)
    for table in tables:
        console.print(table)
    write(
        chosen.json,
        versions,
        chosen,
        tables,
        heads=list(map(asdict, heads)),
        edges=list(map(asdict, edges)),
        claims=list(map(asdict, claims)),
    )


if __name__ == "__main__":
    main()
