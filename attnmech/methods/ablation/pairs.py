"""Tests whether two heads interact: ablates them together and each alone (docs/formulas.md#ablation)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar, Self, Unpack

import plotly.graph_objects as go  # type: ignore[import-untyped]
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import integer, shown
from ...basics.public import public
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...errors import InputError
from ...interventions import Head, Heads, Values
from ...maths.intervals import TextMeans
from ...maths.statistic import UNBOUNDED, Statistic
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.quantity import Places
from ...results.table import require_no_head
from ...runs.ablations import Ablations, reread
from ...runs.effects import Changes
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import run_sweep

Pair = tuple[Head, Head]  # two heads, as (layer, head)


def _change(meaning: str) -> Statistic:
    return Statistic(meaning=meaning, bounds=UNBOUNDED, axes="pair")


@dataclass(frozen=True, repr=False)
class PairEffects(Changes):
    """The effects of ablating two heads together and each alone: the metric after minus before.

    interaction = effect of both − effect of one − effect of the other. For metrics that rise with damage (loss, KL),
    it is above 0 for heads that back each other up, and below 0 for heads that need each other. Intervals are over
    texts; `interval`, `clear` and the like refer to the interactions.
    """

    _TITLE = "Effect of {result.method} ablation on {metric}, pairs of heads"
    _MAIN = "interaction"
    _AXES: ClassVar = {"pair": "pairs", "text": "tokens"}
    both = _change("The mean effect of ablating both heads.")
    one = _change("The mean effect of ablating the first head alone.")
    other = _change("The mean effect of ablating the second head alone.")
    interaction = replace(_change("The mean of both − one − other."), tested=True)
    _is_about_heads = False

    method: str
    pairs: tuple[Pair, ...]
    after_both: Float[Tensor, "pair text"]
    """The metric with both heads ablated; NaN where an interrupted sweep did not measure it."""
    after_one: Float[Tensor, "pair text"]
    """The metric with only the first head of the pair ablated."""
    after_other: Float[Tensor, "pair text"]
    """The metric with only the second head of the pair ablated."""

    def _by_text(self, name: str) -> TextMeans:
        both, one, other = (after - self.before for after in (self.after_both, self.after_one, self.after_other))
        values = {"both": both, "one": one, "other": other, "interaction": both - one - other}
        return TextMeans.of_values(values[name])

    @property
    def _places(self) -> Places:
        heads = zip(*((*one, *other) for one, other in self.pairs), strict=True)
        rows = dict(zip(("layer", "head", "other_layer", "other_head"), map(list, heads), strict=True))
        return Places(rows, (slice(None),), lambda place: _both_named(self.pairs[place[0]]), things="pairs")

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws for each pair the effect of both heads, the sum of their single effects, and the interaction; or one
        statistic, if `figure` names it.
        """
        require_no_head(layer, head)
        shown = {
            "both together": self["both"].every,
            "sum of the two alone": TextMeans.of_values(self["one"].per_text + self["other"].per_text),
            "interaction": self["interaction"].every,
        }
        if figure is not None:
            shown = {figure: self[figure].every}
        values = []
        for name, every in shown.items():
            means = every.merged(self.provenance.copies)
            low, high = means.interval()
            values.append((name, means.mean.numpy(), low.numpy(), high.numpy()))
        return interval_rows(list(map(_both_named, self.pairs)), values, label=self._label_of(self._MAIN))

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "Each row is a pair of heads. The heads do not interact if ablating both changes the metric by the sum of "
            "their single effects."
        )
        return [Section("Pairs", reading, {"pairs": self.plot()}, "effects.plot()")]

    @property
    def _about(self) -> str:
        count = "1 pair" if len(self.pairs) == 1 else f"{len(self.pairs)} pairs"
        return f"{self._opening}{self.method} ablation of {count} of heads on {self._texts}"

    def _comparable(self) -> dict[str, Any]:
        return super()._comparable() | {"method": self.method, "pairs": self.pairs}

    def _minus(self, other: Self, paired: bool) -> Self:
        names = ("both", "one", "other")
        effects = {f"after_{name}": (self[name].per_text, other[name].per_text) for name in names}
        return self._difference(other, paired, effects)


