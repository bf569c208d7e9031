"""Defines how much of a model the certificate tries: at load, or in full."""

import sys
from dataclasses import dataclass
from typing import Final

_ALL: Final = sys.maxsize


@dataclass(frozen=True)
class Depth:
    """The sizes of a proof. Whatever the depth, every layer is read on two texts of 24 tokens."""

    beginning: int  # the number of tokens of a text that runs in one copy per token or edit
    long_texts: int  # the number of longer texts, each with its own amount of padding on the left
    long_layers: int  # the largest number of layers in which longer texts are read
    edit_passes: int  # the largest number of passes in which edits are tried, in a few layers each


SHORT: Final = Depth(beginning=8, long_texts=1, long_layers=3, edit_passes=1)
FULL: Final = Depth(beginning=24, long_texts=2, long_layers=_ALL, edit_passes=_ALL)
