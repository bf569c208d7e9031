"""Estimates to first order how much each head matters, with one forward and one backward pass for all heads.

Formulas: docs/formulas.md#ablation. `am.ablate_heads` measures the effects that this module estimates; with `sweep=`,
the result compares the two.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import finite_number, flag, option, shown
from ...basics.fields import check_layers
from ...basics.nouns import counted
from ...basics.public import public
from ...batch import Batch, every_bos
from ...draw.section import Section
from ...errors import InputError
from ...interventions import Intervention, Values
from ...maths.float64 import as_float64
from ...maths.intervals import TextMeans
from ...maths.ranks import rank_correlation
from ...maths.statistic import UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import by_layer, shared_layers, subtracted
from ...results.provenance import Provenance
from ...results.quantity import Places
from ...runs.ablations import check_reference, mean_of, reread
from ...runs.corpus import CorpusBatch, contents_of
from ...runs.effects import Changes, HeadEffects
from ...runs.gradients import differentiated, tokens_at_once
from ...runs.judged import JudgedTexts
from ...runs.metrics import Metric, MetricLike
from ...runs.options import MeasuringOptions
from ...runs.progress import steps
from ...runs.sweep import batches_of, judge_of, tokens_of

METHODS: Final = {
    "michel": "|z·∂L/∂z|",
    "zero": "first-order effect of zeroing",
    "mean": "first-order effect of mean ablation",
}
"""The estimates that are made from z and the metric's gradient at z."""


