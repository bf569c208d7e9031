"""Builds the report of one input: runs the model, and decides how much of the result the page shows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float

from ..activations.pictures import attention_on_pictures
from ..basics.arguments import index_of, whole_number
from ..basics.axes import spread
from ..basics.messages import capitalised
from ..basics.nouns import AFTER_SENSES, HEARD, IMAGE, INPUT, SOUND, TEXT, Nouns, counted
from ..basics.public import public
from ..batch import Batch
from ..demo.text import notes as notes_on_demo
from ..draw.section import Section
from ..draw.senses import Canvas, Spectrogram, picture_section, spectrogram_section
from ..errors import InputError
from ..maths.float64 import as_float64
from ..methods.head_types.head_types import HeadTypes
from ..methods.joint_embedding.patch_images import data_uri
from ..methods.scores.decompose_scores import decompose_scores
from ..model.inputs.encoder import Inputs
from ..model.inputs.encoders import images_of
from ..model.inputs.lengths import warn_of_batch
from ..model.inputs.sounds import SoundEncoder
from ..model.inputs.transcripts import TranscriptEncoder
from ..model.parts.certificate import Certificate
from ..model.proof.certify import certificate_of
from ..model.reading.writers import pictures_added
from ..model.run.hooked import HookedModel, require_model
from ..model.stack.stack import Stack, about_other_layers
from ..points import full_name
from ..results.mean_qk import MeanQK
from . import limits
from .measures import last_pass, on_text, sources_of, streamed, sweeps, types_of
from .result import Report

_WINDOW: Final = 0.025  # the duration of the sound in one column, in seconds
_COLUMNS: Final = 1200  # the maximum number of columns of a spectrogram
_FLOOR: Final = 80.0  # the lowest level drawn, in dB below the loudest cell


def sense_section(
    model: HookedModel, batch: Batch, pattern: Float[np.ndarray, "layer head query key"], call: str, stack: str = ""
) -> Section | None:
    """The image under the attention of a row, or the spectrogram below it; None if the keys are neither."""
    labels = batch.real_tokens[0]
    of_row = call.replace('"{figure}"', '"picture", query={query}').replace(", weighted={weight}", "")
    call = call.replace(', view="{figure}"', "")
    images = images_of(model.encoder, batch)
    if images is not None and model.grid is not None:
        boxes = [_box(label) for label in labels]
        held = [box for box in boxes if box is not None]
        if not held:
            return None
        columns, rows = max(box[2] for box in held), max(box[3] for box in held)
        return picture_section([Canvas(data_uri(images[0]), (columns, rows), boxes)], labels, pattern, call)
    if (pictures := attention_on_pictures(batch, pattern, of_row)) is not None:
        return pictures
    if isinstance(model.encoder, SoundEncoder) and stack != "decoder":
        spectrogram = spectrogram_of(model.encoder, batch, 0)
        frames = [_seconds(label) for label in labels]
        return spectrogram_section(spectrogram, frames=frames, pattern=pattern, call=call, crosses=stack == "cross")
    return None


def spectrogram_of(encoder: SoundEncoder, batch: Batch, row: int) -> Spectrogram:
    """The spectrogram of one recording of a batch.

    For samples: 10 log₁₀ of the power in windows of 25 ms, down to 80 dB below the loudest cell. If the input already
    is a spectrogram: the input itself.
    """
    from scipy import signal  # type: ignore[import-untyped]

    values = as_float64(batch.extra[encoder.signal.argument][row].detach()).cpu().numpy()
    if not encoder.signal.is_wave:
        levels = values if encoder.signal.argument == "input_features" else values.T
        step = encoder.seconds_per_column
        times = (np.arange(levels.shape[1]) + 0.5) * step
        return Spectrogram(times, np.arange(float(len(levels))), levels, ("mel band", "level, as given"))
    if "attention_mask" in batch.extra:
        values = values[batch.extra["attention_mask"][row].bool().cpu().numpy()]
    width = min(len(values), max(8, round(_WINDOW * encoder.rate)))
    step = max(1, width // 2, -(-len(values) // _COLUMNS))
    bands, times, power = signal.spectrogram(
        values, fs=encoder.rate, nperseg=width, noverlap=max(0, width - step), detrend=False
    )
    levels = 10 * np.log10(np.maximum(power, power.max() * 10 ** (-_FLOOR / 10) + np.finfo(float).tiny))
    return Spectrogram(times, bands, levels, ("frequency (Hz)", "power (dB)"))


def nouns_of(model: HookedModel, stack: str = "") -> Nouns:
    """The words for a model's (or a stack's) inputs and their positions."""
    if isinstance(model.encoder, TranscriptEncoder):
        return {"encoder": SOUND, "decoder": TEXT, "cross": HEARD}[stack]
    if model.grid is not None:
        return IMAGE
    return {"tokens": TEXT, "pixels": IMAGE, "sound": SOUND, "tensors": INPUT}[model.architecture.reads]


def _box(label: str) -> tuple[int, int, int, int] | None:
    """The cell of a patch named by its row and column."""
    row, comma, column = label.partition(",")
    if not (comma and row.isdigit() and column.isdigit()):
        return None
    return int(column), int(row), int(column) + 1, int(row) + 1


def _seconds(label: str) -> float | None:
    number, unit, _ = label.partition(" s")
    return float(number) if unit and number.replace(".", "").isdigit() else None


@dataclass(frozen=True)
class ReportText:
    """One text of a report, cut to what a page shows, with what the calls that reproduce its numbers need."""

    batch: Batch
    notes: Sequence[str]  # what the page leaves out of the text, or adds to it
    inputs: Inputs | None  # the input as the user passed it; None if it is one of several that are not strings
    bos: bool | None
    target: str | None
    continued: int  # the largest number of tokens that the model wrote; 0 if it wrote none
    part: tuple[int, int] | None  # the start and the length of the part of a cut text

    @property
    def text(self) -> str:
        """The text as a Python expression."""
        text = repr(self.inputs) if isinstance(self.inputs, str) else "..."
        if self.part is None and self.target is None and not self.continued:
            return text
        options = ("" if self.bos is None else f", bos={self.bos}") + (
            "" if self.target is None else f", target={self.target!r}"
        )
        cut = "" if self.part is None else f".part{self.part}"
        if self.continued and self.batch.target is None:
            return f"model.generate({text}, {self.continued}{options}){cut}"
        encoded = f"model.encode({text}{options}){cut}" if options or cut else text
        return f"model.generate({encoded}, {self.continued})" if self.continued else encoded

    @property
    def note(self) -> str:
        """A comment on a text that is not a string."""
        return "" if isinstance(self.inputs, str) else "  # what this report was given"

    @property
    def options(self) -> str:
        """The further arguments of calls that take the text."""
        return "" if self.bos is None or self.text.startswith("model.") else f", bos={self.bos}"


def calls_of(
    model: HookedModel,
    texts: Sequence[ReportText],
    number: int,
    stack: str,
    centre: Literal["mean"] | MeanQK | None,
    *,
    weighted: bool,
) -> dict[str, str]:
    """Returns the Python calls that reproduce the page's numbers about the input with this number."""
    captured, weight = ('"pattern", "v"', ", weighted={weight}") if weighted else ('"pattern"', "")
    if stack:
        captured = captured.replace('"pattern', f'"{stack}.pattern').replace('"v"', f'"{stack}.v"')
    options = f", stack={stack!r}" if stack else ""
    with_bos = texts[number].options
    arguments = f"(model, text{options}{with_bos})"
    split = "" if centre is None else ", centre={split}" if centre == "mean" else ", centre=means"
    imports = ["import attnmech as am", *["from attnmech.demo.text import documents"] * model.is_demo]
    setup = [*imports, "", f"model = {model.source}", *_texts(texts, number)]
    if model.is_demo:
        setup.append(f"texts += documents({limits.OTHER_TEXTS})")
    if isinstance(centre, MeanQK):
        setup.append("means = ...  # the means that this report was made with")
    return {
        "setup": "\n".join(setup),
        "scores": f"am.decompose_scores{arguments[:-1]}{split})",
        "view": f"model.run(text{with_bos}, points=[{captured}])"
        f'.show("{full_name(stack, "pattern")}", layer={{layer}}, head={{head}}, view="{{figure}}"{weight})',
        "focus": f"am.attention_focus{arguments}",
        "updates": f"am.residual_updates{arguments}",
        "arguments": arguments,
    }


