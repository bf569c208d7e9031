"""Attribution patching: estimates of `am.patch` for every head and MLP, from a few passes.

Formulas: docs/formulas.md#attribution.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Self, Unpack

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import finite_number, flag, option, whole_number
from ...basics.fields import check_layers
from ...basics.public import public
from ...batch import every_bos
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...errors import InputError
from ...interventions import Intervention, Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.points import MAX_BYTES
from ...results.by_layer import by_layer, shared_layers
from ...results.circuit import Circuit
from ...results.graph import Graph
from ...results.sentences import PALE, for_map, in_words
from ...results.table import framed
from ...runs.ablations import checked_seed, reread
from ...runs.corpus import CorpusBatch
from ...runs.edge_passes import patched_edges
from ...runs.gradients import tokens_at_once
from ...runs.metrics import Metric, MetricLike
from ...runs.options import MeasuringOptions
from ...runs.progress import steps as progress_bar
from ...runs.prompt_pairs import PromptPairs
from ...runs.residual_graph import OF_SENDERS, graph_of, require_one_sum
from ...runs.sweep import batches_of, judge_of, run_sweep, tokens_of
from .estimates import EdgeAttribution, Estimates, by_size
from .formulas import METHODS
from .relevance import relevance_rules
from .sums import EdgeEstimator, Estimator, NodeEstimator

NODES: Final = {"heads": ("z",), "heads+mlps": ("z", "mlp_out")}
"""The sets of nodes, with the points at which their nodes write."""

Place = tuple[int, ...]
"""(layer, number) of a node: a head or, after the last head, the MLP; or the number of an edge."""


@dataclass(frozen=True, repr=False)
class Attribution(Estimates):
    """Estimates of the effects on a metric of giving one node of the corrupted run its clean output.

    The nodes of a layer are its heads and, with nodes="heads+mlps", its MLP, which is the last node of the layer.
    `effect [layer node]` estimates the effect of `am.patch`, in the metric's unit; intervals are over pairs of prompts.
    They contain the spread over pairs, not the error of the estimate, which `confirmation` measures.
    """

    layers: tuple[int, ...]
    """The layers with estimates; those of the other layers are NaN."""

    def _check(self) -> None:
        super()._check()
        check_layers(self.layers, len(self.per_pair))
        option("nodes", self.nodes, NODES)

    @property
    def _n_heads(self) -> int:
        return self.per_pair.shape[1] - (self.nodes == "heads+mlps")

    def _chosen(self, values: Float[Tensor, " row"], size: int) -> list[int]:
        return by_size(values)[:size]

    def _circuit_of(self, rows: Sequence[int]) -> Circuit:
        places = torch.stack(self._places.index, dim=1).tolist()
        return Circuit(nodes=tuple(self._name_of(places[row]) for row in rows))

    def _ends_of(self, index: Int[Tensor, "axis place"]) -> Mapping[str, Sequence[Any]]:
        layers, nodes = index.tolist()
        heads = pd.array([node if node < self._n_heads else None for node in nodes], dtype="Int64")  # none in an MLP
        return {"layer": layers, "head": heads}

    def by_head(self) -> pd.DataFrame:
        """The rows of `to_frame` about heads."""
        frame = self.to_frame()
        heads = frame.dropna(subset="head").astype({"head": "int64"}).reset_index(drop=True)
        heads.attrs = frame.attrs
        return heads

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Layers × heads, coloured by the estimate, with intervals in the hover; figure="mlps" draws the MLPs."""
        known = ("heads", "mlps") if self.nodes == "heads+mlps" else ("heads",)
        of_mlps = figure is not None and option("figure", figure, known) == "mlps"
        columns = slice(self._n_heads, None) if of_mlps else slice(self._n_heads)
        shown: dict[str, Any] = {
            name: value[:, columns] if isinstance(value, np.ndarray) else value
            for name, value in for_map(self._main.means, self.layers).items()
        }
        label = self._label_of(self._MAIN)
        drawn = effect_map(**shown, layers=self.layers, label=label, columns="MLP" if of_mlps else "head")
        return framed(drawn, self.layers, layer, head)

    @property
    def _things(self) -> str:
        return "heads" if self.nodes == "heads" else "nodes"

    @property
    def _title(self) -> str:
        return f"Attribution of {in_words(self.metric)} to {self.nodes.replace('+', ' and ').replace('mlps', 'MLPs')}"

    def _sections(self) -> "Sequence[Section]":
        reading = f"Each cell is one node, patched alone, to first order{PALE}."
        figures = {"heads": self.plot()}
        if self.nodes == "heads+mlps":
            figures["mlps"] = self.plot("mlps")
        return [Section("Estimates", reading, figures, "attribution.plot()"), *self._exact_sections()]

    def _name_of(self, place: Sequence[int]) -> str:
        layer, node = place
        return f"L{layer}H{node}" if node < self._n_heads else f"L{layer} MLP"

    def _minus(self, other: Self, paired: bool) -> Self:
        return replace(super()._minus(other, paired), layers=shared_layers(self.layers, other.layers))


