"""Shows the example rows of a head as text, shaded by attention."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from ...draw.embed import View
from ...draw.packing import pack_texts
from ...draw.scripts import of_question
from ...draw.text import percent, visible_token
from .example import Example

SCRIPT: Final = of_question("examples", tuple(files(__package__) / name for name in ("examples.js", "examples.css")))
"""The script that draws the rows."""


@dataclass(frozen=True)
class HeadRows:
    """The example rows of one head."""

    rows: int
    """The number of the head's rows that count."""
    share: float
    """The share of these that are at least as strong as the weakest of the strongest examples."""
    quantiles: Sequence[float]
    """The 20, 40, 60 and 80 % quantiles of the values."""
    strongest: Sequence[Example]
    bands: Sequence[Sequence[Example]]
    """Examples of each fifth of the rows, from the lowest values to the highest."""
    random: Sequence[Example]


def packed_layer(heads: Sequence[HeadRows]) -> str:
    """The rows of a layer's heads, as examples.js reads them."""
    places: dict[str, int] = {}

    def token(text: str) -> int:
        return places.setdefault(_spaced(text), len(places))

    of_heads = [
        {
            "rows": head.rows,
            "share": percent(head.share, 1),
            "quantiles": [_rounded(value) for value in head.quantiles],
            "sheets": [
                [_row(example, token) for example in examples]
                for examples in (head.strongest, *reversed(head.bands), head.random)
            ],
        }
        for head in heads
    ]
    return pack_texts((json.dumps(list(places)), *map(json.dumps, of_heads)))


def examples_view(
    layers: Sequence[int],
    heads: int,
    *,
    meaning: str,
    sample: int,
    packed: Sequence[str] = (),
    files: Sequence[str] = (),
    embedded: bool = False,
) -> View:
    """Shows the rows of one head: the strongest, those of each fifth, and rows at random.

    Args:
        layers: the layers measured.
        heads: the number of heads in each layer.
        meaning: the statistic by which rows are ordered, in words.
        sample: the most rows of a head from which shares and fifths are computed.
        packed: the rows of each layer, as `packed_layer` returns them.
        files: instead, the file of each layer, relative to the page, which the page reads when it needs it.
        embedded: whether the page around the view chooses the head.

    """
    data: Mapping[str, Any] = {
        "layers": list(layers),
        "heads": heads,
        "chosen": {"layer": 0, "head": 0},
        "meaning": meaning,
        "sample": sample,
        "packed": list(packed),
        "files": list(files),
        "embedded": embedded,
    }
    return View("examples", "Example rows of a head", READING, data, (SCRIPT,))


READING: Final = (
    "Each line is one row of the head's attention. The query is underlined. A deeper shade marks a token that receives "
    "more attention from it; only the eight highest keys are shaded, and the highest is boxed."
)


def _row(example: Example, token: Any) -> dict[str, Any]:
    keys = zip(example.keys, example.key_tokens, example.key_weights, strict=True)
    return {
        "value": _rounded(example.value),
        "text": example.text,
        "position": example.position,
        "query": example.query_at,
        "tokens": [token(text) for text in example.tokens],
        "keys": [[position, token(text), _rounded(weight)] for position, text, weight in keys],
    }


def _spaced(token: str) -> str:
    """A token as a reader sees it in running text: a space before a word stays a space."""
    isolated = token.startswith(" ") and token[1:].strip()
    return f" {visible_token(token[1:])}" if isolated else visible_token(token)


def _rounded(value: float) -> float | None:
    """Rounds to six digits; None where undefined."""
    return None if math.isnan(value) else float(f"{value:.6g}")
