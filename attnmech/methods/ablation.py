"""Does a head matter? Ablate each head alone and compare a metric before and after (formulas §5)."""

from collections.abc import Iterable
from typing import Unpack

from ..interventions import Heads, Intervention, Values
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
    method: str | Intervention = "zero",
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
    """How much a metric changes when each head is ablated alone.

    >>> import attnmech as am
    >>> effects = am.ablate_heads(am.load(), ["Anna sang of shells.", "Tom lost his old anchor."])
    >>> effects.effect.shape                 # metric after minus before, mean over texts
    torch.Size([4, 8])

    `method` says what replaces the head's z: 0 ("zero"); its mean over the texts in `reference` (or what `am.mean_z`
    returned for them), pooled over their tokens or `per_position` ("mean"); or its z on another of the inputs, or on
    one of the texts in `reference`, drawn by `seed` ("resample"; each text is then averaged over `draws` donors, and
    `HeadEffects.draw_spread` says how much their choice matters). An `am.Intervention` in all heads, such as
    `am.Intervention.attend("all", "uniform")` or `am.Intervention.scale("position")`, is a template that is applied to
    each head alone.

    `metric`: "loss" (cross-entropy of the next token, nats), "kl" (divergence from the clean output, nats),
    "logit_difference" and "accuracy" at the last token, of `answers` (one token per text, or one for all) `against`
    another; "log_probability" of answers of one token or several, with which the texts must end: the sum over an
    answer's tokens of ln p, each given all before it; or a function `(logits, batch) -> [text]`.

    `later="recompute"` gives the total effect. `later="frozen"` gives the direct effect: what all other heads and MLPs
    write, in this layer and in later ones, is held at its clean value, so that only what the head itself writes is
    missing from the last stream (norms are recomputed). Total minus direct is the effect through later layers.
    `shifts=True` also measures how far the patterns of all heads move (`HeadEffects.shift`).

    All sweeps share `options`: answers, against, bos, memory, journal, engine, partial and progress (`SweepOptions`).
    `memory` is how many GB the sweep may use on top of the model; `engine=am.Ray(...)` has worker processes measure.
    With `journal`, a path, `ablate_heads` resumes if interrupted: the same call continues from what the file holds, and
    removes it at the end. Ctrl-C raises `KeyboardInterrupt`; with `partial` it returns what is done
    (`HeadEffects.complete` is then False).

    Raises `InputError` for invalid heads, metrics, answers or references, `JournalError` for the journal of another
    sweep (or if the code of the metric or of a hook has changed) or of one that another process is running.
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
    return effects_of(model, chosen, swept, ablations.method, draws)
