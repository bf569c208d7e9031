"""The limits of what a page shows and measures."""

from typing import Final

MAX_TOKENS: Final = 192  # a page shows at most this many tokens of a text
MAX_TEXTS: Final = 12  # a page shows at most this many texts
MAX_POSITIONS: Final = 800  # a page shows attention over at most this many patches or frames, which cannot be cut short
MAX_WORK: Final = 1_000_000_000_000
"""Each sweep of a page takes at most this many multiplications by a weight, about 20 seconds on two cores."""
MAX_REASONS: Final = 6_000  # a page contains at most this many lines of reasons
OTHER_TEXTS: Final = 40  # the number of further texts that give sweeps of the demo model their intervals
MAX_NEW: Final = 48  # an encoder-decoder without a target writes one of at most this many tokens
MAX_CELLS: Final = 5_500_000
"""A page shows the attention of at most this many cells; it shows only some layers of larger models."""
MAX_DETAILS: Final = 140_000  # scores and terms of at most this many cells; of further heads, attention and statistics