@dataclass(frozen=True, repr=False)
class HeadImportance(Changes):
    """How much a metric depends on each head, to first order in the head's output.

    z_i is the head's output at token i, and g_i = ∂L/∂z_i, where L is the metric of the text:

    - "michel": mean over tokens of |z_i·g_i| (Michel et al. 2019, eq. 2, as in their code: the absolute value is taken
      for each token);
    - "zero": −Σ_i z_i·g_i, which estimates the effect of zeroing the head;
    - "mean": Σ_i (z̄ − z_i)·g_i, which estimates the effect of replacing z_i by its mean z̄ over a reference set.

    The last two have the sign and the unit of `HeadEffects.effect`. Scores are means over texts. "michel" scores are
    magnitudes, so nearly all of them are clear.
    """

    _TITLE = "Importance of heads for {metric}, to first order"
    _MAIN = "score"
    _AXES: ClassVar = {"text": "tokens"}
    score = Statistic(meaning="The mean score over texts.", tested=True, bounds=UNBOUNDED, axes="layer head")

    method: str
    layers: tuple[int, ...]
    """The layers with scores; scores of the other layers are NaN."""
    per_text: Float[Tensor, "layer head text"]
    """The score on each text."""
    exact: Float[Tensor, "layer head"] | None
    """The effects measured by `sweep`, NaN for heads that it left out; None without a sweep."""
    exact_method: str | None
    """The method of that sweep."""

    def _check(self) -> None:
        super()._check()
        check_layers(self.layers, len(self.per_text))
        option("method", self.method, METHODS)

    @property
    def normalised(self) -> Float[Tensor, "layer head"]:
        """The scores divided by their L2 norm in each layer (Michel et al. 2019, §4.1); 0 where that norm is 0."""
        if self.parts is not None:
            return self.parts[0].normalised - self.parts[1].normalised
        return torch.nn.functional.normalize(self.score, dim=-1)

    def _by_text(self, name: str) -> TextMeans:
        return TextMeans.of_values(self.per_text)

    @property
    def _places(self) -> Places:
        rows = Places.of_heads(self.layers, self.per_text.shape[1], len(self.per_text))
        return Places(rows.columns, rows.index, lambda place: f"L{place[0]}H{place[1]}", layers=self.layers)

    @property
    def _rows_of_map(self) -> tuple[tuple[int, ...], Sequence[int]]:
        return self.layers, self.layers

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of the scores with the sweep's effects, over the heads in the sweep.

        "michel" has no sign, so it is compared with the absolute effects. None without a sweep and for a difference;
        NaN if all scores or all effects are equal.
        """
        if self.exact is None or self.parts is not None:
            return None
        measured = ~self.exact.isnan()
        effects = self.exact[measured].abs() if self.method == "michel" else self.exact[measured]
        return rank_correlation(self.score[measured], effects)

    complete = True
    """Everything is measured in one pass."""

    @property
    def _further(self) -> Mapping[str, Tensor]:
        exact = {} if self.exact is None else {"exact": self.exact}
        return {"normalised": self.normalised, **exact}

    def _label_of(self, name: str) -> str:
        return METHODS[self.method]

    def _sections(self) -> "Sequence[Section]":
        reading = "Each cell is one head. The estimate is first-order: it is exact only if the metric is linear in z."
        return [Section("Scores", reading, {"importance": self.plot()}, "importance.plot()")]

    def _largest(self, name: str, **words: Any) -> str:
        return super()._largest(name, signed=self.method != "michel" or self.parts is not None, **words)

    @property
    def _about(self) -> str:
        heads = len(self.layers) * self.per_text.shape[1]
        return f"{self._opening}{METHODS[self.method]} of {counted(heads, noun='head')} on {self._texts}"

    @property
    def _remark(self) -> str:
        if self.parts is not None:
            return ""
        if self.exact is None:
            return "; not compared with a sweep"
        swept = f"the {self.exact_method} sweep of {counted(int((~self.exact.isnan()).sum()), noun='head')}"
        rank = self.rank_correlation
        if rank is None or math.isnan(rank):
            return f"; no rank correlation with {swept}"
        return f"; rank correlation {rank:.2f} with {swept}"

    def _comparable(self) -> dict[str, Any]:
        layers, heads, _ = self.per_text.shape
        return {
            **super()._comparable(),
            "method": self.method,
            "values": self.provenance.options.get("values"),
            "number of layers": layers,
            "number of heads": heads,
        }

    def _minus(self, other: Self, paired: bool) -> Self:
        layers = shared_layers(self.layers, other.layers)
        exact = None
        if self.exact is not None and other.exact is not None and self.exact_method == other.exact_method:
            exact = self.exact - other.exact
        per_text = subtracted(self.per_text, other.per_text, paired)
        method = None if exact is None else self.exact_method
        return self._difference(other, paired, layers=layers, per_text=per_text, exact=exact, exact_method=method)


@public
def head_importance(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    method: str = "michel",
    metric: MetricLike = "loss",
    layers: Iterable[int] | None = None,
    reference: Values | Inputs | Iterable[Inputs] | None = None,
    sweep: HeadEffects | None = None,
    **options: Unpack[MeasuringOptions],
) -> HeadImportance:
    """Estimates how much a metric depends on each head, to first order, in one forward and one backward pass.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> importance = am.head_importance(am.load(), documents(6), method="zero")
    >>> importance.score.shape               # an estimate of am.ablate_heads(...).effect
    torch.Size([4, 8])

    Args:
        model: the model.
        inputs: texts, or token ids.
        method: "michel", "zero" or "mean", as in `HeadImportance`.
        metric: as in `am.ablate_heads`, or a differentiable function `(logits, batch) -> [text]`. "accuracy" has no
            gradient, and the gradient of "kl" is 0 when nothing is changed.
        layers: by default all.
        reference: for "mean", the texts to average over, or the result of `am.mean_z` for them.
        sweep: the result of `am.ablate_heads` on the same model, inputs and metric, to compare the estimate with:
            `.rank_correlation`.
        options: answers, against, bos, memory and progress, as in `am.ablate_heads`. `memory` is the approximate number
            of GB that a pass may use on top of the model; a text that needs more is run by itself.

    Returns:
        Scores `[layer head]` in the metric's unit, with intervals over texts.

    Raises:
        InputError: for invalid methods, metrics, answers and references, and for a sweep with another model, other
            inputs or another metric.

    Source: Michel et al. 2019, eq. 2; for "zero" and "mean", Molchanov et al. 2017 and Nanda 2023 (attribution).
    """
    require_model(model)
    option("method", method, METHODS)
    if sweep is not None and not isinstance(sweep, HeadEffects):
        raise InputError(f"`sweep` must be a result of am.ablate_heads; got {shown(sweep)}.")
    bos, answers, against = options.get("bos"), options.get("answers"), options.get("against")
    memory = finite_number("memory", options.get("memory", 1.0), above=0.0, below=1e9)
    progress = flag("progress", options.get("progress", False))
    check_reference(method, reference)
    stack = model.output_stack
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers, stack.label)))
    means: Mapping[int, Tensor] = {}
    description = None
    if reference is not None:
        values = mean_of(model, reference, chosen, bos=bos)
        description = values.description
        # Building the intervention checks their shapes.
        model.applied(Intervention.replace([(layer, 0) for layer in chosen], values, stack=stack.label))
        means = values.by_layer
    at_once = tokens_at_once(model, memory)
    parts = batches_of(model, reread(inputs), at_once, bos)
    judge = judge_of(model, parts, metric, answers, against)
    judge.require_gradient()
    tokens = tokens_of(parts, stack.label)
    begin = every_bos(part.batch.bos for part in parts)
    noted = {"bos": begin, "metric": judge.name, "method": method, "values": description, **judge.noted}
    provenance = model.provenance(parts[-1].digest, tokens, noted, judge.copies(contents_of(parts)))
    judged = JudgedTexts.of(parts, judge, at_once)
    count = len(judged.text_of)
    before = torch.empty(count, dtype=torch.float64)
    scores = torch.empty(len(chosen), stack.n_heads, count, dtype=torch.float64)
    n_layers = len(stack.places)
    exact = None if sweep is None else _effects_for(sweep, provenance, chosen, n_layers)
    with steps("texts", count, show=progress) as bar:
        for part in judged.parts:
            before[part.documents], scores[:, :, part.documents] = _scores(
                model, part, judged.judge.at(part.documents), chosen, method, means, judged.text_of[part.documents]
            )
            bar.advance(len(part.documents))
    per_text = by_layer(judged.by_text(scores), chosen, n_layers)
    return HeadImportance(
        method=method, metric=judge.name, layers=chosen, before=judged.by_text(before), per_text=per_text, exact=exact,
        exact_method=None if sweep is None else sweep.method, tokens=tokens, provenance=provenance,
    )  # fmt: skip


def _scores(
    model: HookedModel,
    part: CorpusBatch,
    judge: Metric,
    layers: tuple[int, ...],
    method: str,
    means: Mapping[int, Tensor],
    texts: Int[Tensor, " text"],
) -> tuple[Float[Tensor, " text"], Float[Tensor, "layer head text"]]:
    """The metric of each text of a batch, and the scores of all heads; `texts` numbers the texts."""
    stack = model.output_stack
    measured, ran, gradients = differentiated(model, part.batch, judge, [stack.point("z")], layers, texts)
    batch = part.batch.queries(stack.label)
    scores = []
    for layer in layers:
        z, gradient = ran[stack.point("z"), layer], gradients[stack.point("z"), layer]
        if layer in means:
            z = z - _by_token(means[layer], batch)
        # The gradient is 0 at padding, since nothing attends to it.
        along = (as_float64(z) * as_float64(gradient)).sum(dim=-1)
        of_michel = along.abs().sum(dim=1) / batch.lengths.to(along.device)[:, None]
        scores.append((of_michel if method == "michel" else -along.sum(dim=1)).T)
    return measured, torch.stack(scores).cpu()


def _by_token(mean: Float[Tensor, "1 _ head d_head"], batch: Batch) -> Float[Tensor, "_ _ head d_head"]:
    length = int(batch.lengths.max())
    if 1 < mean.shape[1] < length:
        raise InputError(
            f"the means cover {mean.shape[1]} positions, but a text has {length}; give a longer reference, or "
            "pooled means, am.mean_z(model, reference)."
        )
    return mean[0, batch.places] if mean.shape[1] > 1 else mean


def _effects_for(
    sweep: HeadEffects, origin: Provenance, layers: tuple[int, ...], n_layers: int
) -> Float[Tensor, "layer head"]:
    """A sweep's effects in `layers`; raises `InputError` if its model, inputs or metric differ from the estimate's."""
    theirs = sweep.provenance
    pairs = {
        "metric": (sweep.metric, origin.options["metric"]),
        "weights": (theirs.weights, origin.weights),
        "inputs": (theirs.inputs, origin.inputs),
        "edits in force": (theirs.edits, origin.edits),
    }
    for name, (of_sweep, here) in pairs.items():
        if of_sweep != here:
            raise InputError(
                f"`sweep` must have the same model, inputs and metric; {name} there: {of_sweep}, here: {here}."
            )
    shared = [layer for layer in sweep.layers if layer in layers]
    effects = by_layer(sweep.effect[shared], shared, n_layers)
    if effects.isnan().all():
        raise InputError(f"`sweep` has no head in layers {list(layers)}; it covers layers {list(sweep.layers)}.")
    return effects
