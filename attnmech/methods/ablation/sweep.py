"""Measures each of several interventions on the same texts (docs/formulas.md#ablation)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

from ...basics.arguments import shown, string
from ...basics.public import public
from ...errors import InputError
from ...interventions import Intervention
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...runs.ablations import reread
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import run_sweep
from .sweep_effects import SweepEffects, removes_keys, sweep_effects

Entry: TypeAlias = Intervention | Sequence[Intervention]  # one measurement: an intervention, or several at once


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
) -> SweepEffects:
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
    swept = run_sweep(
        model, reread(inputs), changes, metric, later=later, keyless=removes_keys(changes), **options
    )  # fmt: skip
    return sweep_effects([name for name, _ in entries], changes, swept)


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