def _texts(texts: Sequence[ReportText], number: int) -> list[str]:
    if len(texts) == 1:
        return [f"text = {texts[0].text}{texts[0].note}", "texts = [text]"]
    return ["texts = [", *[f"    {one.text},{one.note}" for one in texts], "]", f"text = texts[{number}]"]


@public
def report(
    model: HookedModel,
    inputs: Inputs,
    *,
    centre: Literal["auto", "mean"] | MeanQK | None = "auto",
    target: str | Sequence[str] | None = None,
    start: int = 0,
    bos: bool | None = None,
    generate: int = 0,
) -> Report:
    """Decomposes the scores of one text or of several, and gathers what a page about them shows.

    >>> am.report(am.load(), "The keys to the cabinet are here.").write_html("report.html")    # doctest: +SKIP

    The page runs and shows 192 tokens of a longer text (which must fit the model's positions). Of many heads, it holds
    the scores and terms of those that matter most; of very many, it shows some layers. If an encoder of images or sound
    has more than 800 positions (Whisper's 1,500), it shows only the decoder and cross-attention. The page says so. On a
    page about several texts, the reader chooses one; effects of ablations are means over all of them. Under hooks and
    interventions, the page describes the edited model.

    Args:
        model: the model.
        inputs: one text, or up to 12.
        centre: where queries and keys are split, as in `am.decompose_scores`. "auto" splits them at the text's own
            means if the model rotates them, because the model's own terms then do not separate position from content,
            and at the model's biases otherwise.
        target: the text that the decoder of an encoder-decoder reads, or one for each of several texts; by default what
            the model itself writes (greedily, up to 48 tokens). The page then has a choice of stack: encoder, decoder
            or cross, each with its own tokens.
        start: the first of the 192 tokens shown of a long text; a BOS or CLS token stays in front of them.
        bos: whether the text begins with the tokenizer's BOS or CLS token.
        generate: the model first continues each text by up to this many tokens, greedily; the page shows prompt and
            answer. In an encoder-decoder, the most tokens that it writes as the decoder's text.

    Returns:
        The report of the first text; `.texts` holds those of all texts, and `.write_html(path)` writes the page about
        them.

    Raises:
        ExactnessError: under an intervention that changes the scores themselves, because they are then no longer the
            sum of their terms.
        InputError: for more than 12 texts, a text that does not fit the model, or a `start` beyond a text's end.
    """
    *_, whole = reports(model, inputs, centre=centre, target=target, generate=generate, start=start, bos=bos)
    return whole


