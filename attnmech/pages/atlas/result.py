"""The atlas of a model: its results, and the page that shows them."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ...basics.files import making, path_of, writing
from ...basics.nouns import TEXT
from ...basics.public import public
from ...draw.html_file import WritesHtml, returns_page
from ...draw.numbers import TableRow
from ...draw.page import Page, render_page
from ...draw.section import Section
from ...errors import OutputError
from ...methods.examples.result import HeadExamples
from ...methods.focus.attention_focus import AttentionFocus
from ...methods.head_types.head_types import HeadTypes
from ...methods.null_attention.result import NullAttention
from ...methods.ov_tokens.result import OVTokens
from ...methods.scores.composition import Composition
from ...methods.scores.position_kernel import PositionKernel
from ...methods.scores.variance_shares import VarianceShares
from ...methods.updates.result import ResidualUpdates
from ...model.parts.certificate import Certificate
from ...results.by_layer import table_of
from ...runs.effects import HeadEffects
from ..result import STATUS, short_name
from .heads import CorpusHeads
from .sections import GROUPS, about_examples, about_kernel, about_numbers

FOLDER = "layers"
"""The folder beside the index that holds a file for each layer."""


@public
@dataclass(frozen=True, repr=False, kw_only=True)
class Atlas(WritesHtml):
    """What every head of a model does over a corpus: examples, statistics, types, likeness and effects, with a page.

    An atlas has no `save`, because its results have different texts and origins: each result in it has its own, as in
    `atlas.focus.save(path)`, which `am.load_result` reads.
    """

    examples: HeadExamples
    focus: AttentionFocus
    overlap: Float[Tensor, "head_of_all head_of_all"]
    """The mean overlap Σ_j √(p_j q_j) of the attention of any two heads, counted layer by layer, on 8 rows of each
    text; NaN between a head and itself.
    """
    shares: VarianceShares | None
    updates: ResidualUpdates | None
    """What heads write; None if the model has no stream."""
    ov: OVTokens | None
    """The tokens that heads write for those that they read; None if logits are not one norm and one matrix."""
    kernel: PositionKernel | None
    """The position term by distance; None if there is none."""
    types: HeadTypes | None
    """The types of heads on repeated random tokens."""
    composition: Composition | None
    effects: HeadEffects | None
    """The effect on the loss of zeroing each head, if texts were ablated."""
    null: NullAttention | None
    """The effect of attention to the first token, if texts were ablated."""
    ablated: int
    """The number of texts on which heads were ablated."""
    certificate: Certificate
    notes: tuple[str, ...]
    """What the atlas omits, with reasons."""
    source: str
    """The Python expression that loads the model."""

    def __repr__(self) -> str:
        return f"Atlas({self.lead})"

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name as an attribute

        def __getattr__(self, name: str) -> object:
            message = f"'Atlas' object has no attribute {name!r}"
            if name == "save":
                message = (
                    "an atlas has no `save`: write its page with write(folder), or save one of its results, as in "
                    "`atlas.focus.save(path)`"
                )
            raise AttributeError(message, name=name, obj=self)

    @property
    def lead(self) -> str:
        """The types of heads, or how typical the examples are."""
        return self.examples.lead if self.types is None else self.types.lead

    def to_frame(self) -> pd.DataFrame:
        """One row per head: layer, head, types, and every number of the page's map."""
        facts = self.heads
        frame = table_of({"layer": facts.layers, "head": range(facts.count)}, {})
        frame["types"] = [
            ", ".join(facts.types_of(*place)) for place in zip(frame["layer"], frame["head"], strict=True)
        ]
        return frame.assign(**{number.name: number.values.ravel() for number in facts.numbers})

    @returns_page
    def to_html(self) -> str:
        """Returns the page as one file that opens offline; `write(folder)` suits large models."""
        return render_page(self._page())

    def write(self, folder: str | Path) -> Path:
        """Writes the page as a folder, which opens from disk: `index.html`, and a file for each layer that the page
        reads when a head of that layer is chosen.

        Files of an earlier atlas are replaced.

        Returns:
            The path of the index.

        Raises:
            OutputError: the folder is not writable, or is a file.

        """
        place = path_of(folder, OutputError)
        index = place / "index.html"
        files = {layer: f"{FOLDER}/layer-{layer}.js" for layer in self.examples.layers}
        with making(place / FOLDER), ExitStack() as drafts:  # no file is replaced before all are written
            page = drafts.enter_context(writing(index))
            for layer, name in files.items():
                draft = drafts.enter_context(writing(place / name))
                draft.write_text(_piece(name, self.examples.packed(layer)), encoding="utf-8")
            page.write_text(render_page(self._page(tuple(files.values())), reads_files=True), encoding="utf-8")
        return index

    @cached_property
    def heads(self) -> CorpusHeads:
        """What the page says about each head."""
        return CorpusHeads(
            layers=self.examples.layers,
            count=self.examples.rows.shape[1],
            focus=self.focus,
            updates=self.updates,
            types=self.types,
            effects=self.effects,
            null=self.null,
            nouns=TEXT,
            examples=self.examples,
            overlap=self.overlap,
            shares=self.shares,
            ov=self.ov,
            composition=self.composition,
        )

    def _page(self, files: tuple[str, ...] = ()) -> Page:
        headlines, provenance = self.heads.headlines, self.examples.provenance
        headline, *more = [finding.sentence for finding in headlines] or [self.lead]
        return Page(
            title=f"Atlas of {short_name(provenance.model)} over {self.examples._texts}",
            headline=headline,
            more=more,
            heads=self.heads.page,
            notes=self.notes,
            sections=self._sections(files),
            facts=self._facts,
            checks=[
                TableRow(check.name, check.statement, STATUS[check.status], check.evidence)
                for check in self.certificate.checks
            ],
            provenance=provenance.entries,
            setup=self._setup,
            brief={**self.findings, **self.heads.untyped},
            start=headlines[0].place if headlines else (),
        )

    @property
    def _setup(self) -> str:
        ablate = f", ablate={self.ablated}" if self.effects is not None else ""
        return "\n".join(
            (
                "import attnmech as am",
                "",
                f"model = {self.source}",
                "corpus = ...  # the texts of this atlas",
                f"atlas = am.atlas(model, corpus{ablate})",
            )
        )

    @property
    def findings(self) -> dict[str, str]:
        """The findings over all heads, one sentence per question."""
        parts: Mapping[str, Any] = {
            "Head types": self.types,
            "Examples": self.examples,
            "Where heads attend": self.focus,
            "Why they attend there": self.shares,
            "What they write": self.updates,
            "What they write for a token": self.ov,
            "Which heads matter": self.effects,
            "First token": self.null,
        }
        return {question: part.lead for question, part in parts.items() if part is not None}

    @property
    def _facts(self) -> list[TableRow]:
        rows = self.examples.rows
        verdict = TableRow(
            "certificate", self.certificate.verdict, "ok" if self.certificate.ok else "fail", "see the checks below"
        )
        return [
            TableRow("texts", self.examples._texts),
            TableRow("rows of a head", f"{int(rows.min()):,} to {int(rows.max()):,}"),
            TableRow("layers", str(len(self.examples.layers))),
            TableRow("heads per layer", str(rows.shape[1])),
            verdict,
        ]

    def _sections(self, files: tuple[str, ...]) -> list[Section]:
        layers = self.examples.layers
        on = f"the first {self.ablated} texts of the corpus"
        swept = {"am.ablate_heads": self.effects, "am.null_attention": self.null}
        return [
            about_examples(self.examples, files),
            *about_kernel(self.focus, layers),
            *([] if self.kernel is None else [self.kernel.section("atlas.kernel")]),
            *([] if self.ov is None else [self.ov.section("atlas.ov")]),
            *(
                result.section(f"{call}(model, texts)", layers, on)
                for call, result in swept.items()
                if result is not None
            ),
            *(section for tab in GROUPS for section in about_numbers(self.heads.compared, tab)),
            *([] if self.types is None else [self.types.section("atlas.types")]),
            *self.focus.sections("atlas.focus", layers, TEXT),
            *([] if self.shares is None else self.shares._sections()),
        ]


def _piece(name: str, packed: str) -> str:
    """The script with the rows of a layer."""
    return f"(window.attnmechPieces ??= {{}})[{json.dumps(name)}] = {json.dumps(packed)};\n"
