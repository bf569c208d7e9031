"""Shows the example rows of a head as text, shaded by attention."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from ...draw.packing import pack_texts
from ...draw.scripts import of_question
from ...draw.text import percent, rounded, visible_token
from .example import Example

SCRIPT: Final = of_question("examples", tuple(files(__package__) / name for name in ("examples.js", "examples.css")))


def packed_layer(heads: Sequence[tuple[int, float, Sequence[float], Sequence[Sequence[Example]]]]) -> str:
    """The rows of a layer's heads, as examples.js reads them.

    Each head has the number of its rows that count, the share of these that are at least as strong as the weakest of
    the strongest examples, the quantiles of the values, and lists of examples in the order in which they are shown.
    """
    places: dict[str, int] = {}

    def token(text: str) -> int:
        return places.setdefault(_spaced(text), len(places))

    of_heads = [
        {
            "rows": rows,
            "share": percent(share, 1),
            "quantiles": [rounded(value) for value in quantiles],
            "sheets": [[_row(example, token) for example in examples] for examples in sheets],
        }
        for rows, share, quantiles, sheets in heads
    ]
    return pack_texts((json.dumps(list(places)), *map(json.dumps, of_heads)))


READING: Final = (
    "Each line is one row of the head's attention. The query is underlined. A deeper shade marks a token that receives "
    "more attention from it; only the eight highest keys are shaded, and the highest is boxed."
)


def _row(example: Example, token: Any) -> dict[str, Any]:
    keys = zip(example.keys, example.key_tokens, example.key_weights, strict=True)
    return {
        "value": rounded(example.value),
        "text": example.text,
        "position": example.position,
        "query": example.query_at,
        "tokens": [token(text) for text in example.tokens],
        "keys": [[position, token(text), rounded(weight)] for position, text, weight in keys],
    }


def _spaced(token: str) -> str:
    """A token as a reader sees it in running text: a space before a word stays a space."""
    isolated = token.startswith(" ") and token[1:].strip()
    return f" {visible_token(token[1:])}" if isolated else visible_token(token)
