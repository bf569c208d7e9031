"""Attribution patching: estimates of `am.patch` for every head and MLP, from a few passes.

Formulas: docs/formulas.md#attribution.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, Unpack

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, flag, option, whole_number
from ...basics.fields import check_layers
from ...basics.public import public
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...errors import InputError
from ...interventions import Intervention, Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import by_layer, shared_layers, subtracted
from ...results.over_texts import OverTexts
from ...results.provenance import Provenance
from ...results.result import TextResult
from ...runs.ablations import checked_seed, reread
from ...runs.claims import PALE, for_map, interval_note
from ...runs.differences import largest_of
from ...runs.effects import unit_of
from ...runs.gradients import tokens_at_once
from ...runs.layers import count_layers
from ...runs.metrics import Metric, MetricLike
from ...runs.options import MeasuringOptions
from ...runs.progress import steps as progress_bar
from ...runs.prompt_pairs import PromptPairs
from ...runs.sweep import batches_of, run_sweep, tokens_of
from .confirmation import Confirmation
from .formulas import METHODS
from .sums import Estimator

NODES: Final = {"heads": ("z",), "heads+mlps": ("z", "mlp_out")}
"""The sets of nodes, with the points at which their nodes write."""

Node = tuple[int, int]
"""(layer, number): a head, or, after the last head, the MLP."""


@dataclass(frozen=True, repr=False)
class Attribution(OverTexts, TextResult):
    """Estimates of the effects on a metric of giving one node of the corrupted run its clean output.

    The nodes of a layer are its heads and, with nodes="heads+mlps", its MLP, which is the last node of the layer.
    `effect [layer node]` estimates the effect of `am.patch`, in the metric's unit; intervals are over pairs of prompts.
    They contain the spread over pairs, not the error of the estimate, which `confirmation` measures.
    """

    method: str
    nodes: str
    """ "heads" or "heads+mlps"."""
    metric: str
    layers: tuple[int, ...]
    """The layers with estimates; those of the other layers are NaN."""
    before: Float[Tensor, " pair"]
    """The metric of each corrupted prompt."""
    per_pair: Float[Tensor, "layer node pair"]
    """The estimate on each pair."""
    exact: Float[Tensor, "layer node pair"] | None
    """The exact effect of the nodes that `confirm` measured, NaN for the others; None without `confirm`."""
    controls: Float[Tensor, "layer node"] | None
    """1 at the nodes that were measured as controls, else 0; None without `confirm`."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens of the corrupted prompts."""
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The length of the axis labelled by pairs."""
        return {"pair": len(self.tokens)}

    def _check(self) -> None:
        super()._check()
        check_layers(self.layers, len(self.per_pair))
        option("method", self.method, METHODS)
        option("nodes", self.nodes, NODES)
        if (self.exact is None) != (self.controls is None):
            raise ValueError("`exact` and `controls` must both be there, or neither")

    @property
    def effect(self) -> Float[Tensor, "layer node"]:
        """The mean estimate over pairs."""
        return self.per_pair.mean(dim=-1)

    @property
    def _measured_values(self) -> Float[Tensor, "layer node pair"]:
        return self.per_pair

    @property
    def n_heads(self) -> int:
        """The number of heads per layer."""
        return self.per_pair.shape[1] - (self.nodes == "heads+mlps")

    def strongest(self, count: int = 10) -> pd.DataFrame:
        """The rows of `to_frame` with the largest estimates of either sign: those that `confirm` measures first."""
        frame = self.to_frame()
        order = by_size(self.effect[list(self.layers)].flatten())[: whole_number("count", count, least=1)]
        rows = frame.iloc[order].reset_index(drop=True)
        rows.attrs = frame.attrs
        return rows

    @property
    def confirmation(self) -> Confirmation | None:
        """The comparison with exact effects; None without `confirm`, and for a difference."""
        if self.exact is None or self.controls is None:
            return None
        measured = ~self.exact.isnan().any(dim=-1)
        names = tuple(self._named(*place) for place in measured.nonzero().tolist())
        control = self.controls[measured] == 1
        others = len(self.layers) * self.per_pair.shape[1] - int((~control).sum())
        return Confirmation(names, self.effect[measured], self.exact[measured], control, others)

    def to_frame(self) -> pd.DataFrame:
        """One row per node: layer, head (missing for an MLP), effect, effect_low, effect_high, agreeing, clear,
        clear_size, one_text.

        With `confirm`, also `exact`, the mean exact effect of the nodes that were measured.
        """
        columns = self._columns("effect")
        if self.exact is not None:
            columns["exact"] = self.exact.mean(dim=-1)
        rows, count = list(self.layers), self.per_pair.shape[1]
        heads = [node if node < self.n_heads else None for node in range(count)] * len(rows)
        places = {
            "layer": [layer for layer in rows for _ in range(count)],
            "head": pd.array(heads, dtype="Int64"),
        }
        frame = pd.DataFrame(places | {name: value[rows].flatten().numpy() for name, value in columns.items()})
        frame.attrs["intervals"] = interval_note(self._n_texts).replace("text", "pair")
        return frame

    def by_head(self) -> pd.DataFrame:
        """The rows of `to_frame` about heads."""
        frame = self.to_frame()
        heads = frame.dropna(subset="head").astype({"head": "int64"}).reset_index(drop=True)
        heads.attrs = frame.attrs
        return heads

    def plot(self, nodes: str = "heads") -> "go.Figure":
        """Layers × heads, coloured by the estimate, with intervals in the hover; nodes="mlps" draws the MLPs."""
        option("nodes", nodes, ("heads", "mlps") if self.nodes == "heads+mlps" else ("heads",))
        of_mlps = nodes == "mlps"
        columns = slice(self.n_heads, None) if of_mlps else slice(self.n_heads)
        shown: dict[str, Any] = {
            name: value[:, columns] if isinstance(value, np.ndarray) else value
            for name, value in for_map(self._means, self.layers).items()
        }
        label = self._labels["effect"]
        return effect_map(**shown, layers=self.layers, label=label, columns="MLP" if of_mlps else "head")

    @property
    def _labels(self) -> Mapping[str, str]:
        return {"effect": f"estimated change ({unit_of(self.metric)})"}

    @property
    def _title(self) -> str:
        return f"Attribution of {self.metric} to {self.nodes.replace('+', ' and ').replace('mlps', 'MLPs')}"

    def _sections(self) -> "Sequence[Section]":
        reading = f"Each cell is one node, patched alone, to first order{PALE}."
        figures = {"heads": self.plot()}
        if self.nodes == "heads+mlps":
            figures["mlps"] = self.plot("mlps")
        estimates = Section("Estimates", reading, figures, "attribution.plot()")
        confirmation = self.confirmation
        if confirmation is None:
            return [estimates]
        reading = (
            "Each point is one node: its estimate, and its exact effect with the simultaneous interval. Controls were "
            "drawn at random from all nodes except the strongest. On the dotted line, both are equal."
        )
        exact = {"confirmation": confirmation.plot()}
        return [estimates, Section("Exact effects", reading, exact, "attribution.confirmation.plot()")]

    @property
    def lead(self) -> str:
        """The finding in one sentence."""
        largest = largest_of(
            self,
            self._means,
            lambda place: self._named(*place),
            things="heads" if self.nodes == "heads" else "nodes",
            unit=unit_of(self.metric),
            what="estimate" if self.parts is None else "difference",
        )
        count = len(self.layers) * self.per_pair.shape[1]
        pairs = self._texts.replace("text", "pair")
        subject = f"{METHODS[self.method]} of patching each of {count} {'heads' if self.nodes == 'heads' else 'nodes'}"
        return f"{self._opening}{subject} on {pairs}: {largest}{self._confirmed}."

    @property
    def _confirmed(self) -> str:
        if self.parts is not None:
            return ""
        confirmation = self.confirmation
        return "; not confirmed" if confirmation is None else f"; {confirmation.lead.removesuffix('.')}"

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    def _named(self, layer: int, node: int) -> str:
        return f"L{layer}H{node}" if node < self.n_heads else f"L{layer} MLP"

    def _comparable(self) -> dict[str, Any]:
        layers, nodes, _ = self.per_pair.shape
        return {
            "metric": self.metric,
            "method": self.method,
            "nodes": self.nodes,
            "steps": self.provenance.options.get("steps"),
            "number of layers": layers,
            "number of nodes": nodes,
        }

    def _minus(self, other: Self, paired: bool) -> Self:
        return replace(
            self,
            layers=shared_layers(self.layers, other.layers),
            before=subtracted(self.before, other.before, paired),
            per_pair=subtracted(self.per_pair, other.per_pair, paired),
            exact=None,
            controls=None,
            tokens=self.tokens if paired else (),
        )


def by_size(values: Float[Tensor, " node"]) -> list[int]:
    """The places of the values, the largest of either sign first."""
    order: list[int] = values.abs().argsort(descending=True, stable=True).tolist()
    return order


@public
def attribute(
    model: HookedModel,
    clean: Inputs | Iterable[Inputs],
    corrupted: Inputs | Iterable[Inputs],
    *,
    method: str = "gradient",
    nodes: str = "heads",
    metric: MetricLike = "logit_difference",
    steps: int = 5,
    layers: Iterable[int] | None = None,
    confirm: int = 0,
    controls: int = 20,
    seed: int = 0,
    **options: Unpack[MeasuringOptions],
) -> Attribution:
    """Estimates the effect of patching each head, and each MLP, from gradients; `confirm` measures the strongest.

    >>> import attnmech as am
    >>> attribution = am.attribute(
    ...     am.load(), ["The keys to the chest"], ["The key to the chest"], answers=[" are"], against=[" is"]
    ... )
    >>> attribution.effect.shape             # estimates am.patch(...).effect
    torch.Size([4, 8])

    As in `am.patch`, the corrupted prompt is run with the output of one node replaced by its output u' in the clean
    run, at all positions. The estimate is Σ (u' − u) · g over positions, where u is the node's output in the corrupted
    run (z of a head, the output of an MLP):

    - method="gradient": g is the gradient of the metric at u in the corrupted run. Costs a pass over the clean prompts,
      and a forward and a backward pass over the corrupted ones, for all nodes together;
    - method="integrated": g is the mean of the gradients at the midpoints of `steps` equal parts of the line from the
      corrupted run's stream to the clean run's, at the start of the first layer with attention. It sees effects that
      set in only between the two runs; costs a further forward and backward pass per step.

    The estimate is exact where the metric is linear in u between the two runs. It misses nodes whose gradient is 0
    where they matter, such as where an MLP or a softmax is saturated. With `confirm=k`, the k nodes with the largest
    estimates are patched one by one, and as many `controls`, drawn at random from the other nodes, show how many
    nodes the estimates missed.

    Args:
        model: the model.
        clean: prompts, or token ids.
        corrupted: the same number of prompts, each with the same number of tokens as its clean partner.
        method: "gradient" or "integrated".
        nodes: "heads", or "heads+mlps".
        metric: as in `am.patch`, or a differentiable function `(logits, batch) -> [pair]`; "accuracy" has no gradient.
        steps: the number of points for method="integrated".
        layers: by default all.
        confirm: the number of nodes with the largest estimates whose effects are measured exactly.
        controls: the number of other nodes that are measured with them, at most all; drawn with equal probabilities.
        seed: the seed of that draw.
        options: answers, against (one token per pair), bos, memory and progress, as in `am.patch`.

    Returns:
        Estimates `[layer node]` in the metric's unit, with intervals over pairs, and `.confirmation`: rank correlation
        with exact effects, the number of strongest nodes that hold, and the number of nodes missed.

    Raises:
        InputError: for prompts that do not pair up or do not differ, invalid methods, nodes, layers and metrics, and
            metrics without a gradient; for the loss of masked language models; for method="integrated", also for models
            with several stacks.
        MissingPointError: for MLPs of a model whose MLPs have no separate output.

    Source: Nanda 2023 (attribution); Syed et al. 2023; for "integrated", Hanna et al. 2024 (EAP-IG, inputs).
    """
    require_model(model)
    option("method", method, METHODS)
    option("nodes", nodes, NODES)
    steps = whole_number("steps", steps, least=1)
    seed = checked_seed(seed)
    controls = whole_number("controls", controls)
    bos, progress = options.get("bos"), flag("progress", options.get("progress", False))
    memory = finite_number("memory", options.get("memory", 1.0), above=0.0, below=1e9)
    stack = model.output_stack
    if method == "integrated" and len(model.stacks) > 1:
        raise InputError(
            'method="integrated" moves the input of one stack, and this model has several; use method="gradient".'
        )
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers, stack.label)))
    per_layer = stack.n_heads + (nodes == "heads+mlps")
    most = len(chosen) * per_layer
    confirm = whole_number("confirm", confirm, most=most, most_is="the number of nodes")
    pairs = PromptPairs.of(model, reread(clean), reread(corrupted), options.get("bos"))
    _require_differences(pairs)
    at_once = tokens_at_once(model, memory)
    parts = batches_of(model, pairs.prompts[1], at_once, bos)
    judge = Metric.of(model, metric, options.get("answers"), options.get("against"), len(pairs.lengths))
    judge.require_gradient()
    if judge.mask_id is not None:
        raise InputError(
            "the loss of a masked language model is measured on masked copies, and the clean run sees the masked "
            'tokens; use metric="logit_difference" with `answers` and `against`.'
        )
    values = {point: pairs.values(model, point, chosen) for point in NODES[nodes]}
    first = stack.layers[0]
    start = pairs.values(model, "resid_pre", [first])[first] if method == "integrated" else None
    estimator = Estimator(model, judge, chosen, values, start, steps)
    count = len(pairs.lengths)
    before = torch.empty(count, dtype=torch.float64)
    estimates = torch.empty(len(chosen), per_layer, count, dtype=torch.float64)
    with progress_bar("pairs", count, show=progress) as bar:
        for part in parts:
            before[part.documents], estimates[:, :, part.documents] = estimator.of_part(part)
            bar.advance(len(part.documents))
    n_layers = count_layers(model, stack)
    per_pair = by_layer(estimates, chosen, n_layers)
    noted: dict[str, Any] = {
        "bos": bos, "metric": judge.name, "method": method, "nodes": nodes, "layers": list(chosen),
        "clean inputs": pairs.clean[-1].digest,
    }  # fmt: skip
    if method == "integrated":
        noted["steps"] = steps
    exact = drawn = None
    if confirm:
        noted |= {"confirm": confirm, "controls": controls, "seed": seed}
        strongest, sample = _to_confirm(per_pair, chosen, confirm, controls, seed)
        changes = [(_change(place, values, stack.n_heads, stack.label),) for place in (*strongest, *sample)]
        swept = run_sweep(model, pairs.prompts[1], changes, metric, noted=noted, **options)
        exact = _placed([*strongest, *sample], swept.after - swept.before, per_pair)
        drawn = _placed(sample, torch.ones(len(sample), dtype=torch.float64), per_pair[..., 0]).nan_to_num(0.0)
    tokens = tokens_of(parts, count, stack.label)
    return Attribution(
        method, nodes, judge.name, chosen, before, per_pair, exact, drawn, tokens,
        model.provenance(parts[-1].digest, tokens, noted),
    )  # fmt: skip


def _require_differences(pairs: PromptPairs) -> None:
    """Raises `InputError` for a pair of equal prompts."""
    clean, corrupted = (
        {
            number: digest
            for part in parts
            for number, digest in zip(part.documents.tolist(), part.batch.digests.tolist(), strict=True)
        }
        for parts in (pairs.clean, pairs.corrupted)
    )
    for number in sorted(clean):
        if clean[number] == corrupted[number]:
            raise InputError(
                f"the two prompts of a pair must differ; those of pair {number} are the same, so patching changes "
                "nothing. Leave the pair out."
            )


def _to_confirm(
    per_pair: Float[Tensor, "layer node pair"], layers: Sequence[int], confirm: int, controls: int, seed: int
) -> tuple[list[Node], list[Node]]:
    """The nodes with the largest estimates, and a simple random sample of the others."""
    places = [(layer, node) for layer in layers for node in range(per_pair.shape[1])]
    order = by_size(per_pair[list(layers)].mean(dim=-1).flatten())
    others = sorted(order[confirm:])
    drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:controls]
    return [places[number] for number in order[:confirm]], [places[others[number]] for number in drawn.tolist()]


def _placed(nodes: Sequence[Node], values: Tensor, like: Tensor) -> Tensor:
    """Puts the values of some nodes at their places, with NaN at all other places."""
    whole = torch.full_like(like, torch.nan)
    for (layer, node), value in zip(nodes, values, strict=True):
        whole[layer, node] = value
    return whole


def _change(place: Node, values: Mapping[str, Mapping[int, Values]], n_heads: int, stack: str) -> Intervention:
    """The intervention that gives a node its output in the clean run."""
    layer, node = place
    if node < n_heads:
        return Intervention.replace([place], values["z"][layer], stack=stack)
    return Intervention.stream("mlp_out", [layer], values["mlp_out"][layer], stack=stack)
