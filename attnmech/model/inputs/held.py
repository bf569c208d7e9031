"""Finds which entries of a model's pictures and sounds change which token, and proves it.

On a copy, every position of the towers sees only itself, so a token changes only with its own pixels, and its gradient
is zero at all others. Many tokens share a backward pass: each token has a code of n bits, half of them 1, and pass b
takes the gradient of all tokens whose bit b is 1. A pixel of one token shows that token's code; a pixel of several
tokens shows more than n / 2 bits. Then the pixels of half the tokens are replaced, and those of the others: exactly
these tokens must change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, pairwise
from typing import Any, Final, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..structure.copies import copy_of, use_attention
from ..structure.text_part import merged_into, sense_of, towers_of
from .merged import Merged

LOCAL: Final = "attnmech_local"  # transformers' name for the attention in which every position sees only itself

_APART: Final = 8  # every eighth token of a sound shares a backward pass, since neighbours share frames

_LARGE: Final = 2**20  # backward passes on more numbers (a picture of 600 x 600) keep only the input of each layer


@dataclass(frozen=True)
class Part:
    """What one token holds of an input: a rectangle of pixels, flattened patches, or frames of a recording."""

    name: str
    entries: tuple[int, ...]
    """The indices of pictures or tiles `[channel height width]`, of flattened patches, or of a recording."""
    rows: tuple[int, int]
    columns: tuple[int, int]  # the first and the one after the last; in a recording, of the frames
    time: int | None = None  # the axis of a recording that is time; None for a picture

    def view(self, value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "entry channel height width"]:
        """A tensor of the input's shape, arranged so that `where` is this part's index."""
        if self.time is None:
            return by_entry(value)
        frames = value.movedim(self.time, -1)
        return (frames[:, None] if frames.ndim == 2 else frames.flatten(1, -2))[:, :, None]

    @property
    def where(self) -> tuple[Any, ...]:
        """The index in `view`."""
        return list(self.entries), slice(None), slice(*self.rows), slice(*self.columns)


def by_entry(value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "entry channel height width"]:
    """A view of pictures, tiles `[picture tile channel height width]`, or flattened patches `[patch values]`."""
    return value.flatten(0, -2)[:, :, None, None] if value.ndim < 4 else value.flatten(0, -4)


def shown_tiles(value: Shaped[Tensor, "picture tile channel height width"]) -> Bool[Tensor, "picture tile"]:
    """True at the tiles that are not all zeros."""
    return (value != 0).flatten(2).any(dim=-1)


@dataclass(frozen=True)
class Held:
    """What some tokens of a text hold."""

    parts: tuple[Part | None, ...]  # None for a token that holds no rectangle, or shares its part of a picture
    replaced: tuple[bool, ...]  # False for a token that the model embeds as text, such as the marks around a picture


def held_by(
    model: PreTrainedModel, blocks: str, text: Merged, positions: Int[Tensor, " token"], senses: Sequence[str]
) -> Held:
    """What the tokens at some positions of a text hold. `blocks` is the path of the text part's blocks, and `senses`
    says what each token stands for ("an image").

    It takes 3 passes forward through the towers, and about log₂ T + 3 backward for T tokens; 8 more for sounds.
    """
    with torch.inference_mode(False), torch.enable_grad():
        merging = _Merging(model, blocks, text, positions)
        noise = merging.noise(0)
        merged = merging(noise)
        replaced = (merged != merging.embedded()).any(dim=-1).tolist()
        sounds = [token for token, sense in enumerate(senses) if sense == "a sound" and replaced[token]]
        parts = _parts(merged, noise, sounds)
        merged = merged.detach()  # frees what the backward passes needed
        return Held(_verified(parts, merging, noise, merged), tuple(replaced))


class _Reached(Exception):
    """The merged sequence has reached the text part, where the pass ends."""


class _Merging:
    """Computes the merged sequence at some positions of a text from pixels, with towers that mix no positions."""

    def __init__(self, model: PreTrainedModel, blocks: str, text: Merged, positions: Int[Tensor, " token"]) -> None:
        self._model = use_attention(copy_of(model, _frozen), LOCAL)
        inner = merged_into(self._model.base_model, blocks)
        if inner is None:
            raise RuntimeError("no module of this model takes the merged sequence alone")
        inner.register_forward_pre_hook(_stop, with_kwargs=True)
        self._embedding = cast(Any, self._model.get_input_embeddings())
        device = self._embedding.weight.device
        by_token = {**text.by_token, "input_ids": text.ids, "attention_mask": torch.ones_like(text.ids)}
        inputs = {**{name: value[None] for name, value in by_token.items()}, **text.senses}
        # Tensors that were made in inference mode take part in no backward pass; copies do.
        self._inputs = {name: value.to(device, copy=True) for name, value in inputs.items()}
        self._positions = positions.to(device, copy=True)
        if sum(value.numel() for value in self._inputs.values() if value.is_floating_point()) > _LARGE:
            # A backward pass computes each layer of the towers again, instead of keeping what it needs of the layer.
            base = self._model.base_model
            parts = [part for tower in towers_of(base, [blocks]) for part in base.get_submodule(tower).modules()]
            for layer in {layer for part in parts if isinstance(part, nn.ModuleList) for layer in part}:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def __call__(self, pixels: Mapping[str, Tensor]) -> Float[Tensor, "token d_model"]:
        try:
            self._model(**{**self._inputs, **pixels})
        except _Reached as reached:
            merged: Tensor = reached.args[0][0, self._positions]
            return merged
        raise RuntimeError("the text part was never called")

    def embedded(self) -> Float[Tensor, "token d_model"]:
        ids = self._inputs["input_ids"][0, self._positions].clamp(max=len(self._embedding.weight) - 1)
        embedded: Tensor = self._embedding(ids)
        return embedded

    def noise(self, seed: int) -> dict[str, Tensor]:
        """Noise in the shapes of the text's pictures and sounds."""
        noise = {}
        for number, (name, value) in enumerate(self._inputs.items()):
            if not value.is_floating_point() or value.ndim < 2:
                continue
            noise[name] = _random(value, 2 * number + seed)
            if value.ndim == 5:  # tiles of zeros are padding, which Idefics 3 leaves out
                noise[name] *= shown_tiles(value)[..., None, None, None]
            noise[name].requires_grad_()
        return noise