def reports(
    model: HookedModel,
    inputs: Inputs,
    *,
    centre: Literal["auto", "mean"] | MeanQK | None = "auto",
    target: str | Sequence[str] | None = None,
    start: int = 0,
    bos: bool | None = None,
    generate: int = 0,
    step: Callable[[str], None] = lambda _: None,
    types: dict[str, HeadTypes | None] | None = None,
    first: Report | None = None,
) -> Iterator[Report]:
    """Makes the report without writers, types and ablations, then with them.

    `step` is told what comes next; `types` holds head types by stack: those in it are not measured again, others are
    added. `first` is the report without them, if it was made before.
    """
    require_model(model)
    generate = whole_number("generate", generate, least=0)
    if generate and target is not None:
        raise InputError("give the decoder's text as `target`, or let the model write it with `generate`; not both.")
    batch = model.encoded(inputs, bos=bos, target=target)
    count = len(batch.ids)
    if count > limits.MAX_TEXTS:
        raise InputError(f"a report shows at most {limits.MAX_TEXTS} texts; got {count}. Make several reports.")
    if generate and batch.target is None:
        batch = model.generate(batch, generate)
    whole = int(batch.lengths.min())
    shortest = "the text" if count == 1 else "the shortest text"
    start = index_of("start", start, whole, f"{shortest} has {whole} tokens")
    if start and not model.reads_tokens:
        raise InputError(
            "`start` selects a part of a text; images, recordings and tensors are shown whole, so it "
            f"must be 0; got {start}."
        )
    longest = batch.ids.shape[1]
    if model.is_own and longest > limits.MAX_TOKENS:
        raise InputError(
            f"a report shows at most {limits.MAX_TOKENS} positions; got {longest}. Pass a shorter sequence."
        )
    stacks = [
        stack
        for stack in model.stacks.values()
        if model.reads_tokens or batch.queries(stack.label).ids.shape[1] <= limits.MAX_POSITIONS
    ]
    if not stacks:
        raise InputError(
            f"a report shows at most {limits.MAX_POSITIONS} patches or frames; got {longest}. Use am.attention_focus, "
            'or model.run(..., points=["pattern"]).show("pattern", layer=0, head=0).'
        )
    notes = list[str]()
    if len(stacks) < len(model.stacks):
        notes.append(
            f"The encoder's attention is omitted: a page shows at most {limits.MAX_POSITIONS} patches or frames, and "
            f'this input has {longest}. Use am.attention_focus(model, ..., stack="encoder").'
        )
    texts = [
        _cut(
            model, batch if count == 1 else batch.alone(number), start, _entry(inputs, number, count), bos,
            _entry(target, number, count), generate,
        )
        for number in range(count)
    ]  # fmt: skip
    warn_of_batch(max((text.batch for text in texts), key=lambda text: text.ids.shape[1]), model.trained_length)
    pictures_added(model, batch)  # proves them, so that the certificate says so
    of_stack = partial(_of_stack, model, texts, certificate_of(model), notes, centre)
    by_text = (
        [[of_stack(stack, number) for stack in stacks] for number in range(count)]
        if first is None
        else [[report, *report.others.values()] for report in (first, *first.further)]
    )
    yield _joined(by_text)
    step("tracing scores to their writers")
    for text, of_text in zip(texts, by_text, strict=True):
        for place, report in enumerate(of_text):
            left_out = list[str]()
            sources = sources_of(model, text.batch, report.scores.layers, left_out)
            of_text[place] = replace(report, sources=sources, notes=(*report.notes, *left_out))
    step("measuring the types of heads")
    of_types: dict[str, list[str]] = {stack.label: [] for stack in stacks}
    types = {} if types is None else types
    for stack in stacks:
        if types.get(stack.label) is None:
            types[stack.label] = types_of(model, stack, of_types[stack.label])
    more = list[str]()
    measured = sweeps(model, [text.batch for text in texts], types[stacks[0].label], more, step)
    yield _joined(
        [
            [
                replace(
                    report,
                    types=types[stack.label],
                    on_text="" if types[stack.label] is None else on_text(model, text.batch, stack),
                    measured=measured,
                    notes=(*report.notes, *more, *of_types[stack.label]),
                )
                for stack, report in zip(stacks, of_text, strict=True)
            ]
            for text, of_text in zip(texts, by_text, strict=True)
        ]
    )


