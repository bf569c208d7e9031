"""Measures how often heads attend to the token itself, the first token or the previous token; how sharply, and how far.

Formulas: docs/formulas.md#attention-focus.

Figures 4 to 6 of "Attention Focus Plots" (R. Claus); sink rate after Gu et al. 2024, collapse classes after
arXiv 2603.09616.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import index_of, option
from ...basics.nouns import TEXT, Nouns, counted
from ...basics.public import public
from ...draw.numbers import FOCUS_NUMBERS, FocusNumbers
from ...draw.section import Section
from ...draw.text import percent
from ...errors import InputError
from ...maths.focus import STATISTICS, WITH_GLOBAL, GlobalFocusStatistics, collapse_classes
from ...maths.intervals import TextMeans
from ...maths.statistic import RowStatistic, Statistics
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel
from ...results.quantity import Quantity
from ...runs.focus_sums import BY_ROW, FocusSums
from ...runs.options import StreamOptions
from ...runs.reducer import Source, State
from ...runs.row_means import RowMeans
from ...runs.stream import stream
from .figures import rank_lines
from .section import focus_sections


@public
def attention_focus(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    last: int = 8,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> "AttentionFocus":
    """Measures how often each head attends to the token itself, the first or the previous token; how sharply, and how
    far.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> focus = am.attention_focus(am.load(), documents(6))
    >>> focus.first_top.shape
    torch.Size([4, 8])

    A row has a choice if it sees two or more keys. `self_top`, `first_top`, `previous_top` and `elsewhere_top` are the
    shares of these rows in which the highest-scoring key is the token itself, the first token, the previous token or
    another token; rows with a tie for the highest key count only in `tied_top`. Each statistic is averaged over the
    rows that define it. The categories overlap (the previous token of row 1 is the first), and row 0, which has no
    choice in a causal model, is left out; `AttentionFocus.where` selects other rows.

    In a model with global tokens (Longformer, LED's encoder), `global_mass` is the row's Σ_j p_ij over global tokens j,
    `window_mass` that over all other keys; they add up to 1. `uniform_global_mass` is the mass on global tokens if i
    attended uniformly to the keys that it sees. These are means over rows of local tokens; `among_global` is Σ_j p_ij
    over global tokens on the rows of global tokens. The first row, often that of the global token, is left out here
    too: `.where(first_row=True)` counts it. In other models the four are NaN, and the table has no columns for them.

    This takes one forward pass, and never builds a [query key] array of the whole text.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums are stored. Token ids may come with a
            `global_attention_mask` (1 at global tokens, 0 elsewhere). For strings, the global tokens are those of
            transformers in a model of this class: the first token for sequence classification, otherwise none.
        last: the number of keys whose mass `last_mass` adds up: the token itself and the tokens just before it.
        layers: all by default.
        stack: "encoder", "decoder" or "cross" in a model with several stacks.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Statistics `[layer head]`, with intervals over texts: shares of rows and of probability, entropy in nats,
        distance in tokens.

    Raises:
        InputError: for invalid inputs, layers or stacks, and in the cases of `am.stream`.

    Source: "Attention Focus Plots", figures 4 to 6; sink rate: Gu et al. 2024.
    """
    result: AttentionFocus
    (result,) = stream(model, inputs, [FocusReducer(last)], layers=layers, stack=stack, **options)
    return result


class FocusReducer(FocusSums):
    """Sums the statistics of the rows, block by block."""

    def finish(self, state: State, source: Source) -> "AttentionFocus":
        """The result."""
        return AttentionFocus.of(state, source, last=self.last)


@dataclass(frozen=True, repr=False)
class AttentionFocus(GlobalFocusStatistics, RowMeans):
    """Where a model's heads attend: statistics of attention, averaged over the rows of the texts.

    Shares and masses are from 0 to 1, entropy is in nats, distance in tokens. NaN where no row defines a statistic.
    """

    _MAIN = "first_top"
    FIGURES: ClassVar[Mapping[str, str]] = {
        "self_focus": "self_top", "first_focus": "first_top", "concentration": "concentration",
    }  # fmt: skip
    """Figures 4, 5 and 6, each with the statistic that it shows."""
    _BY_ROW = BY_ROW
    _STATE: ClassVar[Mapping[str, Any]] = {
        **RowMeans._STATE,
        "top_key": Int[Tensor, "layer head batch row"],
        "rows": Float[Tensor, " class"],
        "distance": Float[Tensor, "class layer head distance"],
        "received": Float[Tensor, "class layer head key"],
        "uniform": Float[Tensor, "class layer key"],
        "seen": Float[Tensor, "class layer key"],
        "by_type": Float[Tensor, "class layer head type"],
        "uniform_by_type": Float[Tensor, "class layer type"],
        "sinks": Int[Tensor, "layer head key"],
        "sink_rate": Float[Tensor, "layer head key"],
        "samples": Int[Tensor, "layer key"],
    }

    last: int
    """The number of keys that `last_mass` counts."""

    @property
    def _measured_statistics(self) -> Statistics[RowStatistic]:
        """The statistics measured: masses on global tokens only in a model that has them."""
        sums = [result.state["sums"] for result in self._measured()]
        return WITH_GLOBAL if any(len(of_result) == len(WITH_GLOBAL) for of_result in sums) else STATISTICS

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        return {**super()._axis_lengths, "statistic": len(self._measured_statistics)}

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the statistics; those of global tokens only in a model that has them, else they are NaN."""
        return tuple(self._measured_statistics)

    def __getitem__(self, name: str) -> Quantity:
        return self._quantity(option("statistic", name, self.STATISTICS))

    def _by_text(self, name: str) -> TextMeans:
        if self.parts is None and name not in self._measured_statistics:
            none = torch.zeros_like(self.state["sums"][0, 0])
            return TextMeans.of_ratio(none, none)
        return super()._by_text(name)

    def by_row(self, statistic: str) -> Float[Tensor, "layer head batch query"]:
        option("statistic", statistic, self.STATISTICS)
        if self.parts is None and statistic not in self._measured_statistics:
            return torch.full_like(self._row("values")[0], torch.nan)
        return super().by_row(statistic)

    @classmethod
    def reducer(cls, *, last: int = 8) -> FocusReducer:
        """The reducer that computes an `AttentionFocus` in `am.stream`."""
        return FocusReducer(last)

    @property
    def top_key(self) -> Int[Tensor, "layer head batch query"]:
        """The highest key of each row; −1 in rows without a choice and at padding."""
        return self._row("top_key")

    @property
    def distance_histogram(self) -> Float[Tensor, "layer head distance"]:
        """The share of attention that goes to keys at each distance |i − j|, in tokens."""
        sums = self._sums("distance")
        return self._by_layer(sums / sums.sum(dim=-1, keepdim=True))

    @property
    def received(self) -> Float[Tensor, "layer head position"]:
        """The mean attention that the key at each position receives from the rows that see it."""
        return self._sums("received") / self._sums("seen")[:, None]

    @property
    def received_by_type(self) -> Float[Tensor, "layer head type"]:
        """The share of attention that goes to each type of token in `TOKEN_TYPES`; `expected_by_type` is the chance
        level.
        """
        return self._by_layer(self._sums("by_type") / self._sums("uniform_by_type").sum(dim=-1)[:, None, None])

    @property
    def expected_by_type(self) -> Float[Tensor, "layer type"]:
        """`received_by_type` if every row attended uniformly to its visible keys."""
        sums = self._sums("uniform_by_type")
        return self._by_layer(sums / sums.sum(dim=-1, keepdim=True))

    @property
    def sink_rate(self) -> Float[Tensor, "layer head position"]:
        """α_k, the mean of p_ik over the rows i ≥ k that see key k, averaged over texts (Gu et al. 2024)."""
        return self._all_rows("sink_rate") / self._all_rows("samples")[:, None]

    def sink_share(self, position: int = 0) -> float:
        """Sink_k^ε: the share of (text, layer, head) in which α_k is above 0.3."""
        sinks, samples = self._all_rows("sinks"), self._all_rows("samples")
        position = index_of("position", position, samples.shape[-1])
        return float(sinks[..., position].sum() / (samples[:, position].sum() * sinks.shape[1]))

    @property
    def bos_mass(self) -> Float[Tensor, "layer head"]:
        """(1/T) Σ_i p_i0 over all rows, including the first row's 1."""
        return self._over_all_rows("first_mass")

    @property
    def collapse(self) -> tuple[tuple[str, ...], ...]:
        """The collapse class of each head in each layer, as defined in arXiv 2603.09616.

        "dead" if `bos_mass` is above 0.95; otherwise "sink" if it is above 0.5; otherwise "low entropy" if the mean
        entropy over all rows is below 0.5 nats; otherwise "". Heads are "not measured" in other layers, and where no
        row sees two keys, as in texts of one token.
        """
        mass, entropy = self.bos_mass, self._over_all_rows("entropy")
        with_choice = self.state["counts"][self.STATISTICS.place("tied_top")].sum(dim=(0, -1)) > 0
        mass = mass + self._by_layer(torch.where(with_choice, 0.0, torch.nan))
        return collapse_classes(mass, entropy)

    def _over_all_rows(self, statistic: str) -> Float[Tensor, "layer head"]:
        rows = self._all_rows("rows").sum()
        return self._by_layer(self.state["sums"][self.STATISTICS.place(statistic)].sum(dim=(0, -1)) / rows)

    def _all_rows(self, name: str) -> Tensor:
        return self._kept(name, "it is defined over all rows, but this result has only selected rows")

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws figure 4 ("self_focus"), 5 ("first_focus", the default) or 6 ("concentration").

        Any statistic, such as "previous_top" or "entropy", can be drawn as a map of layers × heads; a difference also
        shows figures 4 to 6 as such maps. `layer` and `head` select a head to ring or frame. The figure is returned,
        not shown.
        """
        known = dict.fromkeys((*self.FIGURES, *self.STATISTICS))
        figure = "first_focus" if figure is None else option("figure", figure, known)
        if self._crosses and figure == "self_focus":
            raise InputError('no key of cross-attention is the token itself; use "first_focus" or "concentration".')
        if self.parts is not None or figure not in self.FIGURES:
            return self._map(self.FIGURES.get(figure, figure), layer, head)
        chosen = None if layer is None or head is None else (layer, head)
        return rank_lines(focus_numbers(self), self.FIGURES[figure], chosen)

    def _sections(self, layers: Sequence[int] = ()) -> "Sequence[Section]":
        if self.parts is not None:
            return self._difference_sections(self.FIGURES)
        sections = focus_sections(focus_numbers(self), "focus", layers)
        return sections if self.global_mass.isnan().all() else [*sections, self._global_section()]

    def _global_section(self) -> Section:
        layer, head = divmod(int(self.global_mass.nan_to_num(-1).argmax()), self.global_mass.shape[1])
        share, chance, most = (
            percent(float(value), 0)
            for value in (self.global_mass.nanmean(), self.uniform_global_mass.nanmean(), self.global_mass[layer, head])
        )
        return Section(
            "Attention to global tokens",
            "Each cell is one head: a mean over the rows of local tokens. The two maps sum to 1.",
            {name.replace("_", "-"): self.plot(name) for name in ("global_mass", "window_mass")},
            'focus.plot("global_mass")',
            finding=f"Local tokens give {share} of their attention to global tokens, averaged over heads; uniform "
            f"attention would give {chance}. L{layer}H{head} gives the most ({most}).",
        )

    def _page_sections(self) -> "Sequence[Section]":
        return self._sections(self.layers)

    @property
    def lead(self) -> str:
        finding = self.finding()
        return finding if self.parts is not None else f"On {self._texts}, {finding[0].lower()}{finding[1:]}"

    def finding(self, nouns: Nouns = TEXT) -> str:
        """The main finding in one sentence, with `nouns` as the words for the input."""
        if self.parts is not None:
            return self._difference_lead("first_top")
        if not bool(self.first_top.isfinite().any()):
            return f"No {nouns.token} after the first sees two keys, so where heads attend is not measured."
        strongest = int(self.first_top.nan_to_num(-1).argmax())
        per_layer = self.first_top.shape[1]
        layer, head = divmod(strongest, per_layer)
        tied = int((self.first_top == self.first_top[layer, head]).sum()) - 1
        heads, s = (
            (f"L{layer}H{head} and {tied} other{'' if tied == 1 else 's'}", "")
            if tied > 0
            else (f"L{layer}H{head}", "s")
        )
        ends = self.simultaneous()
        known = (
            ""
            if bool(ends[0][layer, head].isnan())
            else f"; 95 % interval, corrected for {counted(len(self.layers) * per_layer, noun='head')}: "
            f"{percent(float(ends[0][layer, head]), 0)} to {percent(float(ends[1][layer, head]), 0)}"
        )
        over = (
            f"Averaged over {counted(len(self.layers) * per_layer, noun='head')}"
            f", the highest score of a row falls on the"
        )
        mean, most = (percent(float(value), 0) for value in (self.first_top.nanmean(), self.first_top[layer, head]))
        if self._crosses:
            return (
                f"{over} first {nouns.of_keys.token} of the {nouns.key_text} in {mean} of rows; {heads} attend{s} "
                f"there most often ({most}{known}). Where attention is uniform, normalised entropy is 1; the mean "
                f"over heads is {float(self.normalised_entropy.nanmean()):.2f}."
            )
        return (
            f"{over} {nouns.first} in {mean} of rows, and on the {nouns.token} itself in "
            f"{percent(float(self.self_top.nanmean()), 0)}; {heads} attend{s} to the {nouns.first} most often "
            f"({most}{known})."
        )

    @property
    def _crosses(self) -> bool:
        return self.provenance.options.get("stack") == "cross"

    def to_frame(self) -> pd.DataFrame:
        """One row per head: layer, head, every statistic with the ends `_low` and `_high` of its interval, and the
        collapse class.
        """
        frame = super().to_frame()
        if "rows" in self.state:
            collapse = self.collapse
            frame["collapse"] = [name for layer in self.layers for name in collapse[layer]]
        return frame

    def __repr__(self) -> str:
        if self.parts is not None or bool(self.first_top.isnan().all()):
            return super().__repr__()
        layers, heads = len(self.layers), self.self_top.shape[1]
        first, itself = (percent(float(value.nanmean()), 0) for value in (self.first_top, self.self_top))
        of, key, there = "", "token", f", at the token itself in {itself}"
        if self._crosses:
            of, key, there = " of cross-attention", "key token", ""
        return (
            f"AttentionFocus({self._texts}, {counted(layers, noun='layer')} × {counted(heads, noun='head')}{of}; mean "
            f"over heads: highest score at the first {key} in {first} of rows{there}, p(1) − p(2) "
            f"{float(self.concentration.nanmean()):.2f})"
        )

    def _comparable(self) -> dict[str, Any]:
        return super()._comparable() | {"last": self.last}


def focus_numbers(focus: AttentionFocus, nouns: Nouns = TEXT) -> FocusNumbers:
    """Returns the numbers of figures 4 to 6 as arrays; `nouns` are the figures' words for the input."""
    if focus.parts is not None:
        raise InputError("figures 4 to 6 show shares, and this result is a difference; use .plot().")

    def array(value: Tensor) -> Any:
        return value[list(focus.layers)].float().numpy()

    ends = {name: focus[name].interval() for name in FOCUS_NUMBERS}
    left_out = "" if "first" in focus.chosen else f" The first row of each {nouns.text} is excluded."
    return FocusNumbers(
        layers=focus.layers,
        crosses=focus._crosses,
        nouns=nouns,
        **{name: array(focus[name].mean) for name in FOCUS_NUMBERS},
        rows=f"Rows that see only one key are excluded.{left_out}",
        low={name: array(low) for name, (low, _) in ends.items()},
        high={name: array(high) for name, (_, high) in ends.items()},
    )
