"""The families without a residual stream in the sense of the points, and what their blocks do instead.

Their attention is read, and proven, like any other: queries, keys, values, scores, pattern, z, results. The points of
the stream are absent, with the reason given here, and so is everything that is made of them.
"""

from collections.abc import Mapping
from typing import Final

_NORMED: Final = "its blocks add attention and MLP to a stream that they normalise and scale, not to what enters them"
_ENDS: Final = "its blocks multiply the stream by a number of their own as they end, and may add an embedding by layer"
_STREAMS: Final = "its blocks mix several streams (AltUp) and write into them through low-rank side paths"
_ADAPTED: Final = "its blocks end in an adapter of the text's language, behind the sum of stream and MLP"
_BOTTLENECK: Final = "its attention reads and writes a narrower stream of each block's own"
_BESIDE: Final = (
    "its attention reads the stream and the token embedding side by side, and writes through an MLP and a matrix into "
    "a Mamba layer"
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