def _joined(by_text: Sequence[Sequence[Report]]) -> Report:
    first, *further = (replace(report, others={other.stack: other for other in others}) for report, *others in by_text)
    return replace(first, further=tuple(further))


def _entry(texts: Any, number: int, count: int) -> Any:
    """One of several texts, where they are strings; of a single text, what the user passed."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or len(texts) != count:
        return texts
    return texts[number] if isinstance(texts[number], str) else None


def _cut(
    model: HookedModel, whole: Batch, start: int, inputs: Inputs | None, bos: bool | None, target: str | None,
    generate: int,
) -> ReportText:  # fmt: skip
    """The part of a text that the page shows; the model writes the decoder's text if the user supplied none."""
    batch, length, notes = whole, whole.ids.shape[1], list[str]()
    if batch.senses:
        if start or length > limits.MAX_POSITIONS:
            raise InputError(
                f"a report shows a text with pictures or sounds whole, up to {limits.MAX_POSITIONS} tokens; this one "
                f"has {length}."
            )
    elif model.reads_tokens and (start or length > limits.MAX_TOKENS):
        batch = whole.part(start, limits.MAX_TOKENS)
    part = (start, limits.MAX_TOKENS) if batch.ids.shape[1] < length else None
    if part is not None:
        notes.append(_about_cut(model, batch, length, start))
    if answered := int(batch.is_answer.sum()) if batch.target is None else 0:
        notes.append(f"The model wrote the last {counted(answered, noun='token')} of the text, greedily.")
    batch, continued = _with_target(model, batch, notes, generate)
    return ReportText(batch, notes, inputs, bos, target, continued, part)


