"""Several results of one text on one page: what `attnmech report` shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..basics.axes import spread
from ..basics.files import check_writable, path_of, writing
from ..basics.nouns import TEXT, Nouns
from ..batch import Batch
from ..demo.about import notes as notes_on_demo
from ..demo.text import documents
from ..draw.embed import View
from ..draw.numbers import ScoreNumbers, TableRow
from ..draw.page import Page, render_page, render_stacks
from ..draw.section import OfPattern, Section
from ..draw.text import bound, html_text, percent
from ..errors import ExactnessError, InputError, OutputError, UnsupportedModelError, first_line, index_of
from ..maths.scores import names_along_row
from ..methods.ablation.heads import ablate_heads
from ..methods.focus.attention_focus import AttentionFocus
from ..methods.focus.section import about_all_heads
from ..methods.head_types.formulas import targets
from ..methods.head_types.head_types import RESTING, HeadTypes, HeadTypesReducer, head_types
from ..methods.head_types.repeated import TOKENS
from ..methods.null_attention.result import INTERVENTIONS, NullAttention, null_attention
from ..methods.scores.decompose_by_source import SourceDecomposition, decompose_by_source
from ..methods.scores.decompose_scores import ScoreDecomposition, decompose_scores
from ..methods.updates.result import ResidualUpdates
from ..model.inputs.encoder import Inputs
from ..model.parts.certificate import Certificate
from ..model.proof.certify import certify
from ..model.reading.other_layers import about_other_layers
from ..model.run.hooked import HookedModel, require_model
from ..model.run.masking import MaskedCopies
from ..model.stack.stack import Stack
from ..points import full_name
from ..results.mean_qk import MeanQK
from ..runs.effects import HeadEffects
from ..runs.stream import Reducer, stream
from .senses import nouns_of, sense_section
from .tokens import TokenPaths

MAX_TOKENS: Final = 192
"""A page shows at most this many tokens of a text."""

MAX_POSITIONS: Final = 800
"""A page shows attention of at most this many patches of an image, or frames of a recording, which cannot be cut."""

MAX_WORK: Final = 1_000_000_000_000
"""A page's sweeps take at most so many multiplications of a weight each, about 20 seconds on two cores."""

MAX_REASONS: Final = 6_000
"""A page holds at most so many lines of reasons."""

OTHER_TEXTS: Final = 40
"""With the demo model, as many further texts give the sweeps their intervals."""

MAX_NEW: Final = 48
"""Where an encoder-decoder is given no target, at most so many tokens of its own are taken for one."""

STACK_WORDS: Final = {
    "encoder": "encoder: source to source",
    "decoder": "decoder: target to target",
    "cross": "cross: target to source",
}
"""The stacks of an encoder-decoder, for a reader who chooses one."""

MAX_CELLS: Final = 2_250_000
"""A page holds at most this many scores, about 20 MB; of larger models it shows some layers."""


_STATUS: Final[dict[str, Literal["ok", "warn", "fail"] | None]] = {
    "holds": "ok",
    "differs": "warn",
    "FAILS": "fail",
    "not checked": None,
}
"""How the page marks a check."""


@dataclass(frozen=True)
class Measured:
    """A result on the page whose sentence and section are its own."""

    question: str
    """What it answers, in a few words."""
    result: HeadEffects | NullAttention
    call: str
    """The Python that makes it again."""


R = TypeVar("R", bound=HeadEffects | NullAttention)


