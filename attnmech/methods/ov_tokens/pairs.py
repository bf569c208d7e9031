"""Pairs of a token that a head may read and one that it then raises or lowers, and their table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.text import plotly_text, quoted, signed, visible_token


@dataclass(frozen=True)
class Pair:
    """A token that a head reads, and a token whose logit it then raises or lowers most."""

    layer: int
    head: int
    kind: str
    """"raised" or "lowered"."""
    rank: int
    """The place of the pair among those of its kind, from 0."""
    read: str
    written: str
    logit: float
    """What the head adds to the logit of `written` if it attends only to `read`, above the mean over the vocabulary."""
    read_id: int
    written_id: int

    def __str__(self) -> str:
        return f"{quoted(self.read)} → {quoted(self.written)} {signed(self.logit, '.2f')}"


def pairs_chart(pairs: Sequence[Sequence[Sequence[Pair]]], kind: str) -> Chart:
    """The pairs of each layer and head, with columns for the token read, the token written, and the logit."""
    columns: dict[str, Callable[[Pair], str]] = {
        "reads": lambda pair: plotly_text(visible_token(pair.read)),
        kind: lambda pair: plotly_text(visible_token(pair.written)),
        "logit": lambda pair: signed(pair.logit, ".2f"),
    }
    figure = Figure()
    figure.add_table(header={"values": list(columns)}, cells={"values": [[] for _ in columns]})
    figure.update_layout(height=60 + 26 * len(pairs[0][0]))
    slots = []
    for place, column in enumerate(columns.values()):
        texts = [[[column(pair) for pair in of_head] for of_head in of_layer] for of_layer in pairs]
        slots.append(Slot(f"data.0.cells.values.{place}", ByChoice(np.array(texts, dtype=object), ("layer", "head"))))
    return Chart(figure, tuple(slots))
