"""Builds the report of one input: runs the model, and decides how much of the result the page shows."""

from dataclasses import dataclass, replace
from typing import Literal

from ..basics.arguments import index_of
from ..basics.axes import spread
from ..basics.public import public
from ..batch import Batch
from ..demo.about import notes as notes_on_demo
from ..errors import InputError
from ..methods.scores.decompose_scores import decompose_scores
from ..model.inputs.encoder import Inputs
from ..model.parts.certificate import Certificate
from ..model.proof.certify import certify
from ..model.reading.other_layers import about_other_layers
from ..model.run.hooked import HookedModel, require_model
from ..model.stack.stack import Stack
from ..results.mean_qk import MeanQK
from . import limits
from .calls import ReportInputs, calls_of
from .measures import last_pass, sources_of, streamed, sweeps, types_of
from .result import Report
from .senses import nouns_of, sense_section


@public
def report(
    model: HookedModel,
    inputs: Inputs,
    *,
    centre: Literal["auto", "mean"] | MeanQK | None = "auto",
    target: str | None = None,
    start: int = 0,
    bos: bool | None = None,
) -> Report:
    """Decomposes the scores of one text and gathers what a page about it shows.

    >>> am.report(am.load(), "The keys to the cabinet are here.").write_html("report.html")    # doctest: +SKIP

    The page runs and shows 192 tokens of a longer text (which must fit the model's positions), some layers of a model
    with very many heads, and only the decoder and cross-attention if an encoder of images or sound has more than 800
    positions (Whisper's 1,500). The page says so. Under hooks and interventions, it describes the edited model.

    Args:
        model: the model.
        inputs: one text.
        centre: where queries and keys are split, as in `am.decompose_scores`. "auto" splits them at the text's own
            means if the model rotates them, because the model's own terms then do not separate position from content,
            and at the model's biases otherwise.
        target: the text that the decoder of an encoder-decoder reads; by default what the model itself writes
            (greedily, up to 48 tokens). The page then has a choice of stack: encoder, decoder or cross, each with its
            own tokens.
        start: the first of the 192 tokens shown of a long text; a BOS or CLS token stays in front of them.
        bos: whether the text begins with the tokenizer's BOS or CLS token.

    Returns:
        The report; `.write_html(path)` writes the page.

    Raises:
        ExactnessError: under an intervention that changes the scores themselves, because they are then no longer the
            sum of their terms.
        InputError: for several texts, a text that does not fit the model, or a `start` beyond the text's end.
    """
    require_model(model)
    batch = model.encode(inputs, bos=bos, target=target)
    if len(batch.ids) > 1:
        raise InputError(f"a report shows one text; got {len(batch.ids)}. Make one report per text.")
    notes: list[str] = []
    whole = batch.ids.shape[1]
    start = index_of("start", start, whole, f"the text has {whole} tokens")
    if start and not model.reads_tokens:
        raise InputError(
            "`start` selects a part of a text; images, recordings and tensors are shown whole, so it "
            f"must be 0; got {start}."
        )
    if model.reads_tokens and (start or whole > limits.MAX_TOKENS):
        batch = batch.part(start, limits.MAX_TOKENS)
    if model.is_own and whole > limits.MAX_TOKENS:
        raise InputError(f"a report shows at most {limits.MAX_TOKENS} positions; got {whole}. Pass a shorter sequence.")
    stacks = [
        stack
        for stack in model.stacks.values()
        if model.reads_tokens or batch.queries(stack.label).ids.shape[1] <= limits.MAX_POSITIONS
    ]
    if not stacks:
        raise InputError(
            f"a report shows at most {limits.MAX_POSITIONS} patches or frames; got {whole}. Use am.attention_focus, "
            'or model.run(..., points=["pattern"]).show("pattern", layer=0, head=0).'
        )
    if len(stacks) < len(model.stacks):
        notes.append(
            f"The encoder's attention is omitted: a page shows at most {limits.MAX_POSITIONS} patches or frames, and "
            f'this input has {whole}. Use am.attention_focus(model, ..., stack="encoder").'
        )
    length = batch.ids.shape[1]
    if length < whole:
        notes.append(_about_cut(model, batch, whole, start))
    batch, continued = _with_target(model, batch, notes)
    part = (start, limits.MAX_TOKENS) if length < whole else None
    proven = not model.edited and model.certificate.weights == model.weights_hash
    certificate = model.certificate if proven else certify(model)
    made = _Made(model, batch, certificate, ReportInputs(inputs, bos, target, continued, part))
    first, *others = (_of_stack(made, stack, centre, [*notes]) for stack in stacks)
    return replace(first, others={page.stack: page for page in others})