@dataclass(frozen=True, repr=False)
class Report:
    """One text on one model: why, where and what its heads write, the model's certificate, and the page of it all."""

    scores: ScoreDecomposition
    native: ScoreDecomposition | None
    """The same scores split at the model's own biases, where `scores` are split at the text's means."""
    focus: AttentionFocus
    updates: ResidualUpdates | None
    """What heads write; None where blocks have no stream."""
    certificate: Certificate
    notes: tuple[str, ...]
    """What the page leaves out, and why."""
    types: HeadTypes | None
    """What types of heads the model has, on random tokens; None where it would take minutes."""
    on_text: str
    """What heads do with this text's delimiters, described and not claimed."""
    measured: tuple["Measured", ...]
    """What was found by ablations, on the page's text and others of the demo model's language."""
    sources: SourceDecomposition | None
    """Which upstream writers make each head look where it looks."""
    special: tuple[bool, ...]
    """Which tokens of the text are special ones of the tokenizer."""
    expected: View | None
    """What the model predicts at each token."""
    calls: Mapping[str, str]
    """The Python that makes the page's numbers again, by the method."""
    pattern: Float[Tensor, "layer head query key"]
    """The attention of the layers shown, as the model used it: after the hooks in force."""
    paths: TokenPaths
    """What becomes of each token."""
    value_norms: Float[Tensor, "layer head key"] | None
    """‖(x_j W_V + b_V) W_O‖ of each key in each head; None where a gate is between attention and W_O."""
    sense: Section | None = None
    """The image or the recording itself, with the attention of a row."""
    nouns: Nouns = TEXT
    """What the input and its positions are called."""
    key_special: tuple[bool, ...] = ()
    """In cross-attention, which of the key tokens are special ones."""
    others: Mapping[str, "Report"] = field(default_factory=dict)
    """Of a model with several stacks, the reports of the others by their names: `report.others["cross"]`."""

    def __repr__(self) -> str:
        return f"Report({self.lead})"

    def __sub__(self, other: object) -> "Report":
        raise InputError("two reports have no difference; subtract results that they hold: one.focus - other.focus.")

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: the largest residual and score of its heads, and the heads' mean share of each term."""
        frame = self.scores.to_frame()
        how = {name: "mean" if name.endswith("_share") else "max" for name in map(str, frame.columns)}
        return (
            frame.drop(columns="head")
            .groupby("layer", as_index=False)
            .agg({name: way for name, way in how.items() if name not in ("layer", "head")})
        )

    def to_html(self) -> str:
        """The page: one file that opens without a network; of several stacks a reader chooses one."""
        if not self.others:
            return render_page(self._page())
        reports = {self.stack: self, **self.others}
        pages = {name: report._page() for name, report in reports.items()}
        if not any(report.nouns.keys for report in reports.values()):
            return render_stacks(pages, {name: STACK_WORDS[name] for name in pages})
        ends = {name: (report.nouns.tokens, report.nouns.of_keys.tokens) for name, report in reports.items()}
        return render_stacks(pages, {name: f"{name}: {queries} to {keys}" for name, (queries, keys) in ends.items()})

    @property
    def stack(self) -> str:
        """The stack that this is about: "encoder", "decoder", "cross", or "self" where there is one."""
        return str(self.scores.provenance.options["stack"])

    def _page(self) -> Page:
        """What the page says of this stack."""
        view = self.scores.numbers(pattern=self.pattern, nouns=self.nouns)
        norms = None if self.value_norms is None else self.value_norms.float().cpu().numpy()
        view = replace(
            view,
            notes=(*self.notes, *view.notes),
            special=self.special,
            key_special=self.key_special,
            value_norms=norms,
        )
        provenance = self.scores.provenance
        return Page(
            title=f"Where the attention of “{_short(provenance.model)}” looks, and why",
            lead=self.lead,
            view=view,
            sections=self._sections(view),
            facts=self._facts(view),
            checks=[
                TableRow(check.name, check.statement, _STATUS[check.status], check.evidence)
                for check in self.certificate.checks
            ],
            provenance=provenance.entries,
            setup=self.calls["setup"],
            reasons=self._reasons(len(view.tokens)),
            brief=self.findings,
            start=self._start(view),
        )

    @property
    def findings(self) -> dict[str, str]:
        """What was found, a sentence for each question."""
        found = {} if self.types is None else {"Kinds of heads": f"{self.types.lead}{self._beginning}"}
        found["Where heads look"] = self.focus.finding(self.nouns)
        if self._why:
            found["Why they look there"] = self._why
        if self.updates is not None:
            found["What they write"] = self.updates.finding(self.nouns)
        return found | {each.question: each.result.lead for each in self.measured}

    @property
    def _beginning(self) -> str:
        """At which head the page begins."""
        example = None if self.types is None else self.types.example
        if self.types is None or example is None or example[0] not in self.scores.layers:
            return ""
        layer, head = example
        kind = _chosen_for(self.types.types_of(layer, head))
        score = float(self.types.scores[kind][layer, head])
        return f" Start at L{layer}H{head} ({kind} {score:.2f}), which this page shows first."

    @property
    def effects(self) -> HeadEffects | None:
        """What zeroing each head does to the loss; None where it would take minutes."""
        return self._found(HeadEffects)

    @property
    def null(self) -> NullAttention | None:
        """What attention to the first token is good for; None where it would take minutes."""
        return self._found(NullAttention)

    def _found(self, kind: type[R]) -> R | None:
        return next((each.result for each in self.measured if isinstance(each.result, kind)), None)

    def _sections(self, view: ScoreNumbers) -> list[Section]:
        """The page's sections: those of figures 1 to 10, and after them what else was measured."""
        nouns, layers, calls = self.nouns, view.layers, self.calls
        other = None if self.native is None else self.native.numbers(pattern=self.pattern, nouns=nouns)
        further = [each.result.section(each.call, layers, self._texts) for each in self.measured]
        heads = about_all_heads(self.focus.numbers(nouns))
        overview, *scores = self.scores.sections(view, calls["scores"], calls["view"], heads, other)
        return [
            *([] if self.sense is None else [self.sense]),
            overview if self.types is None else self._with_types(overview, self.types),
            *([] if self.types is None else [self._types(self.types)]),
            *scores,
            *self._kernels,
            *([] if self.expected is None else [_expected(self.expected)]),
            *self.paths.sections(calls["given"], view.tokens, layers, nouns),
            *self.focus.sections(calls["focus"], layers, nouns),
            *([] if self.updates is None else self.updates.sections(calls["updates"], layers, nouns)),
            *(_numbered(section, number) for number, section in enumerate(further, start=11)),
        ]

    def _with_types(self, overview: Section, types: HeadTypes) -> Section:
        """The small maps, whose hover boxes say what type each head is of."""
        heads = range(self.scores.residual.shape[1])
        told = tuple(types.told(layer, head) for layer in self.scores.layers for head in heads)
        return replace(overview, figures={name: OfPattern("model", told) for name in overview.figures})

    def _types(self, types: HeadTypes) -> Section:
        """The atlas, with the effects of ablations where there are any."""
        effect = None if self.effects is None else self.effects.effect
        measured = [] if effect is None else effect.isfinite().nonzero().tolist()
        effects = {} if effect is None else {(layer, head): float(effect[layer, head]) for layer, head in measured}
        return types.section("am.head_types(model)", effects=effects, about_text=self.on_text)

    @property
    def _kernels(self) -> list[Section]:
        """The scores by distance, where their position term is a function of it."""
        by_position = self.scores.reference is not None and self.scores.reference.by_position
        if by_position or "position" not in names_along_row(self.scores.parts):
            return []
        call = self.calls["scores"].replace("{split}", '"mean"')
        return [self.scores.position_kernel().section(call, self.nouns)]

    def _start(self, view: ScoreNumbers) -> tuple[int, int, int] | None:
        """The head that is most clearly of a kind, or else without which the loss changes most; and the row in which it
        looks hardest at what such a head looks for, or else at another token.
        """
        example = None if self.types is None else self.types.example
        if self.types is not None and example is not None and example[0] in view.layers:
            layer, head = view.layers.index(example[0]), example[1]
            kinds = self.types.types_of(*example)
            kind = _chosen_for(kinds)
            causal = not np.triu(view.pattern, 1).any()
            on_target = view.pattern[layer, head] * _targets(view.tokens, kind, causal=causal)
            on_target[0] = 0
            if on_target.max() > 0:
                return example[0], head, int(on_target.sum(axis=1).argmax())
        elif self.effects is not None:
            effect = self.effects.effect[list(view.layers)].abs().nan_to_num()
            layer, head = divmod(int(effect.argmax()), effect.shape[1])
        else:
            return None
        elsewhere = view.pattern[layer, head].copy()
        elsewhere[:, 0] = 0
        np.fill_diagonal(elsewhere, 0)
        return view.layers[layer], head, int(elsewhere.max(axis=1).argmax())

    @property
    def _texts(self) -> str:
        assert self.effects is not None
        count = len(self.effects.before)
        return "this text" if count == 1 else f"this text and {count - 1} others that the grammar generated"

    def _reasons(self, tokens: int) -> list[list[list[str]]]:
        """Why each head of the page looks where it looks, query by query."""
        if self.sources is None:
            return []
        heads = range(self.scores.residual.shape[1])
        return [
            [[self.sources.explain(layer, head, query) for query in range(tokens)] for head in heads]
            for layer in self.scores.layers
        ]

    def save(self, path: str | Path) -> Path:
        """Writes the page, whole or not at all."""
        target = path_of(path, OutputError)
        check_writable(target)
        with writing(target) as draft:
            draft.write_text(self.to_html(), encoding="utf-8")
        return target

    @property
    def lead(self) -> str:
        """One sentence that the numbers support."""
        frame = self.scores.to_frame()
        residual, largest = float(frame.residual.max()), float(frame.largest_score.max())
        exactly = f"to within {bound(residual, 2)} of a largest score of {largest:.3g}" if residual else "exactly"
        return f"{len(frame)} heads on one {self.nouns.text}, each score the sum of its terms {exactly}."

    @property
    def _why(self) -> str:
        """Which term makes up most of a row's highest score, where there are several."""
        frame = self.scores.to_frame()
        shares = frame.filter(like="_share").mean().dropna()
        if len(shares) < 2:
            return ""
        first = str(shares.idxmax()).removesuffix("_share").replace("_", "-")
        where = f"Averaged over {len(frame)} heads and all rows"
        return (
            f"{where}, {first} makes up {percent(shares.max(), 0)} of what lifts a row's highest score (see figure 2)."
        )

    def _repr_html_(self) -> str:
        page = html_text(self.to_html())
        return f'<iframe srcdoc="{page}" title="attnmech report" style="width:100%;height:85vh;border:0"></iframe>'

    def _facts(self, view: ScoreNumbers) -> list[TableRow]:
        shown = list(self.scores.layers)
        largest, residual = (float(each[shown].max()) for each in (self.scores.largest, self.scores.residual))
        terms = ", ".join(name for name in self.scores.terms if name != "mask")
        return [
            TableRow(f"{self.nouns.place}s", str(len(view.tokens))),
            *([TableRow(f"key {self.nouns.of_keys.tokens}", str(len(view.keys)))] if view.crosses else []),
            TableRow("layers shown", ", ".join(map(str, view.layers))),
            TableRow("heads in each", str(view.scores.shape[1])),
            TableRow("terms of a score", terms),
            TableRow(
                "largest residual",
                bound(residual, 2) if residual else "none",
                "ok",
                f"max |Σ terms − score|, where the largest score is {largest:.3g}",
            ),
            TableRow(
                "certificate",
                self.certificate.verdict,
                "ok" if self.certificate.ok else "fail",
                "see the checks below",
            ),
        ]


