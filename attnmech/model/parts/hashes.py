"""Computes SHA-256 of weights, configs and inputs, for a result's provenance."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import xxhash
from jaxtyping import Int
from torch import Tensor, nn

from ...batch import Batch
from .packed import packed_projections

_NOT_THE_MODEL: Final = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Config entries that may change when a model is saved and loaded, without changing what it computes."""

_SMALL_WORDS: Final = {1: torch.int8, 2: torch.int16}
"""The integer type that holds a value of this many bytes; larger values are read as words of four bytes."""
_ROW: Final = 2**12  # a device sums this many words at a time for a checksum
_AT_ONCE: Final = 2**23  # a device multiplies this many words at a time; each takes 8 bytes while it does


def model_hash(config: Any, weights: str) -> str:
    """SHA-256 of a transformers config together with the hash of the weights."""
    entries = {name: value for name, value in config.to_dict().items() if name not in _NOT_THE_MODEL}
    written = json.dumps(entries, sort_keys=True, default=str)
    return hashlib.sha256(f"{written} {weights}".encode()).hexdigest()


class WeightsHash:
    """SHA-256 over names, types, shapes and bytes of all parameters: the same weights, the same hash.

    The masks of pruned parameters (`torch.nn.utils.prune`), biases of logits (Marian's `final_logits_bias`) and the
    buffers of packed projections (scales) count too, since the model computes with them. All bytes are read each time,
    since a fused optimizer step or `parameter.data` changes weights without a trace; SHA-256 is computed anew only if
    their checksum, which is far quicker, has changed.
    """

    def __init__(self) -> None:
        self._known: tuple[str, str] | None = None

    def of(self, model: nn.Module) -> str:
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        counted = {f"{name.removesuffix('_orig')}_mask" for name in tensors if name.endswith("_orig")}
        tensors |= {
            name: value for name, value in model.named_buffers() if name in counted or name.endswith("logits_bias")
        }
        for path, projection in packed_projections(model):
            tensors |= dict(projection.named_buffers(path))
        tensors = {name: part for entry in tensors.items() for name, part in _parts_of(*entry)}
        checksum = _checksum(tensors)
        known = self._known
        if known is None or known[0] != checksum:
            known = self._known = checksum, tensors_hash(tensors)
        return known[1]


def _parts_of(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor with its name, or the tensors that a packed one consists of."""
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        for part in names:
            yield from _parts_of(f"{name}.{part}", getattr(value, part))
    else:
        yield name, value


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and the SHA-256 of the bytes of tensors."""
    names = sorted(tensors)
    values = [tensors[name] for name in names]
    # hashlib releases the interpreter lock while it reads a large tensor.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = list(pool.map(lambda value: hashlib.sha256(_bytes(value)).hexdigest(), values))
    lines = [
        f"{name} {value.dtype} {tuple(value.shape)} {digest}"
        for name, value, digest in zip(names, values, digests, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def batch_hash(batch: Batch) -> str:
    """SHA-256 over all inputs of the model in a batch."""
    tensors = {"ids": batch.ids, "mask": batch.mask, **batch.extra}
    tensors |= {f"{name} {text}": value for text, own in enumerate(batch.senses) for name, value in own.items()}
    if batch.target is not None:
        tensors |= {"target ids": batch.target.ids, "target mask": batch.target.mask}
    return tensors_hash(tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """XXH3 over names, types, shapes and bytes; it is not cryptographic, so it stays within this process.

    For tensors on another device, it covers the `_row_sums` of their bytes, for which the CPU waits once.
    """
    checksum = xxhash.xxh3_128()
    elsewhere: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
    for name, value in tensors.items():
        checksum.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        if value.device.type == "cpu":
            checksum.update(_bytes(value))
        else:
            words = _words(value.detach())
            elsewhere.setdefault(value.device, {}).setdefault(words.dtype, []).append(words)
    for by_type in elsewhere.values():
        checksum.update(_bytes(torch.cat([sums for values in by_type.values() for sums in _row_sums(values)])))
    return checksum.hexdigest()


def _words(value: Tensor) -> Int[Tensor, " word"]:
    """The bytes of a tensor as words, of four bytes if they divide it."""
    flat, size = value.contiguous().reshape(-1), value.element_size()
    whole = flat.nbytes % 4 == 0 and flat.storage_offset() * size % 4 == 0
    return flat.view(torch.int32 if whole else _SMALL_WORDS[size])


def _row_sums(values: Sequence[Int[Tensor, " _"]]) -> Iterator[Int[Tensor, " _"]]:
    """Multiplies each word of some tensors on one device by a random number, and sums rows of `_ROW` words modulo 2⁶⁴.

    In a row, a change of words of up to 32 bits goes unnoticed with a probability of 2⁻³³ at most: the changes, each
    below 2³², times the random numbers would have to sum to 0 (multilinear hashing; Lemire & Kaser 2014).
    """
    random = torch.randint(-(2**62), 2**62, (_ROW,), generator=torch.Generator().manual_seed(0)).to(values[0].device)
    for pieces in _packed([part for value in values for part in torch.split(value, _AT_ONCE)]):
        lack = -sum(map(len, pieces)) % _ROW
        padded = [*pieces, pieces[0].new_zeros(lack)] if lack else pieces
        words = padded[0] if len(padded) == 1 else torch.cat(padded)
        yield (words.view(-1, _ROW) * random).sum(dim=-1)


def _packed(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups consecutive parts, up to `_AT_ONCE` words in a group."""
    pack: list[Tensor] = []
    for part in parts:
        if pack and sum(map(len, pack)) + len(part) > _AT_ONCE:
            yield pack
            pack = []
        pack.append(part)
    if pack:
        yield pack


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
