"""The report of one text, which combines several results on one page; `attnmech report` writes that page."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ..basics.nouns import TEXT, Nouns, counted
from ..basics.public import public
from ..draw.embed import View
from ..draw.html_file import WritesHtml, returns_page
from ..draw.numbers import ScoreNumbers, TableRow
from ..draw.page import Live, Page, render_page, render_parts
from ..draw.section import OfPattern, Section
from ..draw.text import bound, html_text, percent, visible_token
from ..errors import InputError
from ..methods.focus.attention_focus import AttentionFocus, focus_numbers
from ..methods.focus.section import about_all_heads, focus_sections
from ..methods.head_types.head_types import HeadTypes, top_scores, types_section
from ..methods.null_attention.result import NullAttention
from ..methods.scores.decompose_by_source import SourceDecomposition
from ..methods.scores.decompose_scores import ScoreDecomposition
from ..methods.scores.section import score_sections
from ..methods.updates.result import ResidualUpdates, update_numbers
from ..methods.updates.section import update_sections
from ..model.parts.certificate import Certificate
from ..runs.effects import HeadEffects
from . import limits
from .heads import TextHeads
from .measures import Measured, section_of
from .tokens import TokenPaths

STACK_WORDS: Final = {  # the stacks of an encoder-decoder, in words for the reader who chooses one
    "encoder": "encoder: source to source",
    "decoder": "decoder: target to target",
    "cross": "cross: target to source",
}

UNTRUSTED: Final = "Trust the notebook, or run its cell, to see the page."
"""What a notebook that is not trusted shows in place of the page."""

AWAITED: Final = (
    "The types of heads and the effects of ablations are still being measured. This page reloads when they are here."
)

NOT_MEASURED: Final = "The types of heads and the effects of ablations are not measured yet."
"""The same on a page in a notebook, which measures them only if asked."""

MOST_OF_TEXT: Final = 40  # the reader chooses a text by this many of its characters

STATUS: Final[dict[str, Literal["ok", "warn", "fail"] | None]] = {  # the page's mark for a check
    "holds": "ok",
    "differs": "warn",
    "FAILS": "fail",
    "not checked": None,
}


R = TypeVar("R", bound=HeadEffects | NullAttention)


@public
@dataclass(frozen=True, repr=False)
class Report(WritesHtml):
    """A text on a model: where heads attend, why, and what they write, with the certificate and a page."""

    scores: ScoreDecomposition
    native: ScoreDecomposition | None
    """The same scores, split at the model's own biases, if `scores` are split at the text's means."""
    focus: AttentionFocus
    updates: ResidualUpdates | None
    """What heads write; None if the model has no stream."""
    certificate: Certificate
    notes: tuple[str, ...]
    """Notes on what the page omits, with reasons."""
    special: tuple[bool, ...]
    """Whether each token of the text is a special token."""
    expected: View | None
    """The model's prediction at each token."""
    calls: Mapping[str, str]
    """The Python calls that reproduce the page's numbers, by method."""
    pattern: Float[Tensor, "layer head query key"]
    """The attention of the layers shown, as the model used it after active hooks."""
    paths: TokenPaths
    """How each token changes."""
    value_norms: Float[Tensor, "layer head key"] | None
    """‖(x_j W_V + b_V) W_O‖ of each key in each head; None if a gate is between attention and W_O."""
    sources: SourceDecomposition | None = None
    """Which upstream writers make each head attend where it does."""
    types: HeadTypes | None = None
    """The model's head types, measured on random tokens; None if measuring them would take minutes."""
    on_text: str = ""
    """How heads attend to this text's delimiters: a description, not a claim."""
    measured: tuple[Measured, ...] = ()
    """The results of ablations on all texts of the page and, with the demo model, on built-in texts."""
    first: int = 0
    """The first token whose row is shown."""
    written: int = 0
    """The number of last tokens that the model wrote."""
    sense: Section | None = None
    """The section with the image or the recording itself, under the attention of a row."""
    nouns: Nouns = TEXT
    """The words for the input and its positions."""
    key_special: tuple[bool, ...] = ()
    """In cross-attention, whether each key token is a special token."""
    others: Mapping[str, "Report"] = field(default_factory=dict)
    """The reports of a model's other stacks, by name: `report.others["cross"]`."""
    further: tuple["Report", ...] = ()
    """The reports of the texts after the first."""

    @property
    def texts(self) -> tuple["Report", ...]:
        """The report of each text, this one first: `report.texts[1].focus`."""
        return (self, *self.further)

    def __repr__(self) -> str:
        return f"Report({self.lead})"

    def __sub__(self, other: object) -> "Report":
        raise InputError("reports cannot be subtracted; subtract the results in them: one.focus - other.focus.")

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name as an attribute

        def __getattr__(self, name: str) -> object:
            message = f"'Report' object has no attribute {name!r}"
            if name == "save":
                message = (
                    "a report has no `save`: write its page with write_html(path), or save one of its results, as "
                    "in `report.focus.save(path)`"
                )
            raise AttributeError(message, name=name, obj=self)

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: the largest residual and score of its heads, and the heads' mean share of each term.

        With several texts, the column "text" numbers them.
        """
        if self.further:
            frames = dict(enumerate(report.to_frame() for report in (replace(self, further=()), *self.further)))
            return pd.concat(frames, names=["text"]).reset_index("text").reset_index(drop=True)
        frame = self.scores.to_frame()
        how = {name: "mean" if name.endswith("_share") else "max" for name in map(str, frame.columns)}
        return (
            frame.drop(columns="head")
            .groupby("layer", as_index=False)
            .agg({name: way for name, way in how.items() if name not in ("layer", "head")})
        )

    @returns_page
    def to_html(self) -> str:
        """Returns the page, one file that opens offline; with several texts or stacks, the reader chooses one."""
        return self.live_html(None)

    def live_html(self, live: Live | None, awaited: str = "") -> str:
        """The page; with a sentence on what it lacks, it reloads when its file holds another page."""
        if not self.others and not self.further:
            return render_page(self._page(), awaited=awaited, live=live)
        count = len(self.texts) * len(self._stacks)
        parts = {
            (number, stack): replace(report._page(count), title=self._title)
            for number, text in enumerate(self.texts)
            for stack, report in text._stacks.items()
        }
        beginnings = [text._beginning(number) for number, text in enumerate(self.texts)]
        return render_parts(parts, beginnings, self._stack_words, awaited=awaited, live=live)

    @property
    def _title(self) -> str:
        count, text = len(self.texts), self.nouns.text
        return f"{self.scores.provenance.short_name} on {f'one {text}' if count == 1 else f'{count} {text}s'}"

    @property
    def _stacks(self) -> dict[str, "Report"]:
        return {self.stack: self, **self.others}

    @property
    def _stack_words(self) -> dict[str, str]:
        ends = {name: (report.nouns.tokens, report.nouns.of_keys.tokens) for name, report in self._stacks.items()}
        if any(report.nouns.keys for report in self._stacks.values()):
            return {name: f"{name}: {queries} to {keys}" for name, (queries, keys) in ends.items()}
        return {name: STACK_WORDS.get(name, name) for name in ends}

    def _beginning(self, number: int) -> str:
        if self.nouns.text != TEXT.text:
            return str(number)
        special = self.key_special if self.first else self.special
        ordinary = [token for token, is_special in zip(self.scores.tokens[0], special, strict=True) if not is_special]
        text = "".join(visible_token(token) for token in ordinary).replace("·", " ").strip()
        return f"{number}: {text[:MOST_OF_TEXT]}{'…' if len(text) > MOST_OF_TEXT else ''}"

    @property
    def stack(self) -> str:
        """The stack of this report: "encoder", "decoder", "cross", or "self" for the only one."""
        return str(self.scores.provenance.options["stack"])

    def _head_facts(self, view: ScoreNumbers) -> TextHeads:
        on = next((part.on for part in self.measured), "")
        return TextHeads.of(self, view=view, layers=view.layers, count=view.scores.shape[1], effects_on=on)

    def _page(self, parts: int = 1) -> Page:
        """The page's content for this stack; `parts` is the number of texts and stacks that share the file."""
        view = self.scores.numbers(pattern=self.pattern, nouns=self.nouns, first=self.first)
        norms = None if self.value_norms is None else self.value_norms.float().cpu().numpy()
        heads, cells = view.pattern.shape[0] * view.pattern.shape[1], view.pattern[0, 0].size
        most = max(1, limits.MAX_DETAILS // (parts * cells))
        held = (
            f"The page holds the scores and terms of {most} of {heads} heads: those of the findings, then those with a "
            "clear effect, a type, or a number far from the median."
        )
        left_out = [held] if most < heads else []
        view = replace(
            view,
            notes=(*self.notes, *left_out, *view.notes),
            special=self.special,
            key_special=self.key_special,
            written=self.written,
            value_norms=norms,
        )
        provenance = self.scores.provenance
        facts = self._head_facts(view)
        headlines, first, shown = facts.headlines, facts.rows.first, facts.page
        query = len(view.tokens) - 1 if first is None else first[2].query
        start = (*headlines[0].place, self.first + query) if headlines else ()
        headline, *more = [finding.sentence for finding in headlines] or [self.lead]
        return Page(
            title=self._title,
            headline=headline,
            headlines=facts.by_head,
            more=more,
            heads=shown,
            detailed=sorted(shown.order[:most]) if left_out else None,
            view=view,
            nouns=self.nouns,
            sections=self._sections(view),
            facts=self._facts(view),
            checks=[
                TableRow(check.name, check.statement, STATUS[check.status], check.evidence)
                for check in self.certificate.checks
            ],
            provenance=provenance.entries,
            setup=self.calls["setup"],
            reasons=self._reasons,
            brief={"Exactness": self.lead, **self.findings, **facts.untyped},
            start=start,
        )

    @property
    def findings(self) -> dict[str, str]:
        """The findings, one sentence per question."""
        sentences = {} if self.types is None else {"Head types": self.types.lead}
        sentences["Where heads attend"] = self.focus.finding(self.nouns)
        if self._why:
            sentences["Why they attend there"] = self._why
        if self.updates is not None:
            sentences["What they write"] = self.updates.finding(self.nouns)
        return sentences | {part.question: part.result.lead for part in self.measured}

    @property
    def effects(self) -> HeadEffects | None:
        """The effect on the loss of zeroing each head; None if measuring it would take minutes."""
        return self._measured_as(HeadEffects)

    @property
    def null(self) -> NullAttention | None:
        """The effect of attention to the first token; None if measuring it would take minutes."""
        return self._measured_as(NullAttention)

    def _measured_as(self, kind: type[R]) -> R | None:
        return next((sweep.result for sweep in self.measured if isinstance(sweep.result, kind)), None)

    def _sections(self, view: ScoreNumbers) -> list[Section]:
        nouns, layers, calls, updates = self.nouns, view.layers, self.calls, self.updates
        other = (
            None if self.native is None else self.native.numbers(pattern=self.pattern, nouns=nouns, first=self.first)
        )
        further = [section_of(part.result, part.call, layers, part.on) for part in self.measured]
        focus = focus_numbers(self.focus, nouns)
        overview, *scores = score_sections(view, calls["scores"], calls["view"], about_all_heads(focus), other)
        return [
            *([] if self.sense is None else [self.sense]),
            *scores,
            overview if self.types is None else self._with_types(overview, self.types),
            *([] if self.types is None else [self._types(self.types)]),
            *self._kernels,
            *([] if self.expected is None else [_expected(self.expected)]),
            *self.paths.sections(calls["arguments"], view.tokens, layers, nouns),
            *focus_sections(focus, calls["focus"], layers),
            *([] if updates is None else update_sections(update_numbers(updates, 0, layers, nouns), calls["updates"])),
            *(replace(section, numbered=True) for section in further),
        ]

    def _with_types(self, overview: Section, types: HeadTypes) -> Section:
        heads = range(self.scores.residual.shape[1])
        remarks = tuple(top_scores(types, layer, head) for layer in self.scores.layers for head in heads)
        return replace(overview, figures={name: OfPattern("model", remarks) for name in overview.figures})

    def _types(self, types: HeadTypes) -> Section:
        effect = None if self.effects is None else self.effects.effect
        measured = [] if effect is None else effect.isfinite().nonzero().tolist()
        effects = {} if effect is None else {(layer, head): float(effect[layer, head]) for layer, head in measured}
        return types_section(types, "am.head_types(model)", effects=effects, sentence=self.on_text)

    @property
    def _kernels(self) -> list[Section]:
        """The position term by distance, if it is a function of the distance."""
        call = self.calls["scores"].replace("{split}", '"mean"')
        try:
            return [self.scores.position_kernel().section(f"{call}.position_kernel()", self.nouns)]
        except InputError:
            return []

    @cached_property
    def _reasons(self) -> list[list[list[str]]]:
        if self.sources is None:
            return []
        queries, heads = range(self.first, len(self.scores.tokens[0])), range(self.scores.residual.shape[1])
        return [
            [[self.sources.explain(layer, head, query) for query in queries] for head in heads]
            for layer in self.scores.layers
        ]

    @property
    def lead(self) -> str:
        """One sentence that the numbers support."""
        frame = self.scores.to_frame()
        residual, largest = float(frame.residual.max()), float(frame.largest_score.max())
        exactly = f"to within {bound(residual, 2)} (the largest score is {largest:.3g})" if residual else "exactly"
        return (
            f"{counted(len(frame), noun='head')} "
            f"on one {self.nouns.text}: the terms of each score add up to it {exactly}."
        )

    @property
    def _why(self) -> str:
        """The term with the largest share of a row's highest score, if there are several."""
        frame = self.scores.to_frame()
        shares = frame.filter(like="_share").mean().dropna()
        if len(shares) < 2:
            return ""
        first = str(shares.idxmax()).removesuffix("_share").replace("_", "-")
        where = f"on average over {counted(len(frame), noun='head')} and all rows"
        return f"The {first} term supplies {percent(shares.max(), 0)} of a row's highest score, {where}."

    def _repr_html_(self) -> str:
        page, instead = html_text(self.to_html()), html_text(f"{self.lead} {UNTRUSTED}")
        style = "width:100%;height:85vh;border:0"
        return f'<iframe srcdoc="{page}" title="attnmech report" style="{style}">{instead}</iframe>'

    def _facts(self, view: ScoreNumbers) -> list[TableRow]:
        shown = list(self.scores.layers)
        largest, residual = (float(values[shown].max()) for values in (self.scores.largest, self.scores.residual))
        terms = ", ".join(name for name in self.scores.terms if name != "mask")
        key = "" if self.first else "key "
        return [
            TableRow("rows shown" if self.first else f"{self.nouns.place}s", str(len(view.tokens))),
            *([TableRow(f"{key}{self.nouns.of_keys.tokens}", str(len(view.keys)))] if view.crosses else []),
            TableRow("layers shown", ", ".join(map(str, view.layers))),
            TableRow("heads per layer", str(view.scores.shape[1])),
            TableRow("terms of each score", terms),
            TableRow(
                "largest residual",
                bound(residual, 2) if residual else "none",
                "ok",
                f"max |Σ terms − score|; the largest score is {largest:.3g}",
            ),
            TableRow(
                "certificate", self.certificate.verdict, "ok" if self.certificate.ok else "fail", "see the checks below"
            ),
        ]


def first_page(report: Report, live: Live | None = None) -> str:
    """The page of a report whose types and ablations are not measured yet."""
    return report.live_html(live, NOT_MEASURED if live is not None and live.through == "notebook" else AWAITED)


def _expected(view: View) -> Section:
    return Section(
        name="expected",
        tab="token",
        contents="The model's predictions",
        heading="The model's predictions",
        finding=view.finding,
        reading="The redder a token, the more probable the model considered it; white tokens have a probability below "
        "e⁻⁵ = 0.7 %. Hover over a token for its probability, its rank (0 is the most probable) and the ten most "
        "probable tokens at its position. Drawn with CircuitsVis.",
        caveat="The predictions are those of the whole model, not of one head. The first token has no prediction.",
        figures={"expected-tokens": view},
        call='model.run(text).show("logits")',
    )