def _expected(view: View) -> Section:
    return Section(
        name="expected",
        contents="What the model expects",
        heading="What the model expects",
        finding=view.finding,
        reading="The redder a token, the likelier it was; white below e⁻⁵ = 0.7 %. Point at one for its probability, "
        "its rank (0 the likeliest) and the ten likeliest in its place. Drawn by CircuitsVis.",
        caveat="This is the whole model's prediction, not one head's doing. The first token is not predicted by "
        "anything.",
        figures={"expected-tokens": view},
        call='model.run(text).show("logits")',
    )


def _targets(tokens: Sequence[str], kind: str, *, causal: bool = True) -> Bool[np.ndarray, "query key"]:
    """The keys that a head of some kind would look at, in a text whose first token begins it."""
    length = len(tokens)
    _, ids = np.unique(np.array(tokens, dtype=object).astype(str), return_inverse=True)
    first = torch.arange(length)[None] == 0
    found = targets(torch.from_numpy(ids)[None], first, {}, range(length), length, causal=causal)
    return found[kind][0].numpy() if kind in found else np.zeros((length, length), dtype=bool)


def _chosen_for(kinds: Sequence[str]) -> str:
    """The type for which a head was chosen: what it rests on is a place to start at only if there is no other."""
    return next((each for each in kinds if each not in RESTING), kinds[0])


