"""Ablates each head alone and compares a metric before and after (docs/formulas.md#ablation)."""

from collections.abc import Iterable
from typing import Unpack

from ...basics.public import public
from ...interventions import Heads, Intervention, Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...runs.ablations import Ablations, reread
from ...runs.effects import HeadEffects, effects_of
from ...runs.journal import owning_journal
from ...runs.metrics import MetricLike
from ...runs.options import SweepOptions
from ...runs.sweep import run_sweep


@public
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
    later: str = "recompute",
    shifts: bool = False,
    draws: int = 1,
    seed: int = 0,
    **options: Unpack[SweepOptions],
) -> HeadEffects:
    """Measures how much a metric changes when each head is ablated alone.

    effect = metric after − metric before on each text, averaged over texts.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> effects = am.ablate_heads(am.load(), documents(6))
    >>> effects.effect.shape                 # metric after minus before, mean over texts
    torch.Size([4, 8])

    Args:
        model: the model.
        inputs: texts, or token ids; an iterator is read once and kept in memory.
        heads: a list of (layer, head), or "all".
        method: what replaces the head's z: 0 ("zero"), its mean over `reference` ("mean"), or its z on another input or
            on a text of `reference` ("resample"). Or an `am.Intervention` in all heads, such as
            `am.Intervention.attend("all", "uniform")` or `am.Intervention.scale("position")`, which is applied to one
            head at a time.
        metric: "loss" (cross-entropy of the next token, nats; in a masked language model such as BERT, of masked
            tokens: each copy of the text masks about 15 % of the ordinary tokens, so that every token is masked in one
            copy, with the same masks before and after); "kl" (divergence from the clean output, nats);
            "logit_difference" and "accuracy" compare `answers` (one token per text, or one for all) with `against` at
            the last token; "log_probability" is the sum of ln p over the tokens of an answer (one or more tokens, with
            which the text must end), each conditional on all tokens before it. For classifiers and custom modules,
            "cross_entropy" (nats), "accuracy" and "mse" compare the output with `answers`: the class of each text or
            token (-100 is ignored), or numbers in the output's shape. Or a function `(logits, batch) -> [text]`, which
            reads `answers` from `batch.answers`: `lambda logits, batch: logits[range(len(logits)), batch.answers]` is
            the logit of the right class.
        layers: the layers to ablate if `heads` is "all"; by default all.
        reference: the texts to average over, or the result of `am.mean_z` for them; for "resample", the donors. No
            token of these texts is masked.
        later: "recompute" gives the total effect. "frozen" gives the direct effect: the outputs of all other heads and
            MLPs, in this layer and in later ones, keep their clean values, so the final stream lacks only what the head
            itself writes (norms are recomputed). Total minus direct is the effect through later layers.
        shifts: whether to also measure how far the patterns of all heads move (`HeadEffects.shift`).
        draws: for "resample", the number of donors to average over for each text; `HeadEffects.draw_spread` measures
            how much the choice of donors matters.
        seed: draws the donors of "resample".
        options: the options of all sweeps. `answers` and `against`: see `metric`. `bos`: whether each text begins with
            the tokenizer's BOS or CLS token. `memory`: how many GB the sweep may use on top of the model. `journal`, a
            path: after an interruption, the same call resumes from this file and removes it at the end. `partial`:
            Ctrl-C returns the effects measured so far (`HeadEffects.complete` is then False) instead of raising
            `KeyboardInterrupt`. `progress`: a bar on stderr. `engine=am.Ray(...)` measures in worker processes.

    Returns:
        Effects `[layer head]` in the metric's unit, with intervals over texts (five texts or more).

    Raises:
        InputError: for invalid heads, metrics, answers or references.
        JournalError: if the journal belongs to another sweep or is in use by another process, or if the code of the
            metric or of a hook has changed.

    Source: Michel et al. 2019 (zero), Wang et al. 2023 (mean), Chan et al. 2022 (resample); Salazar et al. 2020
    (pseudo-log-likelihood, which masks one token at a time).
    """
    require_model(model)
    inputs, chosen = reread(inputs), model.check_heads(heads, layers)
    ablations = Ablations.of(
        model, inputs, chosen, method, reference=reference, draws=draws, seed=seed,
        bos=options.get("bos"),
    )  # fmt: skip
    noted = {**ablations.options, "heads": "all" if isinstance(heads, str) else [list(head) for head in chosen]}
    swept = run_sweep(
        model, inputs, [(ablations.of_head(head, draw),) for head in chosen for draw in range(draws)], metric,
        later=later, shifts=shifts, noted=noted, **options,
    )  # fmt: skip
    return effects_of(model, chosen, swept, ablations.method, draws)
