"""Keeps sums per text in bounded memory: beyond 256 distinct texts, sums are added up in groups.

A text's group is the hash of its tokens (`Batch.digests`) modulo a power of two: the largest power with at most 256
groups. Up to 256 distinct texts, every one is a separate group. Copies, the texts with the same tokens, share their
group, since they are no further evidence. The groups depend only on the set of texts, not on their order or shards.
Groups of texts are as independent as texts, so intervals over groups keep their coverage.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

GROUPS: Final = 256  # the largest number of groups

_NO_MODULUS: Final = 2**62  # the modulus as long as every distinct text is a separate group

FIRST: Final = "first_text"  # the entry of a state with each text's number; a group has the smallest of its texts

State = dict[str, Tensor]


def text_digest(ids: Sequence[int]) -> Int[Tensor, " 1"]:
    """`Batch.digests` of a text of these tokens alone."""
    content = hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()[:8]
    return torch.tensor([int.from_bytes(content, signed=True)])


def by_group(state: State, digests: Int[Tensor, " text"], summed: Sequence[str], most: int | None = None) -> State:
    """Adds up sums by text (the last axis of the entries `summed`) to sums by group, and adds the groups to the state.

    `most` is the maximum number of groups, if sums are so large that fewer than `GROUPS` groups fit.
    """
    return _folded({**state, "groups": digests, "modulus": torch.tensor([_NO_MODULUS])}, summed, most)


def joined(one: State, other: State, summed: Sequence[str], most: int | None = None) -> State:
    """The sums by group of two states, over any texts."""
    modulus = torch.minimum(one["modulus"], other["modulus"])
    both = torch.cat((one["groups"], other["groups"])) % modulus
    while len(_distinct(both % modulus)) > (GROUPS if most is None else most):
        modulus = modulus // 2
    groups = _distinct(both % modulus)
    places = torch.split(torch.searchsorted(groups, both % modulus), [len(one["groups"]), len(other["groups"])])
    sums = {}
    for name in summed:
        whole = one[name].new_zeros(*one[name].shape[:-1], len(groups))
        for part, place in zip((one, other), places, strict=True):
            if torch.equal(place, torch.arange(len(groups))):
                whole += part[name]
            else:
                whole.index_add_(-1, place, part[name])
        sums[name] = whole
    if FIRST in one:
        least = groups.new_full(groups.shape, torch.iinfo(groups.dtype).max)
        for part, place in zip((one, other), places, strict=True):
            least.scatter_reduce_(0, place, part[FIRST], "amin")
        sums[FIRST] = least
    return {**sums, "groups": groups, "modulus": modulus}


def distinct_texts(state: Mapping[str, Tensor], texts: int) -> int:
    """The number of texts if copies count once, as far as it is known: beyond 256 distinct texts, all count."""
    return len(state["groups"]) if int(state["modulus"]) == _NO_MODULUS else texts


def _folded(state: State, summed: Sequence[str], most: int | None) -> State:
    nothing = {name: state[name][..., :0] for name in (*summed, *({FIRST} & state.keys()))}
    empty = {**nothing, "groups": state["groups"][:0], "modulus": state["modulus"]}
    return {**state, **joined(empty, state, summed, most)}


def _distinct(numbers: Int[Tensor, " text"]) -> Int[Tensor, " group"]:
    return torch.from_numpy(np.unique(numbers.numpy()))
