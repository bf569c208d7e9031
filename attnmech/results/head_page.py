"""The page of a result about heads: its figures between a map of all heads and the card of the chosen one."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeGuard

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float

from ..draw.chart import at_head
from ..draw.figure_page import table_html
from ..draw.heads import HeadNumber, PageHeads
from ..draw.page import Page, render_page
from ..draw.section import Section
from ..draw.text import with_minus_signs
from ..maths.outliers import robust_scores, spread_of

MOST_LISTED: Final = 8  # the largest number of numbers on a card; the table has all

ROUNDING: Final = 1e-5  # numbers so small in every head, or alike to this share, are rounding and say nothing of a head

OF_A_NUMBER: Final = ("low", "high", "agreeing", "clear", "clear_size", "one_text")
"""The columns about a number, after its name and "_"; a table with one such number may leave out its name."""

_PLACE: Final = ("layer", "head")


def is_about_heads(frame: pd.DataFrame) -> bool:
    """Whether a table has one row for each of its heads, and a number about them."""
    if not set(_PLACE) <= set(frame.columns) or frame.empty:
        return False
    return not frame.duplicated(list(_PLACE)).any() and bool(_numbers_in(frame))


def head_page(
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    heads: pd.DataFrame,
    frame: pd.DataFrame,
    labels: Mapping[str, str],
    letters: Mapping[str, tuple[str, str]],
    provenance: Mapping[str, str],
) -> str:
    """The whole page as HTML for a UTF-8 file; it opens without a network.

    Args:
        title: the title of the page.
        lead: the sentence at its top.
        sections: the figures; a click in a map of layers × heads chooses a head.
        heads: the table with one row per head.
        frame: the table that the page shows.
        labels: the labels of numbers, with their units, by the columns of `heads`.
        letters: the letter and the colour of each type in the column `types`.
        provenance: the origin of the numbers.

    """
    layers = sorted({int(layer) for layer in heads["layer"]})
    figures = [figure for section in sections for figure in section.figures.values()]
    widths = [len(figure.data[0].x) for figure in figures if is_head_map(figure)]
    of_heads = heads_of(heads, layers, max([int(heads["head"].max()) + 1, *widths]), labels, letters)
    return render_page(
        Page(
            title=title,
            headline=lead,
            heads=of_heads,
            sections=_with_clicks(sections, tuple(layers)),
            table=table_html(frame),
            provenance=provenance,
            start=_first(of_heads, lead),
        )
    )


def is_head_map(figure: object) -> TypeGuard[go.Figure]:
    """Whether a figure is a map with a row per layer and a column per head, as `effect_map` draws it."""
    if not isinstance(figure, go.Figure) or not figure.data or figure.layout.shapes:
        return False
    cells = figure.data[0]
    return bool(
        cells.type == "heatmap"
        and figure.layout.xaxis.title.text == "head"
        and np.shape(cells.customdata) == (*np.shape(cells.z), 2)
    )


def _with_clicks(sections: Sequence[Section], layers: tuple[int, ...]) -> list[Section]:
    """The sections with maps that choose a head; sections of a single tab stand with the table."""

    def clickable(figure: Any) -> Any:
        if not is_head_map(figure):
            return figure
        return at_head(figure, tuple(int(row[0][0]) for row in figure.data[0].customdata), layers)

    one_tab = len({section.tab for section in sections}) == 1
    return [
        replace(
            section,
            figures={f"figure-{name}": clickable(figure) for name, figure in section.figures.items()},
            name=section.anchor,
            tab="model" if one_tab else section.tab,
        )
        for section in sections
    ]


def heads_of(
    frame: pd.DataFrame,
    layers: Sequence[int],
    count: int,
    labels: Mapping[str, str],
    letters: Mapping[str, tuple[str, str]],
) -> PageHeads:
    """The numbers of the map, the types, and the card of every head, from a table with one row per head."""
    rows = frame.set_index(list(_PLACE), drop=False).reindex(pd.MultiIndex.from_product([layers, range(count)]))

    def grid(column: str) -> np.ndarray:
        """A column by layer and head, NaN for heads without a row."""
        return rows[column].to_numpy().reshape(len(layers), count)

    def number(name: str) -> HeadNumber:
        label, values = labels.get(name, name.replace("_", " ")).replace("<br>", " "), grid(name).astype(float)
        low, high, clear = (_column_of(frame, name, part) for part in ("low", "high", "clear"))
        if low is None or high is None or frame[low].isna().all():
            return HeadNumber(name, label, "numbers", values)
        ends = (grid(low).astype(float), grid(high).astype(float))
        if clear is None or f"{name}_expected" in frame:  # then "clear" is about the difference from what is expected
            return HeadNumber(name, label, "numbers", values, ends=ends)
        return HeadNumber(name, label, "numbers", values, grid(clear) == True, ends)  # noqa: E712 - NaN is not True

    numbers = [number(name) for name in _numbers_in(frame)]
    known = [number for number in numbers if np.isfinite(number.values).any()] or numbers[:1]
    varied = [number for number in known if _differs(number.values)] or known
    types = _types(grid("types")) if letters and "types" in frame else ()
    claimed = [name for of_layer in types for of_head in of_layer for name in of_head]
    return PageHeads(
        layers,
        count,
        numbers=varied,
        types=types,
        letters={name: letters[name] for name in sorted(set(claimed), key=lambda name: -claimed.count(name))},
        card=_texts(frame, grid) | {"Furthest from the median head first": number_lines(varied)},
    )


def _differs(values: np.ndarray) -> bool:
    """Whether a number differs between heads by more than rounding."""
    known = values[np.isfinite(values)]
    largest = np.abs(known).max(initial=0.0)
    return bool(largest > ROUNDING and np.ptp(known) > ROUNDING * largest)


def _numbers_in(frame: pd.DataFrame) -> list[str]:
    """The columns of numbers, without those that name a head or qualify another number."""
    numeric = [str(name) for name in frame.select_dtypes("number").columns if name not in _PLACE]
    other_heads = {f"{name}_{part}" for name in _other_heads(frame) for part in _PLACE}  # names, not numbers
    of_others = {_column_of(frame, name, part) for name in numeric for part in OF_A_NUMBER}
    return [name for name in numeric if name not in other_heads and name not in of_others]


def _column_of(frame: pd.DataFrame, number: str, part: str) -> str | None:
    """The column with a part of a number, such as "low"; one without a number's name is of the number before it."""
    if f"{number}_{part}" in frame:
        return f"{number}_{part}"
    columns = list(frame.columns)
    first = min((columns.index(name) for name in OF_A_NUMBER if name in columns), default=0)
    before = str(columns[first - 1]) if first else ""
    return part if part in columns and number in (before, before.removesuffix("_high")) else None