def _numbered(section: Section, number: int) -> Section:
    return replace(section, heading=f"Figure {number}. {section.heading}", contents=f"{number} {section.contents}")


def _short(name: str) -> str:
    """A model's name as a heading: of a folder the end of its path.

    >>> _short("demo"), _short("bigscience/bloom-560m")
    ('demo', 'bigscience/bloom-560m')
    """
    folder = Path(name)
    return "/".join(folder.parts[-2:]) if folder.is_absolute() else name


def report(
    model: HookedModel,
    inputs: Inputs,
    *,
    bos: bool | None = None,
    target: str | None = None,
    start: int = 0,
    centre: Literal["auto", "mean"] | MeanQK | None = "auto",
) -> Report:
    """Decomposes the scores of one text and gathers what a page about it shows.

    >>> am.report(am.load(), "The keys to the cabinet are here.").save("report.html")    # doctest: +SKIP

    Of a text longer than 192 tokens (it must fit the model's positions) 192 are run and shown; of a model with very
    many heads, some layers; where an encoder of images or sound has more than 800 positions (Whisper's 1,500), the
    decoder and cross-attention alone. The page says so. Under hooks and interventions the page shows what the model
    then does.

    Args:
        model: the model.
        inputs: one text.
        bos: whether it begins with the tokenizer's first token.
        target: the text that the decoder of an encoder-decoder reads; without one, what the model itself writes is
            taken (greedily, up to 48 tokens). The page then has a choice of stack: encoder, decoder or cross, each with
            its own tokens.
        start: of a long text, the token from which on 192 are shown, after the first token if the tokenizer put one
            there.
        centre: where queries and keys are split, as in `am.decompose_scores`: by default ("auto") at the text's own
            means where the model rotates them, since its own terms then do not tell position from content, and at its
            biases elsewhere.

    Returns:
        The report; `.save(path)` writes the page.

    Raises:
        ExactnessError: under an intervention that changes the scores themselves, since they are no longer the sum of
            their terms.
        InputError: for several texts, a text that does not fit the model, or a `start` beyond its end.
    """
    require_model(model)
    batch = model.encode(inputs, bos=bos, target=target)
    if len(batch.ids) > 1:
        raise InputError(f"a report shows one text; got {len(batch.ids)}. Make one for each.")
    notes: list[str] = []
    whole = batch.ids.shape[1]
    start = index_of("start", start, whole, f"the text has {whole} tokens")
    if start and not model.reads_tokens:
        raise InputError(f"`start` chooses a part of a text, and an image or a tensor is shown whole; got {start}.")
    if model.reads_tokens and (start or whole > MAX_TOKENS):
        batch = batch.part(start, MAX_TOKENS)
    if model.is_own and whole > MAX_TOKENS:
        raise InputError(f"a report shows up to {MAX_TOKENS} positions; got {whole}. Give a shorter sequence.")
    stacks = [
        stack
        for stack in model.stacks.values()
        if model.reads_tokens or batch.queries(stack.label).ids.shape[1] <= MAX_POSITIONS
    ]
    if not stacks:
        raise InputError(
            f"a report shows up to {MAX_POSITIONS} patches or frames; got {whole}. Take am.attention_focus, or "
            'model.run(..., points=["pattern"]).show("pattern", layer=0, head=0).'
        )
    if len(stacks) < len(model.stacks):
        notes.append(
            f"The encoder's attention is left out: a page shows it between up to {MAX_POSITIONS} patches or frames, "
            f'and here are {whole}. Take am.attention_focus(model, ..., stack="encoder").'
        )
    length = batch.ids.shape[1]
    if length < whole:
        notes.append(_about_cut(model, batch, whole, start))
    batch, continued = _with_target(model, batch, notes)
    part = (start, MAX_TOKENS) if length < whole else None
    proven = not model.edited and model.certificate.weights == model.weights_hash
    certificate = model.certificate if proven else certify(model)
    made = _Made(model, batch, certificate, Given(inputs, bos, target, continued, part))
    first, *others = (_of_stack(made, stack, centre, [*notes]) for stack in stacks)
    return replace(first, others={each.stack: each for each in others})


