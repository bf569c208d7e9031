"""Are these tensors, byte for byte, those of before? Told by one reading at the speed of memory.

h_l ← (h_l XOR x) · m over the 64-bit words x of a tensor, with m odd and as many lanes l as words in 512 bytes: a step
is invertible in h and in x, so that no change of a single word is missed, and others by chance alone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from .compiled import in_threads, loops_run

_PART: Final = 2**17
"""Words of a part, of which threads take some each."""


def fingerprint_of(tensors: Mapping[str, Tensor]) -> tuple[object, ...] | None:
    """A value that is equal for equal tensors under equal names; None if it would not be quick.

    Not for files, nor against a person: it has no key and is not SHA-256.
    """
    if not loops_run() or any(each.device.type != "cpu" for each in tensors.values()):
        return None
    about = tuple((name, each.dtype, tuple(each.shape), each.stride()) for name, each in tensors.items())
    return about, _digest([words for each in tensors.values() for words in _words_of(each)])


def _words_of(tensor: Tensor) -> Iterator[UInt8[Tensor, " byte"]]:
    """The bytes of whole words, in the order of memory if it has no gaps; those after the last, filled with zeros."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.detach().permute(axes).contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    yield flat[:whole]
    if whole < len(flat):
        yield torch.nn.functional.pad(flat[whole:], (0, whole + 8 - len(flat)))


def _digest(words: list[UInt8[Tensor, " byte"]]) -> bytes:
    """The lanes of every part."""
    from .digest_loop import LANES, shared_digest

    loop: Callable[..., None] = shared_digest
    counts = [len(each) // 8 for each in words]
    begins = [np.arange(0, count, _PART) for count in counts]
    addresses = [each.data_ptr() + 8 * begin for each, begin in zip(words, begins, strict=True)]
    lengths = [np.minimum(count - begin, _PART) for count, begin in zip(counts, begins, strict=True)]
    parts = np.stack([np.concatenate(addresses), np.concatenate(lengths)])
    lanes = np.empty((parts.shape[1], LANES), np.uint64)
    lanes[:] = np.arange(1, LANES + 1)
    # A thread takes neighbours in a list: here one in so many parts, so that all have as many large ones.
    threads = torch.get_num_threads()
    order = np.concatenate([np.arange(thread, len(lanes), threads) for thread in range(threads)])
    in_threads(len(lanes), _PART, loop, (*parts[:, order], lanes))
    return lanes[np.argsort(order)].tobytes()
