"""Does a head matter? Each is ablated alone, and a metric measured before and after (formulas §5)."""

from collections.abc import Iterable
from typing import Unpack

from ..interventions import Heads, Values
from ..model.hooked import HookedModel, require_model
from ..model.inputs import Inputs
from ..runs.ablations import Ablations, reread
from ..runs.effects import HeadEffects, effects_of
from ..runs.journal import owning_journal
from ..runs.metrics import MetricLike
from ..runs.options import SweepOptions, require_known
from ..runs.sweep import sweep


@owning_journal
def ablate_heads(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    heads: Heads = "all",
    method: str = "zero",
    metric: MetricLike = "loss",
    *,
    layers: Iterable[int] | None = None,
    reference: Values | Inputs | Iterable[Inputs] | None = None,
    per_position: bool = False,
    later: str = "recompute",
    shifts: bool = False,
    draws: int = 1,
    seed: int = 0,
    **options: Unpack[SweepOptions],
) -> HeadEffects:
    """By how much a metric changes when each head, alone, is ablated.

    >>> import attnmech as am
    >>> effects = am.ablate_heads(am.load(), ["Anna sang of shells.", "Tom lost his old anchor."])
    >>> effects.effect.shape                 # metric after minus before, mean over texts
    torch.Size([4, 8])

    `method` says what becomes of the head's z: 0; its mean over the texts in `reference` (or what
    `am.mean_z` found of them), pooled over their tokens or `per_position`; or what it is in another of the inputs,
    drawn by `seed` ("resample"; with `draws`, what is measured of a text is the mean over so many others, and
    `HeadEffects.draw_spread` says how much the choice of them matters).

    `metric`: "loss" (cross-entropy of the next token, nats), "kl" (divergence from the clean output, nats),
    "logit_difference" and "accuracy" of `answers`, a token for each text, `against` another, at the last token; or a
    function `(logits, batch) -> [text]`.

    `later="recompute"` gives the total effect. `later="frozen"` gives the direct effect: all that other heads and
    MLPs write, in this layer and in later ones, is held at its clean value, so that only what the head itself writes is
    missing from the last stream (norms are taken anew). Total less direct is what later layers make of it.
    `shifts=True` also measures how far the patterns of all heads move (`HeadEffects.shift`).

    `memory` is by how many GB the sweep may grow. With `journal`, a path, `ablate_heads` resumes if interrupted: the
    same call goes on from what the file holds, and removes it at the end. Ctrl-C raises `KeyboardInterrupt`; with
    `partial` it returns what is done (`HeadEffects.complete` is then False).

    Raises `InputError` for heads, metrics, answers or references that cannot be, `JournalError` for the journal of
    another sweep (with other code of the metric or of a hook, too) or of one under way in another process.
    Source: Michel et al. 2019 (zero), Wang et al. 2023 (mean), Chan et al. 2022 (resample).
    """
    require_model(model)
    require_known(options, SweepOptions)
    inputs, chosen = reread(inputs), model.check_heads(heads, layers)
    ablations = Ablations.of(
        model, inputs, chosen, method, reference=reference, per_position=per_position, draws=draws, seed=seed,
        bos=options.get("bos"),
    )  # fmt: skip
    noted = {**ablations.options, "heads": "all" if isinstance(heads, str) else [list(head) for head in chosen]}
    swept = sweep(
        model, inputs, [(ablations.of_head(head, draw),) for head in chosen for draw in range(draws)], metric,
        later=later, shifts=shifts, noted=noted, **options,
    )  # fmt: skip
    return effects_of(model, chosen, swept, method, draws)