@dataclass(frozen=True)
class Given:
    """What a report was given, to write the calls that make its numbers again."""

    inputs: Inputs
    bos: bool | None
    target: str | None
    continued: int
    """Where the target is the model's own continuation, up to how many tokens; else 0."""
    part: tuple[int, int] | None
    """Where a text was cut, and to how many tokens."""

    @property
    def text(self) -> str:
        """The text, as Python."""
        text, note = (
            (repr(self.inputs), "") if isinstance(self.inputs, str) else ("...", "  # what this report was given")
        )
        if self.part is None and self.target is None and not self.continued:
            return f"{text}{note}"
        options = ("" if self.bos is None else f", bos={self.bos}") + (
            "" if self.target is None else f", target={self.target!r}"
        )
        cut = "" if self.part is None else f".part{self.part}"
        encoded = f"model.encode({text}{options}){cut}" if options or cut else text
        return f"model.generate({encoded}, {self.continued}){note}" if self.continued else f"{encoded}{note}"

    @property
    def options(self) -> str:
        """What calls that take the text are given besides it."""
        return "" if self.bos is None or self.text.startswith("model.") else f", bos={self.bos}"


@dataclass(frozen=True)
class _Made:
    """What the reports of a model's stacks share."""

    model: HookedModel
    batch: Batch
    certificate: Certificate
    given: Given