@public
@owning_journal
def ablate_pairs(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    pairs: str | Sequence[Pair],
    method: str = "zero",
    metric: MetricLike = "loss",
    *,
    heads: Heads | None = None,
    reference: Values | Inputs | Iterable[Inputs] | None = None,
    seed: int = 0,
    **options: Unpack[SweepOptions],
) -> PairEffects:
    """Measures how much a metric changes when two heads are ablated together, and when each is ablated alone.

    interaction = effect of both − effect of one − effect of the other.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> effects = am.ablate_pairs(am.load(), documents(6), [((1, 4), (2, 6)), ((0, 0), (1, 0))])
    >>> effects.interaction.shape
    torch.Size([2])

    Args:
        model: the model.
        inputs: texts, or token ids.
        pairs: a list of pairs of heads, ((layer, head), (layer, head)), or "all" for every pair of `heads`.
        method: "zero", "mean" or "resample", as in `am.ablate_heads`.
        metric: as in `am.ablate_heads`.
        heads: for pairs="all", a list of (layer, head) or "all": n heads make n (n − 1) / 2 pairs.
        reference: as in `am.ablate_heads`.
        seed: draws the donors of "resample".
        options: answers, against, bos, memory, journal, engine, partial and progress, as in `am.ablate_heads`.

    Returns:
        One row per pair, in the metric's unit, with intervals over texts. A single sweep measures heads and pairs; a
        head that occurs in several pairs is measured only once.

    Raises:
        InputError: for invalid pairs, and the errors of `am.ablate_heads`.
        JournalError: if the journal belongs to another sweep.
    """
    require_model(model)
    inputs, chosen = reread(inputs), _checked_pairs(model, _pairs_of(model, pairs, heads))
    named = sorted({head for pair in chosen for head in pair})
    ablations = Ablations.of(
        model, inputs, named, method, reference=reference, seed=seed,
        bos=options.get("bos"),
    )  # fmt: skip
    changed = [*((head,) for head in named), *chosen]
    swept = run_sweep(
        model, inputs, [tuple(ablations.of_head(head) for head in ablated) for ablated in changed], metric,
        noted=ablations.options, **options,
    )  # fmt: skip
    singles, both = swept.after[: len(named)], swept.after[len(named) :]
    one, other = (singles[[named.index(pair[side]) for pair in chosen]] for side in (0, 1))
    name = str(swept.provenance.options["metric"])
    return PairEffects(
        metric=name, method=method, pairs=chosen, before=swept.before, after_both=both, after_one=one,
        after_other=other, tokens=swept.tokens, provenance=swept.provenance,
    )  # fmt: skip


def _pairs_of(model: HookedModel, pairs: Any, heads: Heads | None) -> Any:
    if not isinstance(pairs, str):
        if heads is not None:
            raise InputError('`heads` is for pairs="all"; give either a list of pairs or pairs="all" with `heads`.')
        return pairs
    if pairs != "all" or heads is None:
        raise InputError(
            'give a list of pairs, such as [((0, 1), (2, 3))], or pairs="all" with `heads`, a list of (layer, head) or '
            f'"all"; got pairs={shown(pairs)}{" without `heads`" if heads is None else ""}.'
        )
    chosen = model.check_heads(heads)
    if len(chosen) < 2:
        raise InputError(f"pairs need two heads or more; `heads` names only {_named(chosen[0])}.")
    return list(combinations(chosen, 2))


def _checked_pairs(model: HookedModel, pairs: Any) -> tuple[Pair, ...]:
    try:
        checked = [(_checked_head(one), _checked_head(other)) for one, other in pairs]
    except (TypeError, ValueError):
        raise InputError(
            f"`pairs` must be a list of pairs of heads, such as [((0, 1), (2, 3))]; got {shown(pairs)}."
        ) from None
    if not checked:
        raise InputError("`pairs` must name at least one pair; got an empty list.")
    model.check_heads([head for pair in checked for head in pair])
    for one, other in checked:
        if one == other:
            raise InputError(f"a pair needs two heads; got {_named(one)} twice.")
    return tuple(checked)


def _checked_head(place: Any) -> Head:
    layer, head = place
    return integer(layer), integer(head)


def _both_named(pair: Pair) -> str:
    return " + ".join(map(_named, pair))


def _named(head: Head) -> str:
    return f"L{head[0]}H{head[1]}"
