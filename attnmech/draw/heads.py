"""The heads of a page: their types, the numbers that colour their map, a sentence and a card for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float

from .section import Choice
from .text import rounded

TYPE: Final = "type"  # the colour of heads by type, in the choice "colour"
MAP: Final = "map"
"""The value of the choice "across" for the map by layer and head; other values name the number on a scatter's axis."""


@dataclass(frozen=True)
class HeadNumber:
    """A number by layer and head that colours the map of heads, or places heads along an axis."""

    name: str  # the name in addresses
    label: str  # the label of its scale, with the unit
    group: str  # the question that it belongs to, for the list of numbers
    values: Float[np.ndarray, "layer head"]  # NaN where undefined
    clear: Bool[np.ndarray, "layer head"] | None = None
    """Whether each number's interval excludes 0; the others are pale. None if there are no intervals."""
    ends: tuple[Float[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]] | None = None
    """The low and high ends of each number's 95 % interval; None if there are no intervals."""


@dataclass(frozen=True)
class PageHeads:
    """What a page says about each head."""

    layers: Sequence[int]  # the layers shown
    count: int  # the number of heads in each layer
    numbers: Sequence[HeadNumber]
    types: Sequence[Sequence[Sequence[str]]] = ()
    """The claimed types of each head, the strongest first, by layer and head; empty if none was measured."""
    letters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The letter and the colour of every type that some head has."""
    sentences: Sequence[Sequence[str]] = ()  # a sentence that describes each head, by layer and head
    card: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """The entries of each head's card, by their labels; an empty text leaves the entry out."""
    attended: Sequence[Sequence[Mapping[str, int]]] = ()
    """In how many of the rows shown each head attends to each token, by layer and head; empty for one text."""
    order: Sequence[int] = ()  # the heads, counted layer by layer, those that matter most first

    @property
    def choices(self) -> list[Choice]:
        """The reader's choices: the colour of the map, and the two axes of a scatter."""
        names, labels = (tuple(getattr(number, part) for number in self.numbers) for part in ("name", "label"))
        first = (TYPE,) if self.letters else ()
        return [
            Choice("colour", "Colour", (*first, *names), words=(*first, *labels)),
            Choice("across", "Across", (MAP, *names), words=(MAP, *labels)),
            Choice("up", "Up", names, words=labels),
        ]

    @property
    def data(self) -> dict[str, Any]:
        """The data that heads.js reads; arrays are flat, layer by layer."""
        return {
            "types": [list(names) for heads in self.types for names in heads],
            "letters": dict(self.letters),
            "numbers": {
                number.name: {
                    "label": number.label,
                    "group": number.group,
                    "values": [rounded(value) for value in number.values.flat],
                    **({} if number.clear is None else {"clear": number.clear.reshape(-1).tolist()}),
                }
                for number in self.numbers
            },
            "sentences": [sentence for heads in self.sentences for sentence in heads],
            "attended": [dict(counts) for heads in self.attended for counts in heads],
        }
