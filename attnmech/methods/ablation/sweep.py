"""Measures each of several interventions on the same texts, or whole sets of heads (docs/formulas.md#ablation)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self, TypeAlias, Unpack

import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import shown, string
from ...basics.fields import check_rows
from ...basics.public import public
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...draw.text import plotly_text, visible_token
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...interventions.edits import KeyEdit
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.quantity import Places
from ...results.table import require_no_head
from ...runs.ablations import Ablations, reread
from ...runs.effects import OneEffect
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import run_sweep

Entry: TypeAlias = Intervention | Sequence[Intervention]  # one measurement: an intervention, or several at once
_LONGEST_NAME: Final = 44  # the largest number of characters of a name that a figure shows


@public
@owning_journal
def sweep(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    interventions: Sequence[Entry] | Mapping[str, Entry],
    metric: MetricLike = "loss",
    *,
    later: str = "recompute",
    **options: Unpack[SweepOptions],
) -> "SweepEffects":
    """Measures how much a metric changes under each of several interventions.

    effect = metric under the intervention − metric with nothing changed, on each text.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> change = am.Intervention
    >>> effects = am.sweep(
    ...     am.load(),
    ...     documents(6),
    ...     {
    ...         "layer 1 attends evenly": change.attend([(1, head) for head in range(8)], "uniform"),
    ...         "no position": change.scale("position"),
    ...         "neither head": [change.zero([(0, 1)]), change.zero([(2, 3)])],
    ...     },
    ... )
    >>> effects.names[1], effects.effect.shape, effects.rows_without_keys.tolist()
    ('no position', torch.Size([3]), [0, 0, 0])

    Args:
        model: the model.
        inputs: texts, or token ids.
        interventions: a list of entries, or a mapping from names to entries. An entry is an `am.Intervention`, or a
            list of interventions that are applied together. Entries of a list are named by their descriptions.
        metric: as in `am.ablate_heads`.
        later: as in `am.ablate_heads`; "frozen" requires interventions in heads.
        options: answers, against, bos, memory, journal, engine, partial and progress, as in `am.ablate_heads`.

    Returns:
        One row per entry, in order, in the metric's unit, with intervals over texts. Removed keys and cuts can leave
        rows of attention without a key; such rows attend to nothing, and `rows_without_keys` counts them.

    Raises:
        InputError: for entries that are not interventions, and the errors of `am.ablate_heads`.
        JournalError: if the journal belongs to another sweep.

    """
    require_model(model)
    entries = _entries(interventions)
    changes = [change for _, change in entries]
    return _measured(model, reread(inputs), [name for name, _ in entries], changes, metric, later, None, options)


def _entries(interventions: Any) -> list[tuple[str, tuple[Intervention, ...]]]:
    if isinstance(interventions, str | Intervention) or not isinstance(interventions, Iterable):
        raise InputError(
            "`interventions` must be a list of am.Intervention, such as [am.Intervention.zero([(0, 1)])], or a mapping "
            f"from names to them; got {shown(interventions)}."
        )
    named = isinstance(interventions, Mapping)
    pairs = list(interventions.items() if isinstance(interventions, Mapping) else enumerate(interventions))
    if not pairs:
        raise InputError("`interventions` must hold at least one am.Intervention; got none.")
    entries = []
    for name, entry in pairs:
        change = (entry,) if isinstance(entry, Intervention) else entry
        where = f"`interventions`[{name!r}]"
        if not isinstance(change, list | tuple) or not all(isinstance(part, Intervention) for part in change):
            raise InputError(f"{where} must be an am.Intervention or a list of them; got {shown(entry)}.")
        if not change:
            raise InputError(f"{where} must hold at least one am.Intervention; got an empty list.")
        label = string("interventions", name, "have strings as names") if named else "; ".join(map(str, change))
        entries.append((label, tuple(change)))
    return entries


@public
@owning_journal
def ablate_set(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    heads: Heads | Mapping[str, Heads],
    method: str | Intervention = "zero",
    metric: MetricLike = "loss",
    *,
    reference: Values | Inputs | Iterable[Inputs] | None = None,
    later: str = "recompute",
    seed: int = 0,
    **options: Unpack[SweepOptions],
) -> "SweepEffects":
    """Measures how much a metric changes when all heads of a set are ablated together.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> effects = am.ablate_set(am.load(), documents(6), [(0, 1), (2, 3), (2, 5)])
    >>> effects.names, effects.effect.shape
    (('L0H1 + L2H3 + L2H5',), torch.Size([1]))

    Args:
        model: the model.
        inputs: texts, or token ids.
        heads: a list of (layer, head), or "all"; or several sets for one sweep, as a mapping from names to lists.
        method: how heads are ablated: "zero", "mean" or "resample" as in `am.ablate_heads`, or an `am.Intervention` in
            all heads, such as `am.Intervention.attend("all", "uniform")`, which is then applied to the heads of each
            set.
        metric: as in `am.ablate_heads`.
        reference: the texts to average over, or the result of `am.mean_z` for them; for "resample", the donors.
        later: "recompute" for the total effect, "frozen" for the direct effect.
        seed: draws the donors of "resample".
        options: answers, against, bos, memory, journal, engine, partial and progress, as in `am.ablate_heads`.

    Returns:
        One row per set, in the metric's unit, with intervals over texts.

    Raises:
        InputError: for an empty set, for heads that the model does not have, and the errors of `am.ablate_heads`.
        JournalError: if the journal belongs to another sweep.

    """
    require_model(model)
    sets = _sets(model, heads)
    inputs, chosen = reread(inputs), sorted({head for members in sets.values() for head in members})
    ablations = Ablations.of(
        model, inputs, chosen, method, reference=reference, seed=seed,
        bos=options.get("bos"),
    )  # fmt: skip
    changes = [ablations.of_set(members) for members in sets.values()]
    noted = ablations.options | {"sets": {name: [list(head) for head in members] for name, members in sets.items()}}
    return _measured(model, inputs, list(sets), changes, metric, later, noted, options)


def _sets(model: HookedModel, heads: Any) -> dict[str, list[Head]]:
    if not isinstance(heads, Mapping):
        chosen = model.check_heads(heads)
        return {"all heads" if isinstance(heads, str) else " + ".join(f"L{a}H{b}" for a, b in chosen): chosen}
    if not heads:
        raise InputError("`heads` must name at least one set of heads; got an empty mapping.")
    return {
        string("heads", name, "have strings as names of its sets"): model.check_heads(members)
        for name, members in heads.items()
    }


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


def _measured(
    model: HookedModel,
    inputs: Any,
    names: Sequence[str],
    changes: Sequence[tuple[Intervention, ...]],
    metric: MetricLike,
    later: str,
    noted: Mapping[str, Any] | None,
    options: SweepOptions,
) -> SweepEffects:
    keyless = any(isinstance(change.edit, KeyEdit) for entry in changes for change in entry)
    swept = run_sweep(model, inputs, changes, metric, later=later, keyless=keyless, noted=noted, **options)
    left = torch.zeros_like(swept.after) if swept.keyless is None else swept.keyless
    return SweepEffects(
        metric=str(swept.provenance.options["metric"]),
        names=tuple(names),
        interventions=tuple(tuple(map(str, entry)) for entry in changes),
        before=swept.before,
        after=swept.after,
        rows_without_keys=left.nan_to_num(0.0).sum(dim=1).long(),
        tokens=swept.tokens,
        provenance=swept.provenance,
    )


def _label(name: str) -> str:
    shown = "".join(character if character == " " else visible_token(character) for character in name)
    return plotly_text(shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…")