@dataclass(frozen=True)
class _Made:
    """The parts that the reports of a model's stacks share."""

    model: HookedModel
    batch: Batch
    certificate: Certificate
    inputs: ReportInputs


def _with_target(model: HookedModel, batch: Batch, notes: list[str]) -> tuple[Batch, int]:
    """Returns the batch with the decoder's whole text, and the largest number of its tokens that the model wrote."""
    target = batch.target
    if target is None or not model.writes_tokens:
        return batch, 0
    if target.ids.shape[1] == 1 and model.points["logits"].absent is None:
        notes.append("The model generated the decoder's text greedily.")
        limit = model.output_stack.architecture.position_limit
        count = limits.MAX_NEW if limit is None else max(1, min(limits.MAX_NEW, limit - 1))
        return model.generate(batch, count), count
    if target.ids.shape[1] > limits.MAX_TOKENS:
        notes.append(
            f"The decoder's text has {target.ids.shape[1]} tokens; only the first {limits.MAX_TOKENS} were run."
        )
        return replace(batch, target=target.beginning(limits.MAX_TOKENS)), 0
    return batch, 0


def _of_stack(made: _Made, shown: Stack, centre: Literal["auto", "mean"] | MeanQK | None, notes: list[str]) -> Report:
    """Builds the report of one of the model's stacks."""
    model, batch = made.model, made.batch
    queries, keys = batch.queries(shown.label), batch.key_tokens(shown.label)
    fits = max(1, limits.MAX_CELLS // (len(model.stacks) * shown.n_heads * queries.ids.shape[1] * keys.ids.shape[1]))
    layers = [shown.layers[place] for place in spread(shown.n_layers, fits)]
    if len(layers) < shown.n_layers:
        of_stack = f"The {shown.label} stack" if shown.label else "The model"
        notes.append(f"{of_stack} has {shown.n_layers} layers; {len(layers)} of them are shown.")
    if left_out := about_other_layers(shown):
        notes.append(f"{left_out[0].upper()}{left_out[1:]}.")
    if model.is_demo:
        notes = notes_on_demo(batch.ids[0].tolist()) + notes
    stack, nouns = shown.label or None, nouns_of(model, shown.label)
    if isinstance(centre, str) and centre == "auto":
        # A text without ordinary tokens has no means.
        ordinary = batch.mask & ~batch.is_special & ~batch.first
        centre = "mean" if shown.architecture.rotary is not None and bool(ordinary.any()) else None
    scores = decompose_scores(model, batch, layers=layers, stack=stack, centre=centre)
    native = decompose_scores(model, batch, layers=layers, stack=stack) if centre == "mean" else None
    types = types_of(model, shown, notes)
    focus, updates, paths, on_text = streamed(model, batch, shown, notes, nouns=nouns, with_types=types is not None)
    if model.edited:
        notes.append(f"Hooks were active at {', '.join(model.edited)}: the numbers describe the edited model.")
    measured = sweeps(model, batch, notes)
    sources = sources_of(model, batch, layers, notes)
    special, key_special = (
        tuple(token in tokens.special for token in tokens.ids[0, tokens.mask[0]].tolist()) for tokens in (queries, keys)
    )
    pattern, norms, expected = last_pass(model, batch, shown, layers, notes)
    calls = calls_of(model, made.inputs, shown.label, centre, weighted=norms is not None)
    call = calls["view"].replace("{figure}", "map")
    return Report(
        scores=scores,
        native=native,
        focus=focus,
        updates=updates,
        certificate=made.certificate,
        notes=tuple(notes),
        types=types,
        on_text="" if on_text is None else on_text.on_text(),
        measured=measured,
        sources=sources,
        special=special,
        key_special=key_special if shown.label == "cross" else (),
        expected=expected,
        calls=calls,
        pattern=pattern,
        paths=paths,
        value_norms=norms,
        sense=sense_section(model, batch, pattern.float().cpu().numpy(), call, shown.label),
        nouns=nouns,
    )


def _about_cut(model: HookedModel, batch: Batch, whole: int, start: int) -> str:
    """A note on the part of a long text that the page leaves out."""
    length = batch.ids.shape[1]
    if not start:
        cut = f"The text has {whole} tokens; only the first {length} were run and are shown."
        both = (
            " Attention is bidirectional, so the patterns shown are those of the truncated text, not of the whole text."
        )
        return cut if model.causal else cut + both
    kept = 1 if batch.bos else 0
    first = max(start, kept)
    behind = " after the first token" if kept else ""
    last = first + length - kept - 1
    return (
        f"The text has {whole} tokens; tokens {first} to {last} were run as a separate text{behind} and are shown: "
        "no head sees the other tokens."
    )
