"""Shows the pairs of tokens read and written of the chosen head as a table."""

from collections.abc import Callable, Sequence

import numpy as np

from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.text import plotly_text, signed, visible_token
from .pair import Pair


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
