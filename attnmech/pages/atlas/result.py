"""The atlas of a model: its results, and the page that shows them."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ...basics.files import making, path_of, writing
from ...basics.nouns import TEXT
from ...basics.public import public
from ...draw.chart import CHOSEN_COLOUR, ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.heads import HeadNumber
from ...draw.html_file import WritesHtml, returns_page
from ...draw.numbers import TableRow
from ...draw.page import Page, render_page
from ...draw.section import Section, Tab
from ...draw.style import FIGURE_STYLE, NEUTRAL
from ...errors import OutputError
from ...methods.examples.figures import READING
from ...methods.examples.result import HeadExamples, packed_rows, view_of
from ...methods.focus.attention_focus import AttentionFocus, focus_numbers
from ...methods.focus.section import focus_sections
from ...methods.head_types.head_types import HeadTypes, types_section
from ...methods.null_attention.result import NullAttention
from ...methods.ov_tokens.result import OVTokens, ov_section
from ...methods.scores.composition import Composition
from ...methods.scores.variance_shares import VarianceShares
from ...methods.scores.wavelengths import PositionKernel
from ...methods.updates.result import ResidualUpdates
from ...model.parts.certificate import Certificate
from ...results.by_layer import table_of
from ...runs.effects import HeadEffects
from ..heads import LOOKS, MATTERS, WHY, WRITES
from ..measures import section_of
from ..result import STATUS
from .heads import CorpusHeads

_OF_HEAD: Final = ("layer", "head")

GROUPS: Final[Mapping[Tab, str]] = {"look": LOOKS, "why": WHY, "write": WRITES, "matter": MATTERS}
"""The numbers that each tab shows."""


def about_examples(examples: HeadExamples, files: Sequence[str]) -> Section:
    """The rows of the chosen head; with `files`, they lie beside the page."""
    return Section(
        tab="look",
        contents="Example rows",
        heading="Example rows",
        reading=READING,
        caveat="The strongest rows are extremes. The rows at random, and those of each fifth, show the others.",
        figures={"examples": view_of(examples, files=files, embedded=True)},
        call="atlas.examples.examples_of({layer}, {head})",
    )


def about_numbers(numbers: Sequence[HeadNumber], tab: Tab) -> list[Section]:
    """The chosen head's numbers of one question, among those of all heads."""
    varying = [number for number in numbers if number.group == GROUPS[tab] and np.nanstd(number.values) > 0]
    if not varying:
        return []
    return [
        Section(
            tab=tab,
            contents="This head among all heads",
            heading="This head among all heads",
            reading="Each line is one number, from its lowest to its highest value over all heads. The bar spans the "
            "middle half of the heads, the tick is the median head, and the diamond is the selected head, with its "
            "value and 95 % interval over texts.",
            figures={f"numbers-{tab}": among_heads(varying)},
            call="atlas.to_frame()",
        )
    ]


def among_heads(numbers: Sequence[HeadNumber]) -> Chart:
    """Each number of the chosen head on a line from the lowest to the highest value of all heads."""
    labels = [number.label for number in numbers]
    values = np.stack([number.values for number in numbers], axis=-1)
    low, high = (end(values, axis=(0, 1)) for end in (np.nanmin, np.nanmax))
    places = (values - low) / (high - low)
    lower, median, upper = np.nanquantile(places, (0.25, 0.5, 0.75), axis=(0, 1))
    figure = Figure()
    figure.add_bar(
        y=labels, x=upper - lower, base=lower, orientation="h", marker={"color": "rgba(128, 140, 152, 0.35)"},
        width=0.5, hoverinfo="skip", name="middle half of the heads",
    )  # fmt: skip
    figure.add_scatter(
        y=labels, x=median, mode="markers", hoverinfo="skip", name="median head",
        marker={"symbol": "line-ns-open", "size": 12, "color": NEUTRAL, "line": {"width": 2}},
    )  # fmt: skip
    figure.add_scatter(
        y=labels, mode="markers+text", textposition="top center", textfont={"size": 11}, cliponaxis=False,
        marker={"symbol": "diamond", "size": 10, "color": CHOSEN_COLOUR}, name="selected head",
        error_x={"type": "data", "symmetric": False, "thickness": 1.5, "width": 3},
        hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    spans = [f"{_short(one, 2)} to {_short(other, 2)}" for one, other in zip(low, high, strict=True)]
    figure.update_layout(
        template=FIGURE_STYLE,
        height=80 + 34 * len(numbers),
        margin={"l": 10, "r": 120, "t": 20, "b": 40},
        showlegend=False,
        annotations=[
            {
                "x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "y": label, "text": end, "showarrow": False,
                "font": {"size": 11, "color": NEUTRAL},
            }
            for label, end in zip(labels, spans, strict=True)
        ],
    )  # fmt: skip
    figure.update_xaxes(
        range=[-0.02, 1.02], tickvals=[0, 1], ticktext=["lowest head", "highest head"], showgrid=False, zeroline=False
    )
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=True)
    written = np.empty(values.shape, dtype=object)
    for place in np.ndindex(values.shape):
        written[place] = _short(values[place]) if np.isfinite(values[place]) else ""
    slots = [Slot("data.2.x", ByChoice(places, _OF_HEAD)), Slot("data.2.text", ByChoice(written, _OF_HEAD))]
    for name, sign, end in (("arrayminus", -1, 0), ("array", 1, 1)):
        ends = np.stack([number.values if number.ends is None else number.ends[end] for number in numbers], axis=-1)
        reach = np.clip(np.nan_to_num(sign * (ends - values) / (high - low)), 0, None)
        slots.append(Slot(f"data.2.error_x.{name}", ByChoice(reach, _OF_HEAD)))
    return Chart(figure, tuple(slots))


