"""Attention between the sentences, lines or other segments of texts (docs/formulas.md#segments).

Receiver scores after "Thought Anchors" (arXiv 2506.19143).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, Unpack

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from plotly.colors import sample_colorscale  # type: ignore[import-untyped]
from torch import Tensor

from ...basics.arguments import index_of, option, shown, whole_number
from ...basics.fields import check_entries
from ...basics.public import public
from ...draw.all_heads import model_view
from ...draw.embed import View
from ...draw.figure import Figure
from ...draw.section import Section
from ...draw.segments import MOST_LABELS, segment_labels, segment_map
from ...draw.sentence import sentence_view
from ...draw.style import FIGURE_STYLE
from ...draw.text import percent
from ...errors import InputError, MissingPointError
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...runs.options import StreamOptions
from ...runs.reducer import Source, State
from ...runs.stream import stream
from .formulas import ByDistance, peakedness, receivers, same_distance
from .means import SegmentMeans
from .segmentation import Segmented, Segments, real_texts
from .sums import SegmentSums, of_text

BASELINES: Final = ("tokens", "segments")  # the units in which a baseline measures distance


_LABELS: Final = {
    "mass": "share of attention", "excess": "share above baseline", "per_token": "mean p per pair of tokens"
}  # fmt: skip


@public
def segment_attention(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    segments: Segments = "sentence",
    *,
    first: bool = True,
    gap: int = 4,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    **options: Unpack[StreamOptions],
) -> "SegmentAttention":
    """Measures how much the tokens of each segment attend to every segment, by head, with a baseline by distance.

    M_st = mean over the rows i of segment s of Σ_{j∈t} p_ij. A row of M sums to 1, or to 1 minus a sink's share.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> result = am.segment_attention(am.load(), documents(6))
    >>> result.mass(text=0).shape, result.segments_of(text=0)[1]
    (torch.Size([4, 8, 4, 4]), ' The file is as urgent as the invoice.')
    >>> result.previous.shape
    torch.Size([4, 8])

    This takes one forward pass and never builds a [query key] array of a whole text. For an iterator of texts (a
    corpus), only sums by distance in segments are stored.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus).
        segments: "sentence": up to a mark that ends a sentence (. ! ? … and similar marks, with closing quotes and
            brackets) followed by a space; abbreviations also end sentences. "line": up to a line break. "document": a
            whole text. "kind": the tokens of a picture or a sound, special tokens, or the text between them
            (`Batch.kinds`). Or spans: a list of (start, end), counted from the text's first token, that covers each
            token once; for several texts, a list of these lists. But for "kind", special tokens belong to the segment
            beside them.
        first: whether attention to the first token of a text counts. Heads that rest on the first token give this
            attention to the first segment; with False it is left out of M and of the baseline, and rows sum to less
            than 1.
        gap: the smallest distance, in segments, at which a later segment counts for kurtosis; 4 in Thought Anchors.
        layers: all by default.
        stack: "encoder" or "decoder" in a model with several stacks.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Cells, baselines and receiver scores for texts run together; means by distance in segments, with intervals.

    Raises:
        InputError: for spans that overlap, leave a gap or reach outside their text, for an empty text, for spans with
            a corpus, for cross-attention, and if the cells of a batch would take more than 2 GB.

    Source: receiver scores after Bogdan et al. 2025, "Thought Anchors" (arXiv 2506.19143).

    """
    require_model(model)
    result: SegmentAttention
    reducer = SegmentReducer(segments, first, gap)
    (result,) = stream(model, inputs, [reducer], layers=layers, stack=stack, **options)
    return result


@dataclass(frozen=True)
class SegmentReducer(SegmentSums):
    """Sums the attention between segments over a pass, and builds the result."""

    def finish(self, state: State, source: Source) -> "SegmentAttention":
        batch = None if source.batch is None else source.batch.queries(source.stack.label)
        segmented = None if batch is None else Segmented.of(batch, self.segments)
        return SegmentAttention.of(
            state,
            source,
            kind=self.segments if isinstance(self.segments, str) else "span",
            first=self.first,
            gap=self.gap,
            both_ways=not source.stack.architecture.causal,
            starts=() if segmented is None else segmented.starts,
            begins=() if batch is None else tuple(batch.begins.tolist()),
            tokens=() if batch is None else real_texts(batch),
        )


@dataclass(frozen=True, repr=False)
class SegmentAttention(SegmentMeans):
    """How much the segments of texts attend to each other.

    Masses are shares of a row's attention, from 0 to 1; kurtosis is without unit.
    """

    _TITLE = "Attention between {result._things} of {model}"
    _SUBTRACT = "subtract what you compare: one.previous - other.previous"
    FIGURES = ("earlier_excess", "mass", "excess", "per_token", "receivers")

    _CELLS: ClassVar[Mapping[str, Any]] = {
        "mass": Float[Tensor, "layer head batch query_segment key_segment"],
        "distance": Float[Tensor, "layer head batch distance"],
        "row": Float[Tensor, "layer head batch row"],
    }
    """Further entries of `state`, for texts run together."""
    _ROWS = "mass"

    starts: tuple[tuple[int, ...], ...]
    """For texts run together: each segment's start, counted from the text's first token, followed by the length."""
    begins: tuple[int, ...]
    """For texts run together: the amount of padding before each text."""
    tokens: tuple[tuple[str, ...], ...]
    """For texts run together: the text of each token, without padding. A character that is divided among tokens is
    part of the first of them.
    """

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        return {**super()._axis_lengths, **({"batch": len(self.starts)} if self.starts else {})}

    def _check(self) -> None:
        super()._check()
        check_entries("state", self.state, self._CELLS, self._axis_lengths)
        if self.starts:
            [self.state[name] for name in self._CELLS]
        for own, tokens, _ in zip(self.starts, self.tokens, self.begins, strict=True):
            if own[0] != 0 or own[-1] != len(tokens) or any(b <= a for a, b in pairwise(own)):
                raise ValueError("`starts` must increase from 0 to the number of tokens of each text")

    def _merge(self, one: State, other: State) -> State:
        return SegmentReducer().merge(one, other)

    def segments_of(self, text: int = 0) -> tuple[str, ...]:
        """Returns the segments of one text as strings."""
        own, tokens = self.starts[self._text(text)], self.tokens[text]
        return tuple("".join(tokens[start:end]) for start, end in pairwise(own))

    def mass(self, text: int = 0) -> Float[Tensor, "layer head query_segment key_segment"]:
        """Returns M_st, the share of a row's attention that goes to each segment, averaged over the rows of segment s.
        The axis `layer` has the measured layers.
        """
        count = len(self.starts[self._text(text)]) - 1
        return self.state["mass"][:, :, text, :count, :count]

    def per_token(self, text: int = 0) -> Float[Tensor, "layer head query_segment key_segment"]:
        """Returns M_st / |t|, the mean of p_ij over the pairs of tokens of the two segments, including hidden pairs."""
        return self.mass(text) / torch.tensor(self.starts[text]).diff()

    def expected(self, text: int = 0, by: str = "tokens") -> Float[Tensor, "layer head query_segment key_segment"]:
        """Returns the baseline of `mass`: M for attention by distance alone.

        By distance in tokens, the baseline comes from the pattern p̂_ij = r_i w(i − j) that has the head's own totals at
        each distance and in each row (`attnmech.methods.segments.formulas.ByDistance`). A head that attends by distance
        alone equals its baseline. If a mask depends on more than the distance, the baseline takes only its totals into
        account. By distance in segments, the baseline is the mean of M over the cells at the same distance.
        """
        if option("by", by, BASELINES) == "segments":
            return same_distance(self.mass(text))
        starts = self.starts[self._text(text)]
        begin = self.begins[text]
        kept = of_text(self.state, (slice(None), slice(None), text), begin, starts[-1], self.both_ways)
        return ByDistance(*kept, 0 if self.first else 1).cells(starts).to(self.state["mass"].dtype)

    def receivers(self, text: int = 0, gap: int = 1) -> Float[Tensor, "layer head segment"]:
        """Averages what each segment receives per token over the segments at least `gap` later. NaN for the last
        segments, which have none. Source: Thought Anchors (arXiv 2506.19143), with gap 4.
        """
        return receivers(self.per_token(text), whole_number("gap", gap, least=1))

    def strongest_cells(self, count: int = 10, text: int = 0) -> pd.DataFrame:
        """Lists the cells between different segments of one text that most exceed their baseline by distance in tokens.

        Columns: layer, head, query_segment, key_segment, mass, expected, same_distance, query, key (as text).
        """
        count = whole_number("count", count, least=1)
        mass, names = self.mass(text), self.segments_of(text)
        expected, alike = self.expected(text), self.expected(text, by="segments")
        apart = ~torch.eye(len(names), dtype=torch.bool)
        above = (mass - expected).masked_fill(~apart, -torch.inf)
        order = above.flatten().argsort(descending=True, stable=True)
        order = order[: min(count, int(apart.sum()) * mass.shape[0] * mass.shape[1])]
        place = torch.unravel_index(order, mass.shape)
        axes = ("layer", "head", "query_segment", "key_segment")
        frame = pd.DataFrame({name: numbers.tolist() for name, numbers in zip(axes, place, strict=True)})
        frame["layer"] = [self.layers[row] for row in frame["layer"]]
        for name, values in {"mass": mass, "expected": expected, "same_distance": alike}.items():
            frame[name] = values[place].tolist()
        for side in ("query", "key"):
            frame[side] = [names[number] for number in frame[f"{side}_segment"]]
        return frame

    def plot(
        self, figure: str | None = None, *, layer: int | None = None, head: int | None = None, text: int = 0
    ) -> "go.Figure":
        """Draws a figure; it is returned, not shown.

        By default, layers × heads, coloured by the excess of attention to earlier segments over its baseline; the name
        of another statistic draws that. For one text and head: "mass" (query segments × key segments), "excess" (mass
        minus its baseline by distance in tokens) and "per_token". "receivers": what each segment receives, for `layer`
        and `head` or, without them, for the heads with the highest kurtosis. Without `layer` and `head`, figures of one
        head show the head with the cell that exceeds its baseline most.
        """
        if figure is None or figure in self.quantities:
            return super().plot(figure, layer=layer, head=head)
        option("figure", figure, dict.fromkeys((*self.FIGURES, *self.quantities)))
        names = segment_labels(self.segments_of(text))
        if figure == "receivers":
            chosen = self._peaked(text) if layer is None or head is None else [self._head(layer, head)]
            scores = self.receivers(text)
            lines = {f"L{self.layers[row]}H{place}": scores[row, place].numpy() for row, place in chosen}
            return receiver_lines(lines, names)
        row, place = self._shown(layer, head, text)
        values = (self.per_token if figure == "per_token" else self.mass)(text)[row, place]
        values = values - self.expected(text)[row, place] if figure == "excess" else values
        return segment_map(
            values.numpy(), names, label=_LABELS[figure], title=f"L{self.layers[row]}H{place}",
            signs=figure == "excess",
        )  # fmt: skip

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        named = (*figure, options.get("figure"))
        if not {"mass", "excess", "per_token"} & set(named):
            return super()._figure_place(*figure, **options)
        row, place = self._shown(options.get("layer"), options.get("head"), options.get("text", 0))
        return {"layer": self.layers[row], "head": place}

    def show(
        self, figure: str | None = None, *, layer: int | None = None, head: int | None = None, text: int = 0
    ) -> View:
        """Shows lines between segments ("sentence") or small maps of all heads ("model"), for a notebook or a page.

        `layer` shows one layer; by default, all measured layers are shown.
        """
        views = {"sentence": sentence_view, "model": model_view}
        make = views["sentence" if figure is None else option("figure", figure, views)]
        rows = list(range(len(self.layers))) if layer is None else [self._place_of(layer)]
        return make(
            self.mass(text)[rows].float().numpy(),
            [segment.strip() or segment for segment in self.segments_of(text)],
            layers=[self.layers[row] for row in rows],
            head=index_of("head", 0 if head is None else head, self.state["mass"].shape[1]),
            sums_to_one=False,
            title=f"Attention between {self._things}",
        ).of_model(self.provenance.model)

    @property
    def lead(self) -> str:
        own = percent(float(self.own.nanmean()), 0)
        what = "excess of attention to earlier segments over its baseline by distance"
        largest = self._largest("earlier_excess", what=what)
        return (
            f"On {self._texts}, tokens give {own} of their attention to their own {self._thing}, averaged over heads; "
            f"{largest}."
        )

    @property
    def _thing(self) -> str:
        return "segment" if self.kind == "span" else self.kind

    @property
    def _things(self) -> str:
        return f"{self._thing}s"

    def _sections(self) -> "Sequence[Section]":
        heads = Section(
            f"Which heads attend to earlier {self._things}",
            f"Each cell is one head: its share of attention to earlier {self._things}, minus the share expected from "
            "its mean attention at each distance in tokens. Blue: more than distance explains; pale: not clear among "
            "all heads.",
            {"heads": self.plot()},
            "found.plot()",
        )
        if not self.starts:
            return [heads]
        row, place = self._shown(None, None, 0)
        named = f"layer={self.layers[row]}, head={place}"
        cells = Section(
            f"From {self._thing} to {self._thing}",
            f"L{self.layers[row]}H{place} exceeds its baseline the most. Left: the share of attention from the tokens "
            f"of each row's {self._thing} to each column's {self._thing}. Right: that share minus the baseline by "
            "distance in tokens.",
            {"mass": self.plot("mass"), "excess": self.plot("excess")},
            f'found.plot("excess", {named})',
            name="cells",
        )
        lines = Section(
            f"Lines between {self._things}",
            "Opacity shows the share of attention.",
            {"lines": self.show(layer=self.layers[row], head=place)},
            f"found.show({named})",
            name="lines",
        )
        if len(self.starts[0]) < 3:
            return [heads]
        received = Section(
            f"{self._things.capitalize()} that later {self._things} attend to",
            f"Attention that each {self._thing} receives per token from later {self._things}, for the heads with the "
            "highest kurtosis.",
            {"receivers": self.plot("receivers")},
            'found.plot("receivers")',
        )
        return [heads, cells, lines, received]

    def _text(self, text: int) -> int:
        if not self.starts:
            raise MissingPointError(
                "cells are stored only for a string or a list of texts, not for an iterator (a corpus)."
            )
        return index_of("text", text, len(self.starts))

    def _head(self, layer: int, head: int) -> tuple[int, int]:
        return self._place_of(layer), index_of("head", head, self.state["mass"].shape[1])

    def _shown(self, layer: int | None, head: int | None, text: int) -> tuple[int, int]:
        if (layer is None) != (head is None):
            raise InputError(f"`layer` and `head` must be passed together; got {shown(layer)} and {shown(head)}.")
        if layer is not None and head is not None:
            return self._head(layer, head)
        if len(self.starts[self._text(text)]) < 3:
            return 0, 0
        top = self.strongest_cells(1, text).iloc[0]
        return self._place_of(int(top["layer"])), int(top["head"])

    def _peaked(self, text: int) -> list[tuple[int, int]]:
        """The heads with the highest kurtosis in one text, counting all later segments."""
        peaks = peakedness(self.receivers(text)).nan_to_num(-torch.inf)
        places = torch.unravel_index(peaks.flatten().argsort(descending=True, stable=True)[:_LINES], peaks.shape)
        return [(int(row), int(place)) for row, place in zip(*places, strict=True)]


_LINES: Final = 5  # the number of heads in a figure of receivers


_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "x")
_DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")


def receiver_lines(scores: Mapping[str, Float[np.ndarray, " segment"]], labels: Sequence[str]) -> go.Figure:
    """The attention that each segment receives from later segments, one line per head.

    >>> receiver_lines({"L0H1": np.array([0.1, np.nan])}, ["0 a", "1 b"]).data[0].name
    'L0H1'
    """
    count = len(labels)
    colours = sample_colorscale("Viridis", np.linspace(0.0, 0.85, max(2, len(scores))).tolist())
    figure = Figure()
    for number, (name, values) in enumerate(scores.items()):
        figure.add_scatter(
            x=list(range(count)),
            y=values,
            mode="lines+markers",
            name=name,
            line={"color": colours[number], "dash": _DASHES[number % len(_DASHES)]},
            marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7},
            text=list(labels),
            hovertemplate=f"{name}<br>%{{text}}<br>%{{y:.3g}}<extra></extra>",
            showlegend=True,
        )
    ticks = {"tickvals": list(range(count)), "ticktext": list(labels)} if count <= MOST_LABELS else {}
    figure.update_layout(template=FIGURE_STYLE, height=360, margin={"t": 40})
    figure.update_xaxes(title="segment", **ticks)
    figure.update_yaxes(title="mean p from later segments", rangemode="tozero")
    return figure
