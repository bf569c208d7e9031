"""Draws attention on the user's pictures, part by part as the model reads them."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float

from ..batch import Batch
from ..draw.chart import Chart
from ..draw.embed import View
from ..draw.head_picker import head_picker
from ..draw.section import Section
from ..draw.senses import MIXED, Canvas, picture_section, picture_uri
from ..draw.text import quoted
from ..errors import InputError

MAX_PICTURES: Final = 12  # at most this many pictures, or tiles of pictures, are drawn


def attention_on_pictures(
    batch: Batch,
    pattern: Float[np.ndarray, "layer head query key"],
    call: str = "",
    *,
    text: int = 0,
    queries: Sequence[int] = (),
) -> Section | None:
    """The attention of rows of a text (by default the last) to its pictures; None without pictures of known parts."""
    canvases = list(_canvases(batch, text)) if batch.held else []
    if not canvases:
        return None
    cells = ["" if place is None else f"{place.row},{place.column}" for place in batch.held[text]]
    return picture_section(canvases, cells, pattern, call, queries=queries, among=True)


def picture_view(
    batch: Batch,
    pattern: Float[np.ndarray, "layer head query key"],
    *,
    text: int,
    layers: Sequence[int],
    heads: Sequence[int],
    query: int,
) -> View:
    """A view of one row's attention to the text's pictures, with controls for the layer and the head."""
    section = attention_on_pictures(batch, pattern[:, :, [query]], text=text, queries=[query])
    if section is None:
        raise InputError(
            'view="picture" shows attention to the pictures of a text; this text has none whose parts are known. Give '
            '{"text": ..., "images": [...]} to a model with its processor.'
        )
    chart = section.figures["picture-attention"]
    assert isinstance(chart, Chart)
    return head_picker(
        lambda layer, head: chart.values(layer=layers.index(layer), head=head, query=0),
        {"layer": layers, "head": heads},
        chosen={"layer": layers[0], "head": heads[0]},
        title=f"Attention of {query} {quoted(batch.tokens[text][query])} to the pictures",
        reading=f"{section.reading} {MIXED}",
    )


def _canvases(batch: Batch, text: int) -> Iterator[Canvas]:
    """The user's pictures, in the parts that the model reads apart."""
    places = batch.held[text]
    parts = dict.fromkeys((place.number, place.tile) for place in places if place is not None and place.box is not None)
    for number, tile in list(parts)[:MAX_PICTURES]:
        image = batch.pictures[text].images[number - 1]
        width, height = image.size
        boxes = [
            None
            if place is None or place.box is None or (place.number, place.tile) != (number, tile)
            else (place.box[0] * width, place.box[1] * height, place.box[2] * width, place.box[3] * height)
            for place in places
        ]
        title = f"image {number}" + ("" if tile is None else f", tile {tile}")
        yield Canvas(picture_uri(image), (width, height), boxes, title)
