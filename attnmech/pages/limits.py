"""How much a page shows and measures at most."""

from typing import Final

MAX_TOKENS: Final = 192
"""A page shows at most this many tokens of a text."""

MAX_POSITIONS: Final = 800
"""A page shows attention of at most this many patches of an image, or frames of a recording, which cannot be cut."""

MAX_WORK: Final = 1_000_000_000_000
"""A page's sweeps take at most so many multiplications of a weight each, about 20 seconds on two cores."""

MAX_REASONS: Final = 6_000
"""A page holds at most so many lines of reasons."""

OTHER_TEXTS: Final = 40
"""With the demo model, as many further texts give the sweeps their intervals."""

MAX_NEW: Final = 48
"""Where an encoder-decoder is given no target, at most so many tokens of its own are taken for one."""

MAX_CELLS: Final = 2_250_000
"""A page holds at most this many scores, about 20 MB; of larger models it shows some layers."""
