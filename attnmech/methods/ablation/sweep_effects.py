"""The effect of each of several interventions on a metric, with intervals over texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.fields import check_rows
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...draw.text import plotly_text, visible_token
from ...interventions.edits import KeyEdit
from ...results.by_layer import subtracted
from ...results.over_texts import OverTexts
from ...results.provenance import Provenance
from ...results.result import TextResult
from ...runs.claims import interval_note, largest_of
from ...runs.effects import strongest_of, unit_of
from ...runs.sweep import Swept

_LONGEST_NAME: Final = 44
"""The largest number of characters of a name that a figure shows."""


@dataclass(frozen=True, repr=False)
class SweepEffects(OverTexts, TextResult):
    """How much a metric changes under each of several interventions: `.effect [intervention]`, after minus before.

    Units are the metric's: nats for "loss" and "kl", logits for "logit_difference". Intervals are over texts: they show
    how the mean would vary with other texts of the same kind. In a difference, `before`, `after`, `effect` and
    `rows_without_keys` are differences too.
    """

    metric: str
    names: tuple[str, ...]
    """The name of each row: the user's name, or the description of the row's interventions."""
    interventions: tuple[tuple[str, ...], ...]
    """Descriptions of the interventions that each row applies together."""
    before: Float[Tensor, " text"]
    """The metric of each text with nothing changed."""
    after: Float[Tensor, "intervention text"]
    """The metric of each text under each row's interventions; NaN where an interrupted sweep did not measure it."""
    rows_without_keys: Int[Tensor, " intervention"]
    """The number of attention rows of real tokens, over all texts, layers and heads, that are left with no key to
    attend to.

    Only removed keys and cuts leave rows without a key.
    """
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes labelled by names and texts."""
        return {"intervention": len(self.names), "text": len(self.tokens)}

    def _check(self) -> None:
        super()._check()
        check_rows("interventions", self.interventions, len(self.names))

    @property
    def per_text(self) -> Float[Tensor, "intervention text"]:
        """The effect on each text."""
        return self.after - self.before

    @property
    def effect(self) -> Float[Tensor, " intervention"]:
        """The mean effect over the measured texts; NaN if there are none."""
        return self.per_text.nanmean(dim=-1)

    @property
    def _measured_values(self) -> Float[Tensor, "intervention text"]:
        return self.per_text

    @property
    def texts(self) -> Int[Tensor, " intervention"]:
        """The number of texts in each mean; for an unpaired difference, the smaller of the two numbers."""
        if self.parts is None or self.paired:
            return (~self.per_text.isnan()).sum(dim=-1)
        return torch.minimum(self.parts[0].texts, self.parts[1].texts)

    @property
    def complete(self) -> bool:
        """Whether every row was measured on every text; False if the sweep was interrupted."""
        return not bool(self.per_text.isnan().any())

    def to_frame(self) -> pd.DataFrame:
        """One row per entry of the sweep.

        Columns: intervention (its name), effect, effect_low, effect_high, agreeing, clear, clear_size, one_text,
        before, after, texts, rows_without_keys. `attrs["intervals"]` explains the columns, or why there are no
        intervals.
        """
        columns = self._columns("effect") | {
            "before": self.before.nanmean().expand(len(self.names)),
            "after": self.after.nanmean(dim=-1),
            "texts": self.texts,
            "rows_without_keys": self.rows_without_keys,
        }
        named = {name: value.tolist() for name, value in columns.items()}
        frame = pd.DataFrame({"intervention": list(self.names), **named})
        frame.attrs["intervals"] = interval_note(self._n_distinct, self._n_texts - self._n_distinct)
        return frame

    def strongest(self, count: int = 10) -> pd.DataFrame:
        """The rows of `to_frame` with the largest absolute effects, clear effects first."""
        return strongest_of(self.to_frame(), count)

    def plot(self) -> "go.Figure":
        """Draws a row per entry: its effect with the interval over texts. The figure is returned, not shown."""
        low, high = self.interval()
        values = [("effect", self.effect.numpy(), low.numpy(), high.numpy())]
        return interval_rows(list(map(_label, self.names)), values, label=f"change ({unit_of(self.metric)})")

    @property
    def _title(self) -> str:
        return f"Effect of interventions on {self.metric}"

    def _sections(self) -> "Sequence[Section]":
        reading = "Each row is one intervention, or several applied together. The line through a mark is its interval."
        return [Section("Effects", reading, {"effects": self.plot()}, "effects.plot()")]

    @property
    def lead(self) -> str:
        """The main finding, in one sentence."""
        count = "1 intervention" if len(self.names) == 1 else f"{len(self.names)} interventions"
        largest = largest_of(
            self,
            self._means,
            lambda place: self.names[place[0]],
            things="interventions",
            unit=unit_of(self.metric),
            what="effect" if self.parts is None else "difference",
        )
        part = "" if self.complete else "; stopped early, incomplete"
        return f"{self._opening}{count} on {self._texts}: {largest}{part}{self._keyless}."

    @property
    def _keyless(self) -> str:
        """The end of the lead: how many rows have no key."""
        count = int((self.rows_without_keys > 0).sum())
        if self.parts is not None or not count:
            return ""
        if len(self.names) == 1:
            rows = int(self.rows_without_keys.sum())
            return f"; it leaves {rows:,} row{'' if rows == 1 else 's'} of attention without a key"
        return f"; {count} of them leave{'s' if count == 1 else ''} rows of attention without a key"

    @property
    def _n_texts(self) -> int:
        return len(self.before)

    def _comparable(self) -> dict[str, Any]:
        options = {"later": self.provenance.options.get("later")}
        return {"metric": self.metric, "interventions": self.interventions, **options}

    def _minus(self, other: Self, paired: bool) -> Self:
        before = subtracted(self.before, other.before, paired)
        return replace(
            self,
            before=before,
            after=subtracted(self.per_text, other.per_text, paired) + before,
            rows_without_keys=self.rows_without_keys - other.rows_without_keys,
            tokens=self.tokens if paired else (),
        )


def sweep_effects(names: Sequence[str], interventions: Sequence[Sequence[object]], swept: Swept) -> SweepEffects:
    """The effects of a sweep, one row per change."""
    keyless = torch.zeros_like(swept.after) if swept.keyless is None else swept.keyless
    return SweepEffects(
        metric=str(swept.provenance.options["metric"]),
        names=tuple(names),
        interventions=tuple(tuple(map(str, entry)) for entry in interventions),
        before=swept.before,
        after=swept.after,
        rows_without_keys=keyless.nan_to_num(0.0).sum(dim=1).long(),
        tokens=swept.tokens,
        provenance=swept.provenance,
    )


def removes_keys(changes: Sequence[Sequence[Any]]) -> bool:
    """Whether any intervention may leave a row without a key."""
    return any(isinstance(intervention.edit, KeyEdit) for change in changes for intervention in change)


def _label(name: str) -> str:
    """A name as a figure shows it, on one line."""
    shown = "".join(character if character == " " else visible_token(character) for character in name)
    return plotly_text(shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…")
