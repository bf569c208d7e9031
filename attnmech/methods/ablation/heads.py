"""Does a head matter? Ablate each head alone and compare a metric before and after (docs/formulas.md#ablation)."""

from collections.abc import Iterable
from typing import Unpack

from ...interventions import Heads, Intervention, Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...runs.ablations import Ablations, reread
from ...runs.effects import HeadEffects, effects_of
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions, require_known
from ...runs.sweep import run_sweep


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

    effect = metric after − metric before, text by text; then the mean over texts.

    >>> import attnmech as am
    >>> effects = am.ablate_heads(am.load(), ["Anna sang of shells.", "Tom lost his old anchor."])
    >>> effects.effect.shape                 # metric after minus before, mean over texts
    torch.Size([4, 8])

    Args:
        model: the model.
        inputs: texts, or token ids; an iterator of them is read once and kept.
        heads: a list of (layer, head), or "all".
        method: what replaces the head's z: 0 ("zero"); its mean over `reference` ("mean"); or its z on another of the
            inputs, or on one of the texts in `reference` ("resample"). Or an `am.Intervention` in all heads, such as
            `am.Intervention.attend("all", "uniform")` or `am.Intervention.scale("position")`: a template that is
            applied to each head alone.
        metric: "loss" (cross-entropy of the next token, nats; in a masked language model such as BERT, of masked
            tokens: each ordinary token of a text is masked once, in a copy of which about 15 % is masked, with the same
            masks before and after); "kl" (divergence from the clean output, nats); "logit_difference" and "accuracy" at
            the last token, of `answers` (one token per text, or one for all) `against` another; "log_probability" of
            answers of one token or several, with which the texts must end: the sum over an answer's tokens of ln p,
            each given all before it. For a classifier and a module of your own, "cross_entropy" (nats), "accuracy" and
            "mse" of the output against `answers`: the class of each text or token (-100 does not count), or numbers in
            the output's shape. Or a function `(logits, batch) -> [text]`, which finds `answers` in `batch.answers`:
            `lambda logits, batch: logits[range(len(logits)), batch.answers]` is the logit of the right class.
        layers: the layers of the heads, where `heads` is "all"; by default all.
        reference: the texts over which means are taken, or what `am.mean_z` returned for them; for "resample", the
            donors. No token of these is masked.
        per_position: whether means are taken position by position, rather than pooled over tokens.
        later: "recompute" gives the total effect, "frozen" the direct one: what all other heads and MLPs write, in this
            layer and in later ones, is held at its clean value, so that only what the head itself writes is missing
            from the last stream (norms are recomputed). Total minus direct is the effect through later layers.
        shifts: whether to measure also how far the patterns of all heads move (`HeadEffects.shift`).
        draws: for "resample", over how many donors each text is averaged; `HeadEffects.draw_spread` says how much their
            choice matters.
        seed: draws the donors of "resample".
        options: what all sweeps share. `answers` and `against`: see `metric`. `bos`: whether each text begins with the
            tokenizer's first token. `memory`: how many GB the sweep may use on top of the model. `journal`, a path: if
            interrupted, the same call resumes from what the file holds; it is removed at the end. `partial`: Ctrl-C
            returns what is done (`HeadEffects.complete` is then False) instead of raising `KeyboardInterrupt`.
            `progress`: a bar on stderr. `engine=am.Ray(...)` has worker processes measure.

    Returns:
        Effects `[layer head]` in the metric's unit, with intervals over texts (from five texts on).

    Raises:
        InputError: for invalid heads, metrics, answers or references.
        JournalError: for the journal of another sweep (or if the code of the metric or of a hook has changed), or of
            one that another process is running.

    Source: Michel et al. 2019 (zero), Wang et al. 2023 (mean), Chan et al. 2022 (resample); Salazar et al. 2020
    (pseudo-log-likelihood, which masks one token at a time).
    """
    require_model(model)
    require_known(options, SweepOptions)
    inputs, chosen = reread(inputs), model.check_heads(heads, layers)
    ablations = Ablations.of(
        model, inputs, chosen, method, reference=reference, per_position=per_position, draws=draws, seed=seed,
        bos=options.get("bos"),
    )  # fmt: skip
    noted = {**ablations.options, "heads": "all" if isinstance(heads, str) else [list(head) for head in chosen]}
    swept = run_sweep(
        model, inputs, [(ablations.of_head(head, draw),) for head in chosen for draw in range(draws)], metric,
        later=later, shifts=shifts, noted=noted, **options,
    )  # fmt: skip
    return effects_of(model, chosen, swept, ablations.method, draws)
