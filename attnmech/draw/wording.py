"""What are inputs and their positions called? Texts of tokens, images of patches, recordings of frames.

Findings and figures are written for texts; a page about something else says it in its own words.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from .chart import ByChoice, Chart, Slot
from .section import Section

_WORDS: Final = re.compile(r"\b([Aa]n? )?(first |First )?(texts?|tokens?)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Wording:
    """The words for one input and one of its positions.

    >>> IMAGE("The text has 7 tokens; a text's first token is not predicted.")
    "The image has 7 patches; an image's first position is not predicted."
    """

    text: str
    texts: str
    token: str
    tokens: str

    def __call__(self, sentence: str) -> str:
        """A sentence about texts and tokens in these words; "first position", since that may be a class token."""
        return sentence if self == TEXT else _WORDS.sub(self._word, sentence)

    def _word(self, found: re.Match[str]) -> str:
        article, first, word = found.group(1) or "", found.group(2) or "", found.group(3)
        named = "position" + "s" * word.lower().endswith("s") if first else str(getattr(self, word.lower()))
        named = named.capitalize() if word[0].isupper() else named
        if article and not first:
            article = f"{article[0]}{'n' if named[0] in 'aeiou' else ''} "
        return f"{article}{first}{named}"

    def section(self, section: Section) -> Section:
        """A section in these words; its call stays as it is."""
        if self == TEXT:
            return section
        prose = {
            name: self.said(getattr(section, name)) for name in ("heading", "contents", "reading", "finding", "caveat")
        }
        return replace(section, **prose, figures={name: self.figure(each) for name, each in section.figures.items()})

    def figure(self, drawn: Any) -> Any:
        """A figure in these words: titles, legends, hover boxes; not the labels of its positions, nor other views."""
        if isinstance(drawn, go.Figure):
            return type(drawn)(self._spelled(drawn.to_plotly_json()))
        if isinstance(drawn, Chart):
            return replace(drawn, template=self.figure(drawn.template), slots=tuple(map(self._slot, drawn.slots)))
        return drawn

    def _slot(self, slot: Slot) -> Slot:
        return replace(
            slot,
            values=tuple(map(self.said, slot.columns)) if isinstance(slot.values, tuple) else self.said(slot.values),
        )

    def said(self, given: Any) -> Any:
        """What is said, for each choice where there is one."""
        if isinstance(given, str):
            return self(given)
        if isinstance(given, ByChoice) and given.values.dtype == object:
            values = [self(each) if isinstance(each, str) else each for each in given.values.flat]
            return replace(given, values=np.array([*values, None], dtype=object)[:-1].reshape(given.values.shape))
        if isinstance(given, ByChoice) and given.words:
            return replace(given, words=tuple(self(each) if isinstance(each, str) else each for each in given.words))
        return given

    def _spelled(self, part: Any, name: str = "") -> Any:
        """The strings of a figure's parts, but for its data's own."""
        if isinstance(part, Mapping):
            return {key: self._spelled(value, key) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return [self._spelled(each, name) for each in part]
        return self(part) if isinstance(part, str) and name in _SHOWN else part


_SHOWN: Final = ("text", "name", "hovertemplate", "ticktext", "title")
"""The entries of a figure that are read."""

TEXT: Final = Wording("text", "texts", "token", "tokens")
IMAGE: Final = Wording("image", "images", "patch", "patches")
SOUND: Final = Wording("recording", "recordings", "frame", "frames")
INPUT: Final = Wording("input", "inputs", "position", "positions")
"""Of a module of the user's own."""

_FRAMES: Final = {
    "the two texts": "the text and the recording",
    "token of the encoder's text": "frame of the recording",
    "the encoder's text": "the recording",
    "key token": "key frame",
    "one token at a time": "one frame at a time",
    "a token is hidden": "a token or frame is hidden",
    "lines between tokens": "lines from tokens to frames",
}
_OF_KEYS: Final = re.compile("|".join(_FRAMES), re.IGNORECASE)


class _Crossing(Wording):
    """The words for a text whose tokens look at frames: what is said of keys is said of frames.

    >>> HEARD("The first key token, of the encoder's text. Each query token looks at one token at a time.")
    'The first key frame, of the recording. Each query token looks at one frame at a time.'
    """

    def __call__(self, sentence: str) -> str:
        return _OF_KEYS.sub(self._frame, sentence)

    @staticmethod
    def _frame(found: re.Match[str]) -> str:
        words = _FRAMES[found.group().lower()]
        return words.capitalize() if found.group()[0].isupper() else words


HEARD: Final = _Crossing("text", "texts", "token", "tokens")
"""Of cross-attention from a text to a recording."""