def _with_target(model: HookedModel, batch: Batch, notes: list[str]) -> tuple[Batch, int]:
    """The batch with a decoder's text that is shown whole, and up to how many tokens the model wrote of it."""
    target = batch.target
    if target is None or not model.writes_tokens:
        return batch, 0
    if target.ids.shape[1] == 1 and model.points["logits"].absent is None:
        notes.append("The decoder's text is what the model itself writes, the likeliest token at each step.")
        limit = model.output_stack.architecture.position_limit
        count = MAX_NEW if limit is None else max(1, min(MAX_NEW, limit - 1))
        return model.generate(batch, count), count
    if target.ids.shape[1] > MAX_TOKENS:
        notes.append(f"The decoder's text has {target.ids.shape[1]} tokens; the first {MAX_TOKENS} were run.")
        return replace(batch, target=target.beginning(MAX_TOKENS)), 0
    return batch, 0


def _of_stack(made: _Made, shown: Stack, centre: Literal["auto", "mean"] | MeanQK | None, notes: list[str]) -> Report:
    """What is shown of one of the model's stacks."""
    model, batch = made.model, made.batch
    queries, keys = batch.queries(shown.label), batch.key_tokens(shown.label)
    fits = max(1, MAX_CELLS // (len(model.stacks) * shown.n_heads * queries.ids.shape[1] * keys.ids.shape[1]))
    layers = [shown.layers[place] for place in spread(shown.n_layers, fits)]
    if len(layers) < shown.n_layers:
        of_stack = f"The {shown.label} stack" if shown.label else "The model"
        notes.append(f"{of_stack} has {shown.n_layers} layers; {len(layers)} of them are shown.")
    if left_out := about_other_layers(shown):
        notes.append(f"{left_out[0].upper()}{left_out[1:]}.")
    if model.is_demo:
        notes = notes_on_demo(batch.ids[0].tolist()) + notes
    stack = shown.label or None
    if isinstance(centre, str) and centre == "auto":
        # A text without a token that counts has no means.
        ordinary = batch.mask & ~batch.is_special & ~batch.first
        centre = "mean" if shown.architecture.rotary is not None and bool(ordinary.any()) else None
    scores = decompose_scores(model, batch, layers=layers, stack=stack, centre=centre)
    native = decompose_scores(model, batch, layers=layers, stack=stack) if centre == "mean" else None
    types = _types(model, shown, notes)
    focus, updates, paths, on_text = _streamed(model, batch, shown, notes, with_types=types is not None)
    if model.edited:
        notes.append(f"Hooks were in force at {', '.join(model.edited)}: these numbers are not the model's own.")
    measured = _measured(model, batch, notes)
    sources = _sources(model, batch, layers, notes)
    special, key_special = (
        tuple(token in tokens.special for token in tokens.ids[0, tokens.mask[0]].tolist()) for tokens in (queries, keys)
    )
    pattern, norms, expected = _last_pass(model, batch, shown, layers, notes)
    calls = _calls(model, made.given, shown.label, centre, weighted=norms is not None)
    return Report(
        scores,
        native,
        focus,
        updates,
        made.certificate,
        tuple(notes),
        types,
        "" if on_text is None else on_text.on_text(),
        measured,
        sources,
        special,
        expected,
        calls,
        pattern,
        paths,
        norms,
        sense_section(
            model, batch, pattern.float().cpu().numpy(), calls["view"].replace("{figure}", "map"), shown.label
        ),
        nouns_of(model, shown.label),
        key_special if shown.label == "cross" else (),
    )


def _streamed(
    model: HookedModel, batch: Batch, shown: Stack, notes: list[str], *, with_types: bool
) -> tuple[AttentionFocus, ResidualUpdates | None, TokenPaths, HeadTypes | None]:
    """What one pass measures: where heads look, what they write if there is a stream, what becomes of each token, and
    what heads do with the text's delimiters.
    """
    reducers: dict[str, Reducer] = {"focus": AttentionFocus.reducer()}
    if shown.label == "cross":
        notes.append('What heads write is left out: am.residual_updates(model, inputs, stack="cross") measures it.')
    elif shown.architecture.streams:
        reducers["updates"] = ResidualUpdates.reducer()
    else:
        notes.append(f"What heads write is left out: {model.points[shown.point('resid_pre')].absent}.")
    if with_types:
        reducers["types"] = HeadTypesReducer()
    by_token = TokenPaths.reducers(model, batch, notes, nouns_of(model, shown.label))
    reducers |= by_token
    found = dict(zip(reducers, stream(model, batch, list(reducers.values()), stack=shown.label or None), strict=True))
    paths = TokenPaths(**{name: found[name] for name in by_token})
    return found["focus"], found.get("updates"), paths, found.get("types")


def _about_cut(model: HookedModel, batch: Batch, whole: int, start: int) -> str:
    """What the page leaves out of a long text, and what that changes."""
    length = batch.ids.shape[1]
    if not start:
        cut = f"The text has {whole} tokens; the first {length} were run and are shown."
        both = " This model looks both ways, so the attention shown is that of the cut text, not of the whole."
        return cut if model.causal else cut + both
    kept = 1 if batch.bos else 0
    first = max(start, kept)
    behind = " after the first token" if kept else ""
    last = first + length - kept - 1
    return (
        f"The text has {whole} tokens; tokens {first} to {last} were run and are shown{behind}, as a text of their "
        "own: no head sees the tokens left out."
    )


def _last_pass(
    model: HookedModel, batch: Batch, stack: Stack, layers: list[int], notes: list[str]
) -> tuple[Float[Tensor, "layer head query key"], Float[Tensor, "layer head key"] | None, View | None]:
    """The attention between the text's real tokens, the norms of what each would write to another; and what the model
    predicts, if it predicts each next token.
    """
    predicts = model.causal and model.points["logits"].absent is None and len(model.stacks) == 1
    predicts = predicts and model.reads_tokens and batch.ids.shape[1] > 1
    if predicts and (refused := model.refused.get("logits")) is not None:
        notes.append(f"What the model expects is left out: {refused}.")
        predicts = False
    point = stack.point("pattern")
    v = stack.point("v")
    with_v = [] if model.points[v].absent is not None or v in model.refused else [v]
    ran = model.run(batch, [point, *with_v, *(["logits"] if predicts else [])], layers=layers)
    real, real_keys = batch.queries(stack.label).mask[0], batch.key_tokens(stack.label).mask[0]
    pattern = torch.stack([ran[point, layer][0][:, real][:, :, real_keys] for layer in layers])
    norms = None
    if all((point, layer) in ran.value_norms for layer in layers):
        norms = torch.stack([ran.value_norms[point, layer][0][:, real_keys] for layer in layers])
    return pattern, norms, ran.show("logits") if predicts else None


def _types(model: HookedModel, stack: Stack, notes: list[str]) -> HeadTypes | None:
    """What types of heads there are, where that can be had in seconds."""
    if not model.reads_tokens:
        return None
    weights = sum(parameter.numel() for parameter in model.base.parameters()) - model.embedding.numel()
    if weights * TOKENS > MAX_WORK:
        notes.append("The kinds of heads are left out, since they would take minutes: see attnmech heads.")
        return None
    try:
        return head_types(model, stack=stack.label or None)
    except InputError as error:
        notes.append(f"The kinds of heads are left out: {first_line(error)}")
        return None


def _measured(model: HookedModel, batch: Batch, notes: list[str]) -> tuple[Measured, ...]:
    """The sweeps that can be had in seconds: on the page's text and, with the demo model, on more of its language."""
    predicts_tokens = model.points["logits"].absent is None and model.predicts in ("next token", "masked token")
    if not predicts_tokens or len(model.stacks) > 1:
        return ()
    copies = 1
    if model.predicts == "masked token":
        try:
            masked = MaskedCopies.of(batch, model.mask_id)
            masked.require_all([0])
        except InputError as error:
            notes.append(f"Ablations are left out: {first_line(error)}")
            return ()
        copies = len(masked.text_of)
    texts: list[Any] = [batch]
    if model.is_demo:
        texts += documents(OTHER_TEXTS)
    heads = model.n_layers * model.n_heads
    weights = sum(parameter.numel() for parameter in model.base.parameters()) - model.embedding.numel()
    work = heads * weights * batch.ids.numel() * copies * len(texts)
    if batch.ids.shape[1] < 2 or work > MAX_WORK:
        notes.append("Ablations are left out, since they would take minutes: see attnmech ablate and attnmech null.")
        return ()
    effects = Measured("What matters", ablate_heads(model, iter(texts)), "am.ablate_heads(model, texts)")
    if len(INTERVENTIONS) * work > MAX_WORK:
        notes.append("The test of null attention is left out, since it would take minutes: see attnmech null.")
        return (effects,)
    if not model.output_stack.architecture.streams:
        return (effects,)
    null = Measured(
        "First token",
        null_attention(model, iter(texts), heads="attending"),
        'am.null_attention(model, texts, heads="attending")',
    )
    return effects, null


def _sources(model: HookedModel, batch: Batch, layers: list[int], notes: list[str]) -> SourceDecomposition | None:
    if len(layers) * model.n_heads * batch.ids.shape[1] > MAX_REASONS:
        notes.append("Which writers make a head look there is left out for want of space: see am.decompose_by_source.")
        return None
    if model.edited:
        return None
    try:
        return decompose_by_source(model, batch, layers=layers)
    except (UnsupportedModelError, ExactnessError) as error:
        notes.append(f"Which writers make a head look there is left out: {first_line(error)}")
        return None


def _calls(
    model: HookedModel, made_of: Given, stack: str, centre: Literal["mean"] | MeanQK | None, *, weighted: bool
) -> dict[str, str]:
    """The Python that makes the page's numbers again."""
    captured, weight = ('"pattern", "v"', ", weighted={weight}") if weighted else ('"pattern"', "")
    if stack:
        captured = captured.replace('"pattern', f'"{stack}.pattern').replace('"v"', f'"{stack}.v"')
    options = f", stack={stack!r}" if stack else ""
    with_bos, text = made_of.options, made_of.text
    given = f"(model, text{options}{with_bos})"
    split = "" if centre is None else ", centre={split}" if centre == "mean" else ", centre=means"
    setup = ["import attnmech as am", "", f"model = {model.source}", f"text = {text}"]
    if model.is_demo:
        documents = "from attnmech.demo.text import documents"
        setup[1:1] = [documents]
        setup.append(f"texts = [text, *documents({OTHER_TEXTS})]")
    else:
        setup.append("texts = [text]")
    if isinstance(centre, MeanQK):
        setup.append("means = ...  # what this report was given")
    return {
        "setup": "\n".join(setup),
        "scores": f"am.decompose_scores{given[:-1]}{split})",
        "view": f"model.run(text{with_bos}, points=[{captured}])"
        f'.show("{full_name(stack, "pattern")}", layer={{layer}}, head={{head}}, view="{{figure}}"{weight})',
        "focus": f"am.attention_focus{given}",
        "updates": f"am.residual_updates{given}",
        "given": given,
    }