def _with_target(model: HookedModel, batch: Batch, notes: list[str], generate: int) -> tuple[Batch, int]:
    """Returns the batch with the decoder's whole text, and the largest number of tokens that the model wrote."""
    target = batch.target
    if target is None or not model.writes_tokens:
        return batch, generate
    if target.ids.shape[1] == 1 and model.points["logits"].absent is None:
        notes.append("The model generated the decoder's text greedily.")
        limit = model.output_stack.architecture.position_limit
        count = min(
            generate or limits.MAX_NEW, limits.MAX_TOKENS, limit - 1 if limit and limit > 1 else limits.MAX_TOKENS
        )
        return model.generate(batch, count), count
    if target.ids.shape[1] > limits.MAX_TOKENS:
        notes.append(
            f"The decoder's text has {target.ids.shape[1]} tokens; only the first {limits.MAX_TOKENS} were run."
        )
        return replace(batch, target=target.beginning(limits.MAX_TOKENS)), 0
    return batch, 0


def _of_stack(
    model: HookedModel,
    texts: Sequence[ReportText],
    certificate: Certificate,
    of_all: Sequence[str],
    centre: Literal["auto", "mean"] | MeanQK | None,
    shown: Stack,
    number: int,
) -> Report:
    """Builds the report of one text on one of the model's stacks; `of_all` are the notes on every text and stack."""
    batch, notes = texts[number].batch, [*texts[number].notes, *of_all]
    queries, keys = batch.queries(shown.label), batch.key_tokens(shown.label)
    cells = len(model.stacks) * len(texts) * shown.n_heads * keys.ids.shape[1]
    length = queries.ids.shape[1]
    sensed = batch.is_sensed[0].nonzero()[:, 0].tolist() if cells * shown.n_layers * length > limits.MAX_CELLS else []
    first = sensed[-1] + 1 if sensed and sensed[-1] + 1 < int(batch.lengths[0]) else 0
    if first:
        notes.append(f"Only the rows of {length - first} tokens are shown, those after the last picture or sound.")
    fits = max(1, limits.MAX_CELLS // (cells * (length - first)))
    layers = [shown.layers[place] for place in spread(shown.n_layers, fits)]
    if len(layers) < shown.n_layers:
        of_stack = f"The {shown.label} stack" if shown.label else "The model"
        shown_of = "1 of them is" if len(layers) == 1 else f"{len(layers)} of them are"
        notes.append(f"{of_stack} has {shown.n_layers} layers; {shown_of} shown.")
    if left_out := about_other_layers(shown):
        notes.append(f"{capitalised(left_out)}.")
    if model.is_demo:
        notes = notes_on_demo(batch.ids[0].tolist()) + notes
    stack, nouns = shown.label or None, AFTER_SENSES if first else nouns_of(model, shown.label)
    if isinstance(centre, str) and centre == "auto":
        # A text without ordinary tokens has no means.
        ordinary = batch.mask & ~batch.is_special & ~batch.first
        centre = "mean" if shown.architecture.rotary is not None and bool(ordinary.any()) else None
    scores = decompose_scores(model, batch, layers=layers, stack=stack, centre=centre)
    native = decompose_scores(model, batch, layers=layers, stack=stack) if centre == "mean" else None
    focus, updates, paths = streamed(model, batch, shown, notes, nouns=nouns, paths=not first)
    if model.edited:
        notes.append(f"Hooks were active at {', '.join(model.edited)}: the numbers describe the edited model.")
    special, key_special = (
        tuple(token in tokens.special for token in tokens.ids[0, tokens.mask[0]].tolist()) for tokens in (queries, keys)
    )
    pattern, norms, expected = last_pass(model, batch, shown, layers, notes, first)
    calls = calls_of(model, texts, number, shown.label, centre, weighted=norms is not None)
    return Report(
        scores=scores,
        native=native,
        focus=focus,
        updates=updates,
        certificate=certificate,
        notes=tuple(notes),
        first=first,
        written=0 if shown.label == "encoder" else int(batch.is_answer.sum()),
        special=special[first:],
        key_special=key_special if shown.label == "cross" or first else (),
        expected=expected,
        calls=calls,
        pattern=pattern,
        paths=paths,
        value_norms=norms,
        sense=sense_section(model, batch, pattern.float().cpu().numpy(), calls["view"], shown.label),
        nouns=nouns,
    )


def _about_cut(model: HookedModel, batch: Batch, whole: int, start: int) -> str:
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
