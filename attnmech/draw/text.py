"""Escapes untrusted text for display; all escaping is here.

Tokens, titles and facts may contain anything, including markup and invisible characters.

>>> html_text("<script>"), plotly_text("<b>$x$</b>")
('&lt;script&gt;', '&lt;b&gt;&#36;x&#36;&lt;/b&gt;')
"""

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import Final
from unicodedata import bidirectional, category

from ..basics.axes import token_text
from ..basics.nouns import Nouns

LONGEST_LABEL: Final = 14  # the largest number of a token's characters in a tick label; an ellipsis replaces the rest

_JOINERS: Final = "\u200c\u200d"

_NO_BASE: Final = "·⏎␍⇥⟩"  # the characters of visible tokens to which a combining mark cannot attach

_MARKUP_IN_JSON: Final = {character: f"\\u{ord(character):04x}" for character in "<>&"}


@lru_cache(maxsize=4096)  # a page names each of its tokens thousands of times
def visible_token(token: str) -> str:
    r"""Returns a token as a reader sees it; characters that do not print are shown as code points.

    A joiner between two characters beyond ASCII stays, because their spelling needs it (👩‍👧, Persian). A combining
    mark without a base character is shown on a dotted circle.

    >>> visible_token(" the"), visible_token("\u202e"), visible_token("\u200d"), visible_token("👩\u200d👧")
    ('·the', '⟨202E⟩', '⟨200D⟩', '👩\u200d👧')
    >>> visible_token("\u0301s") == "◌\u0301s"
    True
    """
    text, shown = token_text(token), ""
    for before, character, after in zip(" " + text, text, text[1:] + " ", strict=False):
        if category(character).startswith("M") and (not shown or shown[-1] in _NO_BASE):
            shown += "◌"
        prints = character.isprintable() or (character in _JOINERS and before > "\x7f" < after)
        shown += character if prints else f"⟨{ord(character):04X}⟩"
    return shown


def shorten(text: str) -> str:
    """Shortens a visible token that is longer than a label to its first characters and an ellipsis."""
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def short_name(name: str) -> str:
    """Shortens a model's name for a heading: of each path in it, only the last part remains.

    >>> short_name("bigscience/bloom-560m"), short_name("/models/mine/"), short_name("/a/base (/b/adapter) − ./c")
    ('bigscience/bloom-560m', 'mine', 'base (adapter) − c')
    """
    pieces = re.split(r"( − | \((?=[^()]*\)(?: |$))|\)(?= |$))", name)
    return "".join(piece if number % 2 else _last_part(piece) for number, piece in enumerate(pieces))


def _last_part(path: str) -> str:
    """The last part of a path; a hub name is whole, also if the path is that of its snapshot in the hub's cache."""
    *folders, last = re.split(r"[/\\]", path.rstrip("/\\"))
    if folders[-1:] == ["snapshots"] and folders[-2:][0].startswith("models--"):
        return folders[-2].removeprefix("models--").replace("--", "/")
    is_hub_name = len(folders) == 1 and "/" in path and folders[0].strip(".~") and not last.endswith(".gguf")
    return path if is_hub_name else last


def isolated(text: str) -> str:
    """Isolates right-to-left text, so that the text around it keeps its order."""
    turns = any(bidirectional(character) in ("R", "AL", "AN") for character in text)
    return f"\u2068{text}\u2069" if turns else text


@lru_cache(maxsize=4096)
def quoted(token: str) -> str:
    """Returns a token in quotation marks, for a sentence.

    >>> quoted(" the")
    '“·the”'
    """
    return f"“{isolated(visible_token(token))}”"


def token_labels(tokens: Iterable[str], first: int = 0) -> list[str]:
    """Returns a label per token for plotly axes and hover boxes: its position, which makes labels unique, and its text.
    `first` is the position of the first.

    >>> token_labels(["What", " <b>"])
    ['0 What', '1 ·&lt;b&gt;']
    """
    texts = (shorten(visible_token(token)) for token in tokens)
    return [f"{position} {isolated(plotly_text(text))}" for position, text in enumerate(texts, first)]


def labels_of(tokens: Sequence[str], keys: Sequence[str] | None, nouns: Nouns) -> tuple[list[str], list[str]]:
    """The labels of queries and of keys, which are the same tokens if `keys` is None."""
    first = len(keys) - len(tokens) if keys is not None and nouns.rows else 0
    return token_labels(tokens, first), token_labels(tokens if keys is None else keys)


def plotly_text(text: str) -> str:
    """Escapes text for a plotly string, in which tags, entities and `$…$` are interpreted, but `&quot;` is not."""
    return html.escape(text, quote=False).replace("$", "&#36;")


def rounded(value: float) -> float | None:
    """Rounds a number of a page to six digits; None for NaN and infinities, which JSON lacks."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def bound(value: float, digits: int = 1) -> str:
    """Rounds an upper bound up to a few digits, so that a sentence that quotes it stays true.

    >>> bound(1.1e-05), bound(1.1e-05, 2), bound(0.00392, 2), bound(4e-06)
    ('2e-05', '1.1e-05', '0.004', '4e-06')
    """
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(up):.{digits}g}"


def signed(value: float, form: str) -> str:
    """Formats a number with its sign, in the format `form`; negative numbers have a true minus sign.

    >>> signed(-0.25, ".1f"), signed(2.0, ".3g")
    ('−0.2', '+2')
    """
    text = f"{value:+{form}}"
    return f"−{text[1:]}" if text.startswith("-") else text


def with_minus_signs(text: str) -> str:
    """Puts true minus signs before numbers in a text; hyphens in words and exponents stay.

    >>> with_minus_signs("-0.3 nats (-0.5 to -1e-05), query-key, L0-3")
    '−0.3 nats (−0.5 to −1e-05), query-key, L0-3'
    """
    return re.sub(r"(?<![\w.])-(?=[\d.])", "−", text)


def percent(share: float, digits: int = 1) -> str:
    """Formats a share of 1 in percent, with a non-breaking space.

    >>> percent(0.126), percent(0.126, 0), percent(0.0004)
    ('12.6\xa0%', '13\xa0%', '0.040\xa0%')
    """
    return f"{100 * share:.{3 if digits and 0 < share < 0.001 else digits}f}\u00a0%"


def printable(text: str) -> str:
    """Returns text that can be encoded in UTF-8; a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def html_text(text: str) -> str:
    """Escapes text for an HTML element or a quoted attribute."""
    return html.escape(printable(text))


def json_for_script(value: object) -> str:
    r"""Returns JSON that is safe inside a `<script>` element: ASCII only, without `<`, `>` and `&`.

    >>> json_for_script("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    for character, escape in _MARKUP_IN_JSON.items():  # `translate` takes seconds for a page's megabytes
        text = text.replace(character, escape)
    return text