@public
def attribute(
    model: HookedModel,
    clean: Inputs | Iterable[Inputs],
    corrupted: Inputs | Iterable[Inputs],
    *,
    method: str = "gradient",
    nodes: str = "heads",
    edges: bool = False,
    metric: MetricLike = "logit_difference",
    steps: int = 5,
    layers: Iterable[int] | None = None,
    confirm: int = 0,
    controls: int = 20,
    seed: int = 0,
    **options: Unpack[MeasuringOptions],
) -> "Attribution | EdgeAttribution":
    """Estimates the effect of patching each head and MLP, or each edge between them, from gradients; `confirm` measures
    the strongest.

    >>> import attnmech as am
    >>> prompts = am.load(), ["The keys to the chest"], ["The key to the chest"]
    >>> attribution = am.attribute(*prompts, answers=[" are"], against=[" is"], confirm=6)
    >>> confirmation = attribution.confirmation
    >>> attribution.effect.shape             # estimates am.patch(...).effect
    torch.Size([4, 8])

    As in `am.patch`, the corrupted prompt is run with the output of one node replaced by its output u' in the clean
    run, at all positions. The estimate is Σ (u' − u) · g over positions, where u is the node's output in the corrupted
    run (z of a head, the output of an MLP):

    - method="gradient": g is the gradient of the metric at u in the corrupted run. Costs a pass over the clean prompts,
      and a forward and a backward pass over the corrupted ones, for all nodes together;
    - method="integrated": g is the mean of the gradients at the midpoints of `steps` equal parts of the line from the
      corrupted run's stream to the clean run's, at the start of the first layer with attention. It sees effects that
      set in only between the two runs; costs a further forward and backward pass per step;
    - method="relp": g is the coefficient of relevance propagation. The backward pass takes the scales of norms and the
      patterns as constants, an activation function as a multiplication by f(x) / x, and halves the gradient of gates.
      Nothing flows through q and k. Costs as much as "gradient".

    The estimate is exact where the metric is linear in u between the two runs. It misses nodes whose gradient is 0
    where they matter, such as where an MLP or a softmax is saturated. With `confirm=k`, the k nodes with the largest
    estimates are patched one by one, and as many `controls`, drawn at random from the other nodes, show how many
    nodes the estimates missed.

    With edges=True, each edge of the residual graph is patched instead: one input (q, k or v of a head, an MLP, the
    logits) reads what one node (the embedding, a head, an MLP) writes in the clean run. The estimate is Σ Δ · g, with Δ
    the change of what the node writes, and g the gradient at the stream through this input alone. The estimates of the
    edges from a node add up to that of the node.

    >>> edges = am.attribute(*prompts, nodes="heads+mlps", edges=True, answers=[" are"], against=[" is"])
    >>> len(edges.edges), edges.circuit(3).edges[-1][1]
    (1519, 'logits')

    Args:
        model: the model.
        clean: prompts, or token ids.
        corrupted: the same number of prompts, each with the same number of tokens as its clean partner.
        method: "gradient", "integrated" or "relp".
        nodes: "heads", or "heads+mlps".
        edges: whether to patch edges. MLPs that are not nodes are recomputed.
        metric: as in `am.patch`, or a differentiable function `(logits, batch) -> [pair]`; "accuracy" has no gradient.
        steps: the number of points for method="integrated".
        layers: by default all; edges are always those of all layers.
        confirm: the number of nodes (or edges) with the largest estimates whose effects are measured exactly.
        controls: the number of others that are measured with them, at most all; drawn with equal probabilities.
        seed: the seed of that draw.
        options: answers, against (one token per pair), bos, memory and progress, as in `am.patch`.

    Returns:
        Estimates `[layer node]` or `[edge]` in the metric's unit, with intervals over pairs, and `.confirmation`: rank
        correlation with exact effects, the number of strongest nodes that hold, and the number missed. `.circuit(size)`
        is the circuit of the strongest.

    Raises:
        InputError: for prompts that do not pair up or do not differ, invalid methods, nodes, layers and metrics, and
            metrics without a gradient; for the loss of masked language models; for method="integrated" and "relp", also
            for models with several stacks; for method="relp", for models whose parts its rules do not cover; for edges,
            for models whose stream is not the sum of what nodes write, and within hooks.
        MissingPointError: for MLPs of a model whose MLPs have no separate output.

    Source: Nanda 2023 (attribution); Syed et al. 2023 (edges, EAP); for "integrated", Hanna et al. 2024 (EAP-IG,
    inputs); for "relp", Jafari et al. 2025.
    """
    require_model(model)
    option("nodes", nodes, NODES)
    if flag("edges", edges) and layers is not None:
        raise InputError("edges are those of all layers; leave `layers` out.")
    stack = model.output_stack
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers, stack.label)))
    graph = graph_of(model, mlps=nodes == "heads+mlps") if edges else None
    shape = (len(chosen), stack.n_heads + (nodes == "heads+mlps")) if graph is None else (int(graph.exists.sum()),)
    confirm = whole_number(
        "confirm", confirm, most=prod(shape), most_is=f"the number of {'edges' if edges else 'nodes'}"
    )
    controls, seed = whole_number("controls", controls), checked_seed(seed)
    option("method", method, METHODS)
    steps = whole_number("steps", steps, least=1)
    pairs, judge = _compared(model, clean, corrupted, method, metric, options)
    noted: dict[str, Any] = {
        "bos": every_bos(part.batch.bos for part in pairs.clean), "metric": judge.name, "method": method,
        **({"steps": steps} if method == "integrated" else {}),
        "clean inputs": pairs.clean[-1].digest, "nodes": nodes, "layers": list(chosen),
    }  # fmt: skip
    noted |= {"confirm": confirm, "controls": controls, "seed": seed} if confirm else {}
    points = NODES[nodes] if graph is None else OF_SENDERS[: 1 + graph.mlps]
    first = {"resid_pre": stack.layers[:1]} if edges or method == "integrated" else {}  # what enters the first layer
    values = pairs.values_at(model, dict.fromkeys(points, chosen) | first)
    common, memory = (model, judge, chosen, values, method, steps), float(options.get("memory", 1.0))
    at_once = tokens_at_once(model, memory)
    if graph is not None:
        _require_room(graph, len(pairs.lengths))
        at_once = max(1, min(at_once, int(memory * 1e9 / (16 * len(graph.senders) * model.d_model))))
    parts = batches_of(model, pairs.prompts[1], at_once, options.get("bos"))
    if graph is not None:
        for part in parts:
            require_one_sum(model, part.batch)
    estimator = NodeEstimator(*common) if graph is None else EdgeEstimator(*common, graph)
    before, estimates = _estimated(estimator, parts, shape, progress=options.get("progress", False))
    per_pair = by_layer(estimates, chosen, len(stack.places)) if graph is None else estimates
    exact = drawn = None
    if confirm:
        strongest, sample = _to_confirm(per_pair.mean(dim=-1), confirm, controls, seed)
        places = [*strongest, *sample]
        if graph is None:
            changes = [(_change(place, values, stack.n_heads, stack.label),) for place in places]
            swept = run_sweep(model, pairs.prompts[1], changes, metric, noted=noted, **options)
            effects = swept.after - swept.before
        else:
            no_edge, true = torch.zeros_like(graph.exists), torch.tensor(True)
            masks = [no_edge.index_put(tuple(graph.edges[edge]), true) for (edge,) in places]
            effects = patched_edges(model, graph, parts, values, judge, masks, options) - before
        exact = _placed(places, effects, per_pair)
        drawn = _placed(sample, torch.ones(len(sample), dtype=torch.float64), per_pair[..., 0]).nan_to_num(0.0)
    tokens = tokens_of(parts, stack.label)
    copies = judge.copies(pairs.contents)
    provenance = model.provenance(parts[-1].digest, tokens, noted | ({"edges": True} if edges else {}), copies)
    fields: dict[str, Any] = {"method": method, "nodes": nodes, "metric": judge.name, "before": before}
    fields |= {"per_pair": per_pair, "exact": exact, "controls": drawn, "tokens": tokens, "provenance": provenance}
    return Attribution(**fields, layers=chosen) if graph is None else EdgeAttribution(**fields, graph=graph)


