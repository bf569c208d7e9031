"""The families without a residual stream in the sense of the points, and what their blocks do instead.

Their attention is read and proven like any other: queries, keys, values, scores, pattern, z, results. The points of the
stream are absent, for the reasons given here, and so is everything computed from them.
"""

from collections.abc import Mapping
from typing import Final

_NORMED: Final = "its blocks add attention and MLP to a normalised, scaled stream, not to the stream that enters them"
_ENDS: Final = "each of its blocks ends by multiplying the stream by a number, and may add an embedding for its layer"
_STREAMS: Final = "its blocks mix several streams (AltUp) and write into them through low-rank side paths"
_ADAPTED: Final = "its blocks end in an adapter for the text's language, after the sum of stream and MLP"
_BOTTLENECK: Final = "the attention of each block reads and writes a narrower stream within the block"
_BESIDE: Final = (
    "its attention reads the stream concatenated with the token embedding, and writes into a Mamba layer "
    "through an MLP and a matrix"
)

NO_STREAM: Final[Mapping[str, str]] = {
    "minimax": _NORMED,
    "gemma3n": _STREAMS,
    "gemma3n_text": _STREAMS,
    "gemma4": _ENDS,
    "gemma4_text": _ENDS,
    "gemma4_unified": _ENDS,
    "gemma4_unified_text": _ENDS,
    "mobilebert": _BOTTLENECK,
    "xmod": _ADAPTED,
    "zamba": _BESIDE,
    "zamba2": _BESIDE,
}
"""By transformers' `config.model_type`."""