def about_kernel(focus: AttentionFocus, layers: Sequence[int]) -> list[Section]:
    """The share of the chosen head's attention at each distance."""
    shares = focus.distance_histogram[list(layers)].double().numpy()
    if not np.isfinite(shares).any():
        return []
    return [
        Section(
            tab="look",
            contents="Attention by distance",
            heading="Attention by distance",
            finding=ByChoice.texts(_OF_HEAD, shares.shape[:2], lambda layer, head: _nearest(shares[layer, head])),
            reading="The share of the head's attention that goes to keys at each distance from the query, over all "
            "rows of the corpus. The grey line is the mean over all heads.",
            figures={"by-distance": by_distance(shares)},
            call="atlas.focus.distance_histogram[{layer}, {head}]",
        )
    ]


def by_distance(shares: Float[np.ndarray, "layer head distance"]) -> Chart:
    """Draws the share of attention at each distance, on a logarithmic axis of distances."""
    distances = np.arange(shares.shape[-1]) + 1
    figure = Figure()
    figure.add_scatter(
        x=distances, y=np.nanmean(shares, axis=(0, 1)).tolist(), mode="lines", line={"color": NEUTRAL, "dash": "dot"},
        name="mean over heads", hovertemplate="mean over heads: %{y:.1%}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=distances, mode="lines", line={"color": CHOSEN_COLOUR, "width": 2.5}, name="selected head",
        customdata=distances - 1, hovertemplate="distance %{customdata}: %{y:.1%}<extra></extra>",
    )  # fmt: skip
    ticks = [tick for tick in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if tick < len(distances)]
    figure.update_layout(template=FIGURE_STYLE, height=300, legend={"orientation": "h", "y": 1, "yanchor": "bottom"})
    figure.update_xaxes(
        type="log",
        title="distance, tokens (0: the token itself)",
        tickvals=[tick + 1 for tick in ticks],
        ticktext=ticks,
    )
    figure.update_yaxes(title="share of attention", tickformat=".0%", rangemode="tozero")
    return Chart(figure, (Slot("data.1.y", ByChoice(shares, _OF_HEAD)),))


def _nearest(shares: Float[np.ndarray, " distance"]) -> str:
    if not np.isfinite(shares).all():
        return ""
    half = int(np.searchsorted(np.cumsum(shares), 0.5))
    where = "the token itself" if half == 0 else f"keys at most {half} token{'s' * (half > 1)} away"
    return f"Half of its attention goes to {where}."


def _short(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}g}".replace("-", "−")


FOLDER = "layers"  # the folder beside the index that holds a file for each layer


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
                rows = json.dumps(packed_rows(self.examples, layer))
                draft.write_text(f"(window.attnmechPieces ??= {{}})[{json.dumps(name)}] = {rows};\n", encoding="utf-8")
            page.write_text(render_page(self._page(tuple(files.values())), reads_files=True), encoding="utf-8")
        return index

    @cached_property
    def heads(self) -> CorpusHeads:
        """What the page says about each head."""
        layers, count = self.examples.layers, self.examples.rows.shape[1]
        return CorpusHeads.of(self, layers=layers, count=count, effects_on="", nouns=TEXT)

    def _page(self, files: tuple[str, ...] = ()) -> Page:
        headlines, provenance = self.heads.headlines, self.examples.provenance
        headline, *more = [finding.sentence for finding in headlines] or [self.lead]
        ablate = f", ablate={self.ablated}" if self.effects is not None else ""
        return Page(
            title=f"Atlas of {provenance.short_name} over {self.examples._texts}",
            headline=headline,
            headlines=self.heads.by_head,
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
            setup=f"import attnmech as am\n\nmodel = {self.source}\ncorpus = ...  # the texts of this atlas\n"
            f"atlas = am.atlas(model, corpus{ablate})",
            brief={**self.findings, **self.heads.untyped},
            start=headlines[0].place if headlines else (),
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
        return [
            about_examples(self.examples, files),
            *about_kernel(self.focus, layers),
            *([] if self.kernel is None else [self.kernel.section("atlas.kernel")]),
            *([] if self.ov is None else [ov_section(self.ov, "atlas.ov")]),
            *(
                section_of(result, f"{call}(model, texts)", layers, on)
                for call, result in {"am.ablate_heads": self.effects, "am.null_attention": self.null}.items()
                if result is not None
            ),
            *(section for tab in GROUPS for section in about_numbers(self.heads.compared, tab)),
            *([] if self.types is None else [types_section(self.types, "atlas.types")]),
            *focus_sections(focus_numbers(self.focus), "atlas.focus", layers),
            *([] if self.shares is None else self.shares._sections()),
        ]