def _require_room(graph: Graph, pairs: int) -> None:
    edges = int(graph.exists.sum())
    if 8 * edges * pairs > MAX_BYTES:
        raise InputError(
            f"the estimates of {edges:,} edges on {pairs} pairs would take {8 * edges * pairs / 2**30:.0f} GiB; the "
            f'limit is {MAX_BYTES / 2**30:.0f} GiB. Use fewer pairs, nodes="heads", or edges=False.'
        )


def _to_confirm(
    effect: Float[Tensor, "*place"], confirm: int, controls: int, seed: int
) -> tuple[list[Place], list[Place]]:
    """The places with the largest estimates, and a simple random sample of the others."""
    there = ~effect.isnan()
    places = [tuple(place) for place in there.nonzero().tolist()]
    order = by_size(effect[there])
    others = sorted(order[confirm:])
    drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:controls]
    return [places[number] for number in order[:confirm]], [places[others[number]] for number in drawn.tolist()]


def _placed(places: Sequence[Place], values: Tensor, like: Tensor) -> Tensor:
    """Puts some values at their places, with NaN at all other places."""
    whole = torch.full_like(like, torch.nan)
    for place, value in zip(places, values, strict=True):
        whole[place] = value
    return whole


def _change(place: Place, values: Mapping[str, Mapping[int, Values]], n_heads: int, stack: str) -> Intervention:
    """The intervention that gives a node its output in the clean run."""
    layer, node = place
    if node < n_heads:
        return Intervention.replace([(layer, node)], values["z"][layer], stack=stack)
    return Intervention.stream("mlp_out", [layer], values["mlp_out"][layer], stack=stack)


