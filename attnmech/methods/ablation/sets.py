"""Ablates all heads of a set at once (docs/formulas.md#ablation)."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from ...basics.arguments import string
from ...basics.public import public
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...runs.ablations import Ablations, reread
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import run_sweep
from .sweep_effects import SweepEffects, removes_keys, sweep_effects


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
) -> SweepEffects:
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
    swept = run_sweep(
        model, inputs, changes, metric, later=later, keyless=removes_keys(changes), noted=noted, **options
    )  # fmt: skip
    return sweep_effects(list(sets), changes, swept)


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