def _other_heads(frame: pd.DataFrame) -> list[str]:
    """The names of further heads in a row: "nearest" for the columns nearest_layer (or its own) and nearest_head."""
    return [str(name).removesuffix("_head") for name in frame.columns if str(name).endswith("_head")]


def _texts(frame: pd.DataFrame, grid: Callable[[str], np.ndarray]) -> dict[str, list[list[str]]]:
    """The columns of words, and the other heads that rows name, as entries of a card."""
    entries = {}
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            entries[_in_words(name)] = [["" if pd.isna(word) else str(word) for word in line] for line in grid(name)]
    for name in _other_heads(frame):
        layer_column = f"{name}_layer" if f"{name}_layer" in frame else "layer"
        entries[_in_words(name)] = [
            [
                "" if pd.isna(layer) or layer < 0 else f"L{layer:.0f}H{head:.0f}"
                for layer, head in zip(*lines, strict=True)
            ]
            for lines in zip(grid(layer_column), grid(f"{name}_head"), strict=True)
        ]
    return entries


def _in_words(column: str) -> str:
    return column.replace("_", " ").capitalize()


def _types(names: np.ndarray) -> list[list[tuple[str, ...]]]:
    return [
        [tuple(filter(None, str(cell).split(", "))) if isinstance(cell, str) else () for cell in line] for line in names
    ]


def robust(numbers: Sequence[HeadNumber]) -> Float[torch.Tensor, "number layer head"]:
    """How far each number of a head is from the median of all heads, in robust standard deviations; 0 if undefined."""
    return torch.stack([robust_scores(torch.tensor(number.values)).abs().nan_to_num() for number in numbers])


def number_lines(numbers: Sequence[HeadNumber]) -> list[list[str]]:
    """For each head, its numbers with their intervals, those furthest from the median of all heads first."""
    scores = robust(numbers)
    medians = [_median(number.values) for number in numbers]

    def of_head(layer: int, head: int) -> str:
        order = scores[:, layer, head].argsort(descending=True, stable=True).tolist()
        known = [at for at in order if np.isfinite(numbers[at].values[layer, head])]
        lines = [_line(numbers[at], layer, head, medians[at]) for at in known[:MOST_LISTED]]
        more = f"The table has {len(known) - MOST_LISTED} more." if len(known) > MOST_LISTED else ""
        return with_minus_signs("\n".join(filter(None, (*lines, more)))) or "not measured"

    layers, count = numbers[0].values.shape
    return [[of_head(layer, head) for head in range(count)] for layer in range(layers)]


def _median(values: Float[np.ndarray, "layer head"]) -> float:
    middle = spread_of(torch.tensor(values).flatten())[0]
    return 0.0 if abs(middle) < 1e-12 * np.nanmax(np.abs(values), initial=0) else middle


def _line(number: HeadNumber, layer: int, head: int, median: float) -> str:
    """A number of a head, with its interval and the median of all heads."""
    remarks = []
    if number.ends is not None and np.isfinite(number.ends[0][layer, head]):
        low, high = (float(end[layer, head]) for end in number.ends)
        remarks.append(f"95 %: {low:.3g} to {high:.3g}")
    if number.clear is not None:
        remarks.append("clear" if number.clear[layer, head] else "not clear")
    if np.isfinite(number.values).sum() > 1:
        remarks.append(f"median {median:.3g}")
    value = f"{number.label}: {float(number.values[layer, head]):.4g}"
    return f"{value} ({'; '.join(remarks)})" if remarks else value


def _first(heads: PageHeads, lead: str) -> tuple[int, int]:
    """The head that the lead names first; if it names none, that with the largest first number, clear if some are."""
    for layer, head in re.findall(r"\bL(\d+)H(\d+)\b", lead):
        if int(layer) in heads.layers and int(head) < heads.count:
            return int(layer), int(head)
    number = heads.numbers[0]
    clear: Bool[np.ndarray, "layer head"] = np.ones(number.values.shape, bool) if number.clear is None else number.clear
    size = np.nan_to_num(np.abs(number.values), nan=-1.0) * (clear if clear.any() else 1)
    row, head = np.unravel_index(size.argmax(), size.shape)
    return heads.layers[row], int(head)