def _compared(
    model: HookedModel,
    clean: Inputs | Iterable[Inputs],
    corrupted: Inputs | Iterable[Inputs],
    method: str,
    metric: MetricLike,
    options: Mapping[str, Any],
) -> tuple[PromptPairs, Metric]:
    """The pairs of prompts, which must pair up and differ, and the metric, which must have a gradient."""
    flag("progress", options.get("progress", False))
    finite_number("memory", options.get("memory", 1.0), above=0.0, below=1e9)
    if method == "integrated" and len(model.stacks) > 1:
        raise InputError(
            'method="integrated" moves the input of one stack, and this model has several; use method="gradient".'
        )
    pairs = PromptPairs.of(model, reread(clean), reread(corrupted), options.get("bos"))
    judge = judge_of(model, pairs.clean, metric, options.get("answers"), options.get("against"))
    judge.require_gradient()
    if judge.mask_id is not None:
        raise InputError(
            "the loss of a masked language model is measured on masked copies, and the clean run sees the masked "
            'tokens; use metric="logit_difference" with `answers` and `against`.'
        )
    return pairs, judge


def _estimated(
    estimator: Estimator, parts: Sequence[CorpusBatch], shape: Sequence[int], *, progress: bool
) -> tuple[Float[Tensor, " pair"], Float[Tensor, "*place pair"]]:
    """The metric of each corrupted prompt, and the estimates."""
    pairs = sum(len(part.documents) for part in parts)
    before = torch.empty(pairs, dtype=torch.float64)
    estimates = torch.empty(*shape, pairs, dtype=torch.float64)
    model = estimator.model
    rules = relevance_rules(model, parts[0].batch) if estimator.method == "relp" else nullcontext()
    with rules, progress_bar("pairs", pairs, show=progress) as bar:
        for part in parts:
            before[part.documents], estimates[..., part.documents] = estimator.of_part(part)
            bar.advance(len(part.documents))
    return before, estimates
