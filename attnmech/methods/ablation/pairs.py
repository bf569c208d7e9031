"""Tests whether two heads interact: ablates them together and each alone (docs/formulas.md#ablation)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Self, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import integer, shown
from ...basics.messages import capitalised
from ...basics.public import public
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...errors import InputError
from ...interventions import Head, Heads, Values
from ...maths.intervals import LEVEL, TextMeans
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import subtracted
from ...results.over_texts import OverTexts, clarity_of
from ...results.provenance import Provenance
from ...results.result import TextResult
from ...runs.ablations import Ablations, reread
from ...runs.claims import interval_note, largest_of
from ...runs.effects import unit_of
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import run_sweep

Pair = tuple[Head, Head]
"""Two heads, as (layer, head)."""


@dataclass(frozen=True, repr=False)
class PairEffects(OverTexts, TextResult):
    """The effects of ablating two heads together and each alone: the metric after minus before.

    interaction = effect of both − effect of one − effect of the other. For metrics that rise with damage (loss, KL),
    it is above 0 for heads that back each other up, and below 0 for heads that need each other. Intervals are over
    texts; `simultaneous`, `clear`, `clear_size` and `one_text` refer to the interactions.
    """

    _is_about_heads = False

    metric: str
    method: str
    pairs: tuple[Pair, ...]
    before: Float[Tensor, " text"]
    """The metric of each text with nothing changed."""
    after_both: Float[Tensor, "pair text"]
    """The metric with both heads ablated; NaN where an interrupted sweep did not measure it."""
    after_one: Float[Tensor, "pair text"]
    """The metric with only the first head of the pair ablated."""
    after_other: Float[Tensor, "pair text"]
    """The metric with only the second head of the pair ablated."""
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes labelled by pairs and texts."""
        return {"pair": len(self.pairs), "text": len(self.tokens)}

    @property
    def per_text(self) -> dict[str, Float[Tensor, "pair text"]]:
        """The effects "both", "one" and "other", and the "interaction", on each text."""
        both, one, other = (after - self.before for after in (self.after_both, self.after_one, self.after_other))
        return {"both": both, "one": one, "other": other, "interaction": both - one - other}

    @property
    def both(self) -> Float[Tensor, " pair"]:
        """The mean effect of ablating both heads."""
        return self.per_text["both"].nanmean(dim=-1)

    @property
    def one(self) -> Float[Tensor, " pair"]:
        """The mean effect of ablating the first head alone."""
        return self.per_text["one"].nanmean(dim=-1)

    @property
    def other(self) -> Float[Tensor, " pair"]:
        """The mean effect of ablating the second head alone."""
        return self.per_text["other"].nanmean(dim=-1)

    @property
    def interaction(self) -> Float[Tensor, " pair"]:
        """The mean of both − one − other."""
        return self.per_text["interaction"].nanmean(dim=-1)

    def interval(self, level: float = LEVEL) -> dict[str, tuple[Float[Tensor, " pair"], Float[Tensor, " pair"]]]:
        """The pointwise t interval of each mean, with the keys of `per_text`; NaN for fewer than five texts."""
        return {
            name: TextMeans.of_values(values, self._copies).interval(level) for name, values in self.per_text.items()
        }

    @property
    def _measured_values(self) -> Float[Tensor, "pair text"]:
        return self.per_text["interaction"]

    @property
    def texts(self) -> Int[Tensor, " pair"]:
        """The number of texts in each mean; for an unpaired difference, the smaller of the two numbers."""
        if self.parts is None or self.paired:
            return (~self.per_text["interaction"].isnan()).sum(dim=-1)
        return torch.minimum(self.parts[0].texts, self.parts[1].texts)

    @property
    def complete(self) -> bool:
        """Whether every pair was measured on every text; False if the sweep was interrupted."""
        return not bool(self.per_text["interaction"].isnan().any())

    def to_frame(self) -> pd.DataFrame:
        """One row per pair: its heads; both, one, other and interaction, each with its _low and _high; texts.

        Further columns: `agreeing`, `clear`, `clear_size` and `one_text` of the interaction.
        """
        places = [(*one, *other) for one, other in self.pairs]
        frame = pd.DataFrame(places, columns=["layer", "head", "other_layer", "other_head"])
        intervals = self.interval()
        for name, values in self.per_text.items():
            low, high = intervals[name]
            frame[name] = values.nanmean(dim=-1).numpy()
            frame[f"{name}_low"], frame[f"{name}_high"] = low.numpy(), high.numpy()
        for name, flags in clarity_of(self._means).items():
            frame[name] = flags.numpy()
        frame["texts"] = self.texts.numpy()
        frame.attrs["intervals"] = interval_note(self._n_distinct, self._n_texts - self._n_distinct)
        return frame

    def plot(self) -> "go.Figure":
        """Draws for each pair the effect of both heads, the sum of their single effects, and the interaction."""
        per_text = self.per_text
        shown = {
            "both together": per_text["both"],
            "sum of the two alone": per_text["one"] + per_text["other"],
            "interaction": per_text["interaction"],
        }
        values = []
        for name, effects in shown.items():
            low, high = TextMeans.of_values(effects, self._copies).interval()
            values.append((name, effects.nanmean(dim=-1).numpy(), low.numpy(), high.numpy()))
        names = [f"{_named(one)} + {_named(other)}" for one, other in self.pairs]
        return interval_rows(names, values, label=f"change ({unit_of(self.metric)})")

    @property
    def _title(self) -> str:
        return f"Effect of {self.method} ablation on {self.metric}, pairs of heads"

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "Each row is a pair of heads. The heads do not interact if ablating both changes the metric by the sum of "
            "their single effects."
        )
        return [Section("Pairs", reading, {"pairs": self.plot()}, "effects.plot()")]

    @property
    def lead(self) -> str:
        """The main finding, in one sentence."""
        count = "1 pair" if len(self.pairs) == 1 else f"{len(self.pairs)} pairs"
        measured = f"{self._opening}{self.method} ablation of {count} of heads on {self._texts}"
        largest = largest_of(
            self,
            self._means,
            lambda place: " + ".join(map(_named, self.pairs[place[0]])),
            things="pairs",
            unit=unit_of(self.metric),
            what="interaction" if self.parts is None else "difference of interactions",
        )
        part = "" if self.complete else "; stopped early, incomplete"
        return capitalised(f"{measured}: {largest}{part}.")

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    def _comparable(self) -> dict[str, Any]:
        return {"metric": self.metric, "method": self.method, "pairs": self.pairs}

    def _minus(self, other: Self, paired: bool) -> Self:
        before = subtracted(self.before, other.before, paired)
        both, one, third = (
            subtracted(self.per_text[name], other.per_text[name], paired) + before for name in ("both", "one", "other")
        )
        tokens = self.tokens if paired else ()
        return replace(self, before=before, after_both=both, after_one=one, after_other=third, tokens=tokens)


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
    >>> texts = ["Anna sang of shells.", "Tom lost his old anchor."]
    >>> effects = am.ablate_pairs(am.load(), texts, [((0, 1), (2, 3))])
    >>> effects.interaction.shape
    torch.Size([1])

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
    return PairEffects(name, method, chosen, swept.before, both, one, other, swept.tokens, swept.provenance)


def _pairs_of(model: HookedModel, pairs: Any, heads: Heads | None) -> Any:
    """Returns the user's pairs, or all pairs of `heads`."""
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


def _named(head: Head) -> str:
    return f"L{head[0]}H{head[1]}"