def _stop(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    raise _Reached(kwargs["inputs_embeds"])


def _frozen(weight: nn.Parameter) -> nn.Parameter:
    """The same memory, without gradients. Quantised weights have types of their own, and stay."""
    return nn.Parameter(weight.detach(), requires_grad=False) if type(weight) is nn.Parameter else weight


def _random(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def _parts(
    merged: Float[Tensor, "token d_model"], pixels: Mapping[str, Tensor], sounds: Sequence[int]
) -> list[Part | None]:
    """What each token holds, by its gradients; `sounds` are the tokens that stand for sounds."""
    count = len(merged)
    width = next(width for width in range(2, count + 2) if math.comb(width, width // 2) >= count)
    ones = islice(combinations(range(width), width // 2), count)
    codes = torch.tensor([sum(1 << bit for bit in bits) for bits in ones])
    direction = _random(merged, 2)
    heard = {name for name in pixels if sense_of(name) == "a sound"}

    def changing(tokens: Bool[Tensor, " token"]) -> dict[str, Tensor]:
        """For each input, where it changes any of these tokens; of pictures `[entry height width]`."""
        towards = direction * tokens[:, None].to(direction)
        gradients = torch.autograd.grad(merged, list(pixels.values()), towards, retain_graph=True, allow_unused=True)
        shown = {name: gradient != 0 for name, gradient in zip(pixels, gradients, strict=True) if gradient is not None}
        return {name: (one if name in heard else by_entry(one).any(dim=1)).cpu() for name, one in shown.items()}

    coded = [changing((codes >> bit & 1).bool()) for bit in range(width)]
    classes = [torch.tensor(sounds[first::_APART]) for first in range(min(_APART, len(sounds)))] if heard else []
    apart = [changing(torch.isin(torch.arange(count), tokens)) for tokens in classes]
    candidates: list[list[Part | None]] = [[] for _ in range(count)]
    for name in coded[0]:
        bits = [changes[name] for changes in coded]
        if name in heard:
            parts = _intervals(name, bits, codes, [changes[name] for changes in apart], sounds)
        else:
            parts = _rectangles(name, bits, codes)
        for token, part in parts.items():
            candidates[token].append(part)
    return [of_inputs[0] if len(of_inputs) == 1 else None for of_inputs in candidates]


def _code(bits: Sequence[Bool[Tensor, "*axes"]]) -> Int[Tensor, "*axes"]:
    """The numbers whose bits these are, from the lowest."""
    return torch.stack([one.long() << bit for bit, one in enumerate(bits)]).sum(dim=0)


def _rectangles(
    name: str, bits: Sequence[Bool[Tensor, "entry height width"]], codes: Int[Tensor, " token"]
) -> dict[int, Part | None]:
    """The tokens that change with pixels of an input, each with its rectangle; None if it has none of its own."""
    shown = _code(bits)
    values, group, counts = np.unique(shown, return_inverse=True, return_counts=True)
    known = {code: token for token, code in enumerate(codes.tolist())}
    # A pixel of several tokens is of all tokens whose code its own contains, at most.
    shared = [codes & int(value) == codes for value in values if value and int(value) not in known]
    parts: dict[int, Part | None] = {}
    for value, pixels in zip(values, np.split(group.ravel().argsort(kind="stable"), counts.cumsum()[:-1]), strict=True):
        token = known.get(int(value))
        if token is not None:
            entries, *lines = np.unravel_index(pixels, shown.shape)
            within = tuple(np.unique(entries).tolist())
            rows, columns = ((int(line.min()), int(line.max()) + 1) for line in lines)
            full = len(within) * (rows[1] - rows[0]) * (columns[1] - columns[0]) == len(pixels)
            parts[token] = Part(name, within, rows, columns) if full else None
    unsure = torch.stack(shared).any(dim=0).nonzero().flatten().tolist() if shared else []
    return {**parts, **dict.fromkeys(unsure)}


def _intervals(
    name: str,
    bits: Sequence[Bool[Tensor, "recording ..."]],
    codes: Int[Tensor, " token"],
    apart: Sequence[Bool[Tensor, "recording ..."]],
    tokens: Sequence[int],
) -> dict[int, Part | None]:
    """The frames of each token, if they begin and end later than those before; codes in `apart` prove their order."""
    if not apart:
        return {}
    # Along an axis that is not time, tokens hold everything.
    shares = [float(_along(apart[0], axis).float().mean()) for axis in range(1, apart[0].ndim)]
    time = 1 + shares.index(min(shares))
    if len(shares) > 1 and min(shares) == 1:
        return {}
    frames = [(0, 0, 0)] * len(tokens)
    for first, changes in enumerate(apart):
        edges = nn.functional.pad(_along(changes, time).int(), (1, 1)).diff(dim=1)
        begins, ends = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
        if len(begins) != len(frames[first::_APART]):
            return {}
        frames[first::_APART] = [(*begin, end) for begin, (_, end) in zip(begins, ends, strict=True)]
    expected = torch.zeros_like(_along(apart[0], time), dtype=torch.long)
    for token, (recording, begin, end) in zip(tokens, frames, strict=True):
        expected[recording, begin:end] |= codes[token]
    later = all(one < two and (one[0] < two[0] or one[2] < two[2]) for one, two in pairwise(frames))
    if not later or not torch.equal(expected, _code([_along(changes, time) for changes in bits])):
        return {}
    return {
        token: Part(name, (recording,), (0, 1), (begin, end), time)
        for token, (recording, begin, end) in zip(tokens, frames, strict=True)
    }


def _along(changes: Bool[Tensor, "recording ..."], time: int) -> Bool[Tensor, "recording frame"]:
    others = [axis for axis in range(1, changes.ndim) if axis != time]
    return changes.any(dim=others) if others else changes


def _verified(
    parts: Sequence[Part | None], merging: _Merging, noise: Mapping[str, Tensor], merged: Float[Tensor, "token d_model"]
) -> tuple[Part | None, ...]:
    """The parts, if their tokens change with just these pixels; None for all if one does not."""
    other = merging.noise(1)
    chance = torch.rand(len(parts), generator=torch.Generator().manual_seed(0)) < 0.5
    half = [bool(chance[token // 2]) != bool(token % 2) for token in range(len(parts))]  # one of each two neighbours
    for changing in (True, False):
        masks = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in noise.items()}
        for part, side in zip(parts, half, strict=True):
            if part is not None and side == changing:
                part.view(masks[part.name])[part.where] = True
        pixels = {name: torch.where(masks[name].to(value.device), other[name], value) for name, value in noise.items()}
        for part, moves in zip(parts, (merging(pixels) != merged).any(dim=-1).tolist(), strict=True):
            if part is not None and bool(part.view(masks[part.name])[part.where].any()) != moves:
                return (None,) * len(parts)
    return tuple(parts)


def _local_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Float[Tensor, "batch position head d_value"], None]:
    """Attention in which every position sees only itself; queries without pixels (a resampler's) see all keys."""
    seen = (value + key.mean(dim=-1, keepdim=True)).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if key.shape[2] != query.shape[2] or key.requires_grad != query.requires_grad:
        seen = seen.mean(dim=2, keepdim=True)
    return (seen + query.mean(dim=-1, keepdim=True)).transpose(1, 2).contiguous(), None


AttentionInterface.register(LOCAL, _local_attention)
AttentionMaskInterface.register(LOCAL, lambda *args, **options: None)
