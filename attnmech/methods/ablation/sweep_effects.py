"""The effect of each of several interventions on a metric, with intervals over texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.fields import check_rows
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...draw.text import plotly_text, visible_token
from ...interventions.edits import KeyEdit
from ...results.quantity import Places
from ...results.table import require_no_head
from ...runs.effects import OneEffect
from ...runs.sweep import Swept

_LONGEST_NAME: Final = 44  # the largest number of characters of a name that a figure shows


@dataclass(frozen=True, repr=False)
class SweepEffects(OneEffect):
    """How much a metric changes under each of several interventions: `.effect [intervention]`, after minus before.

    Units are the metric's: nats for "loss" and "kl", logits for "logit_difference". Intervals are over texts: they show
    how the mean would vary with other texts of the same kind. In a difference, `before`, `after`, `effect` and
    `rows_without_keys` are differences too.
    """

    _TITLE = "Effect of interventions on {metric}"
    _AXES: ClassVar = {"intervention": "names", "text": "tokens"}
    effect = replace(OneEffect.effect, axes="intervention")

    names: tuple[str, ...]
    """The name of each row: the user's name, or the description of the row's interventions."""
    interventions: tuple[tuple[str, ...], ...]
    """Descriptions of the interventions that each row applies together."""
    after: Float[Tensor, "intervention text"]
    """The metric of each text under each row's interventions; NaN where an interrupted sweep did not measure it."""
    rows_without_keys: Int[Tensor, " intervention"]
    """The number of attention rows of real tokens, over all texts, layers and heads, that are left with no key to
    attend to.

    Only removed keys and cuts leave rows without a key.
    """

    def _check(self) -> None:
        super()._check()
        check_rows("interventions", self.interventions, len(self.names))

    @property
    def _places(self) -> Places:
        rows = {"intervention": self.names}
        return Places(rows, (slice(None),), lambda place: self.names[place[0]], things="interventions")

    @property
    def _further(self) -> Mapping[str, Tensor]:
        return {**super()._further, "rows_without_keys": self.rows_without_keys}

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws a row per entry: its effect with the interval over texts. The figure is returned, not shown."""
        require_no_head(layer, head)
        effect = self._main if figure is None else self[figure]
        low, high = effect.interval()
        values = [(effect.statistic.name, effect.mean.numpy(), low.numpy(), high.numpy())]
        return interval_rows(list(map(_label, self.names)), values, label=self._label_of(effect.statistic.name))

    def _sections(self) -> "Sequence[Section]":
        reading = "Each row is one intervention, or several applied together. The line through a mark is its interval."
        return [Section("Effects", reading, {"effects": self.plot()}, "effects.plot()")]

    @property
    def _about(self) -> str:
        count = "1 intervention" if len(self.names) == 1 else f"{len(self.names)} interventions"
        return f"{self._opening}{count} on {self._texts}"

    @property
    def _remark(self) -> str:
        count = int((self.rows_without_keys > 0).sum())
        if self.parts is not None or not count:
            return ""
        if len(self.names) == 1:
            rows = int(self.rows_without_keys.sum())
            return f"; it leaves {rows:,} row{'' if rows == 1 else 's'} of attention without a key"
        return f"; {count} of them leave{'s' if count == 1 else ''} rows of attention without a key"

    def _comparable(self) -> dict[str, Any]:
        return super()._comparable() | {"interventions": self.interventions}

    def _minus(self, other: Self, paired: bool) -> Self:
        rows = self.rows_without_keys - other.rows_without_keys
        return self._difference(other, paired, {"after": (self.per_text, other.per_text)}, rows_without_keys=rows)


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
    shown = "".join(character if character == " " else visible_token(character) for character in name)
    return plotly_text(shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…")
