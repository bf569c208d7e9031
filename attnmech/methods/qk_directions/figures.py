"""Lists the directions of the chosen head: their shares, and the tokens that they read."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pandas as pd

from ...draw.chart import ByChoice, Chart, Slot
from ...draw.figure import Figure
from ...draw.text import percent, plotly_text, visible_token, with_minus_signs

_SHOWN: Final = 3
"""The number of tokens shown at each end."""
_ENDS: Final = {"highest": "+", "lowest": "−"}


def directions_chart(frames: Sequence[Sequence[pd.DataFrame]]) -> Chart:
    """A table with two lines for each direction of each layer and head, from `QKDirections.directions`."""
    columns: dict[str, Callable[[pd.Series, str], str]] = {
        "direction": lambda line, end: f"{line.direction} {_ENDS[end]}",
        "share (95 %)": lambda line, end: _share(line) if end == "highest" else "",
        "queries that read": lambda line, end: _tokens(line[f"query_{end}"]),
        "keys that read": lambda line, end: _tokens(line[f"key_{end}"]),
    }
    figure = Figure()
    figure.add_table(header={"values": list(columns)}, cells={"values": [[] for _ in columns]})
    figure.update_layout(height=60 + 52 * len(frames[0][0]))
    slots = []
    for place, column in enumerate(columns.values()):
        texts = [
            [[column(line, end) for _, line in of_head.iterrows() for end in _ENDS] for of_head in of_layer]
            for of_layer in frames
        ]
        slots.append(Slot(f"data.0.cells.values.{place}", ByChoice(np.array(texts, dtype=object), ("layer", "head"))))
    return Chart(figure, tuple(slots))


def _share(line: pd.Series) -> str:
    share = percent(line.share)
    if pd.isna(line.share_low):
        return share
    return with_minus_signs(f"{share} ({100 * line.share_low:.1f} to {100 * line.share_high:.1f})")


def _tokens(tokens: Sequence[str]) -> str:
    return ", ".join(plotly_text(visible_token(token)) for token in tokens[:_SHOWN])
