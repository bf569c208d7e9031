"""Defines the input of a run: a batch of tokens, with the labels that results need."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from .errors import InputError


def every_bos(of_batches: Iterable[bool | None]) -> bool | None:
    """`Batch.bos` over several batches.

    >>> every_bos([True, True]), every_bos([True, False]), every_bos([None])
    (True, False, None)
    """
    values = set(of_batches)
    return None if None in values else values == {True}


@dataclass(frozen=True)
class Batch:
    """Sequences of token ids of equal length, with the labels that results need.

    For images, the positions are the class token and the patches, and the ids number the positions.
    """

    ids: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    """True at real tokens, False at padding."""
    tokens: tuple[tuple[str, ...], ...]
    """The label of each token, padding included: for readers; code takes the text from `pieces`. `你[1,2/3]` holds
    bytes 1 and 2 of the 3 bytes of 你; `\\xff` is a byte that belongs to no character."""
    bos: bool | None
    """Whether every sequence begins with the tokenizer's BOS or CLS token; None if it has neither."""
    target: "Batch | None" = None
    """The decoder's input in an encoder-decoder model."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs to the model, such as token types, or the pixel values of images."""
    senses: tuple[Mapping[str, Tensor], ...] = ()
    """For each text, the pictures and sounds among its tokens, as the model takes them for this text alone
    (`pixel_values`, `image_grid_thw`); empty if no text has any."""
    pictures: tuple[Any, ...] = ()
    """For each text, the user's pictures and how they became inputs; None for a text without."""
    held: tuple[tuple[Any, ...], ...] = ()
    """For each text and token, the place in a picture or sound that it holds (row, column, box, seconds), or None."""
    prompt_lengths: tuple[int, ...] = ()
    """For each text that the model continued, the number of tokens before its answer; empty for other texts."""
    answers: Shaped[Tensor, "*shape"] | None = None
    """For each text, the token that should follow it, if a metric has answers; `against` holds the tokens to compare it
    with. For the user's own module, the right answer to each input, in any shape."""
    against: Int[Tensor, " batch"] | None = None
    further: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each stack, labels of the keys after the tokens that are not themselves tokens (`nn.MultiheadAttention`)."""
    special: frozenset[int] = frozenset()
    """The ids of the tokenizer's special tokens."""
    kind_of: Mapping[int, str] = field(default_factory=dict)
    """The ids of tokens that stand for pictures or sounds, each with its kind ("image", "video", "sound")."""
    texts_of: Callable[[Sequence[int]], tuple[str, ...]] | None = None
    """Maps token ids to their labels; None if positions are not tokens, as in images."""
    pieces: tuple[tuple[str | bytes, ...], ...] | None = None
    """What each token holds of the text (`attnmech.model.parts.pieces`); None if `tokens` says it."""

    def on(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        if self.ids.device == device:
            return self
        return replace(
            self,
            ids=self.ids.to(device),
            mask=self.mask.to(device),
            target=None if self.target is None else self.target.on(device),
            extra={name: value.to(device) for name, value in self.extra.items()},
            senses=tuple({name: value.to(device) for name, value in own.items()} for own in self.senses),
        )

    @property
    def differentiable(self) -> "Batch":
        """The batch with copies of those tensors that were made in inference mode, through which no gradient passes."""
        names = ("ids", "mask", "answers", "against")
        own = {name: value for name in names if isinstance(value := getattr(self, name), Tensor)}
        copies: dict[str, Any] = {name: value.clone() for name, value in own.items() if value.is_inference()}

        def copied(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.clone() if value.is_inference() else value for name, value in inputs.items()}

        target = None if self.target is None else self.target.differentiable
        senses = tuple(map(copied, self.senses))
        return replace(self, **copies, extra=copied(self.extra), senses=senses, target=target)

    def queries(self, stack: str = "") -> "Batch":
        """The batch whose tokens are the queries of one of the model's stacks."""
        return self.target if stack in ("decoder", "cross") and self.target is not None else self

    def keys(self, stack: str = "") -> "Batch":
        """The batch whose tokens are the keys of one of the model's stacks."""
        tokens, labels = self.key_tokens(stack), self.further.get(stack, ())
        return tokens._followed_by(labels) if labels else tokens

    def key_tokens(self, stack: str = "") -> "Batch":
        """As `keys`, without the keys that are not tokens."""
        return self.target if stack == "decoder" and self.target is not None else self

    def _followed_by(self, labels: Sequence[str]) -> "Batch":
        """The batch with further keys after its tokens; they are not tokens and count as special."""
        texts, length = self.ids.shape
        ids = torch.arange(length, length + len(labels), device=self.ids.device) + int(self.ids.max())
        return replace(
            self,
            ids=torch.cat((self.ids, ids.expand(texts, -1)), dim=1),
            mask=torch.cat((self.mask, self.mask.new_ones(texts, len(labels))), dim=1),
            tokens=tuple((*row, *labels) for row in self.tokens),
            pieces=self.pieces and tuple((*row, *("" for _ in labels)) for row in self.pieces),
            special=self.special | frozenset(ids.tolist()),
            further={},
        )

    def beginning(self, length: int) -> "Batch":
        """The first `length` tokens of every text; the decoder's input stays whole."""
        return self.part(0, length)

    def part(self, start: int, length: int) -> "Batch":
        """`length` tokens of every text from `start` on, preceded by the first token if the tokenizer added it."""
        self.require_text_alone("cut")
        first = 1 if self.bos and start > 0 else 0
        start = max(start, first)
        positions = [*range(first), *range(start, min(start + length - first, self.ids.shape[1]))]
        pieces = self.pieces and tuple(tuple(row[position] for position in positions) for row in self.pieces)
        return replace(
            self,
            ids=self.ids[:, positions],
            mask=self.mask[:, positions],
            tokens=tuple(tuple(row[position] for position in positions) for row in self.tokens),
            pieces=pieces,
            extra={name: value[:, positions] for name, value in self.extra.items()},
            prompt_lengths=tuple(sum(at < length for at in positions) for length in self.prompt_lengths),
        )

    def later(self, past: int) -> "Batch":
        """The tokens after the first `past` columns, or those of the decoder's text; other inputs stay whole."""
        if not past:
            return self
        if self.target is not None:
            return replace(self, target=self.target.later(past))
        tokens = tuple(row[past:] for row in self.tokens)
        return replace(self, ids=self.ids[:, past:], mask=self.mask[:, past:], tokens=tokens)

    def texts(self, chosen: Int[Tensor, " text"]) -> "Batch":
        """The batch of the texts with these indices, which may repeat."""
        chosen = chosen.to(self.ids.device)
        # All texts share an extra input with a single row.
        extra = {name: value[chosen] if len(value) == len(self.ids) else value for name, value in self.extra.items()}
        of_texts: dict[str, Any] = {
            name: tuple(getattr(self, name)[row] for row in chosen.tolist())
            for name in ("senses", "pictures", "held", "prompt_lengths")
            if getattr(self, name)
        }
        return replace(
            self,
            ids=self.ids[chosen],
            mask=self.mask[chosen],
            tokens=tuple(self.tokens[row] for row in chosen.tolist()),
            pieces=self.pieces and tuple(self.pieces[row] for row in chosen.tolist()),
            target=None if self.target is None else self.target.texts(chosen),
            extra=extra,
            **of_texts,
        )

    def alone(self, text: int) -> "Batch":
        """The text with this index, without its padding."""
        one = self.texts(torch.tensor([text]))
        real = one.mask[0]
        if not bool(real.all()):
            length = len(real)
            one = replace(
                one,
                ids=one.ids[:, real],
                mask=one.mask[:, real],
                tokens=one.real_tokens,
                pieces=one.pieces and (tuple(compress(one.pieces[0], real.tolist())),),
                extra={
                    name: value[:, real] if value.shape[1:2] == (length,) else value
                    for name, value in one.extra.items()
                },
            )
        return one if one.target is None else replace(one, target=one.target.alone(0))

    @property
    def sensed(self) -> dict[str, Tensor]:
        """The pictures and sounds of all texts, joined along the first axis and padded with zeros along the others."""
        names = dict.fromkeys(name for own in self.senses for name in own)
        return {name: _stacked([own[name] for own in self.senses if name in own]) for name in names}

    def require_text_alone(self, what: str) -> None:
        """Raises `InputError` if the texts hold pictures or sounds; `what` names the call."""
        if self.senses:
            raise InputError(f"texts with {', '.join(self.sensed)} cannot be {what}; give the text alone.")

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """The number of real tokens in each sequence."""
        return self.mask.sum(dim=1)

    @property
    def real_tokens(self) -> tuple[tuple[str, ...], ...]:
        """The labels of the real tokens of each text."""
        return tuple(tuple(compress(row, real)) for row, real in zip(self.tokens, self.mask.tolist(), strict=True))

    @property
    def begins(self) -> Int[Tensor, " batch"]:
        """The position of the first real token of each text."""
        return self.mask.int().argmax(dim=1)

    @property
    def first(self) -> Bool[Tensor, "batch position"]:
        """True at the first real token of each text."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) == self.begins[:, None]

    @property
    def is_special(self) -> Bool[Tensor, "batch position"]:
        """True at special tokens of the tokenizer."""
        return self._among(self.special)

    @property
    def is_sensed(self) -> Bool[Tensor, "batch position"]:
        """True at tokens that stand for a picture or a sound."""
        return self._among(self.kind_of)

    @property
    def is_answer(self) -> Bool[Tensor, "batch position"]:
        """True at the tokens that the model wrote (`model.generate`), in an encoder-decoder those of the decoder.

        >>> focus.where(rows=text.is_answer)        # doctest: +SKIP
        """
        if self.target is not None:
            return self.target.is_answer
        if not self.prompt_lengths:
            return torch.zeros_like(self.mask)
        return self.mask & (self.places >= torch.tensor(self.prompt_lengths, device=self.ids.device)[:, None])

    @property
    def answer_ids(self) -> list[list[int]]:
        """The ids of the tokens that the model wrote, by text.

        >>> am.ablate_heads(model, text, metric="log_probability", answers=text.answer_ids)        # doctest: +SKIP
        """
        ids = (self.target or self).ids
        return [row[real].tolist() for row, real in zip(ids, self.is_answer, strict=True)]

    def kinds(self, text: int = 0) -> tuple[str, ...]:
        """What each token of a text is: "image", "video" or "sound" where it stands for one, else "special" or
        "text".
        """
        ids = self.ids[text][self.mask[text]].tolist()
        return tuple(self.kind_of.get(token, "special" if token in self.special else "text") for token in ids)

    @property
    def distinct(self) -> Int[Tensor, "batch position"]:
        """The ids, but a negative number of its own at each token that stands for part of a picture or sound."""
        own = -1 - torch.arange(self.ids.shape[1], device=self.ids.device)
        return torch.where(self.is_sensed, own, self.ids) if self.senses else self.ids

    @property
    def has_next(self) -> Bool[Tensor, "batch position"]:
        """True at the tokens that are followed by a token of the text."""
        following = (self.mask & ~self.is_sensed if self.senses else self.mask)[:, 1:]
        return self.mask & torch.cat((following, torch.zeros_like(self.mask[:, :1])), dim=1)

    def _among(self, tokens: Collection[int]) -> Bool[Tensor, "batch position"]:
        # Gemma's vocabulary marks 6,249 tokens as special; torch.tensor takes milliseconds for as many numbers.
        chosen = torch.from_numpy(np.fromiter(tokens, np.int64, len(tokens)))
        return torch.isin(self.ids, chosen.to(self.ids.device))

    @property
    def places(self) -> Int[Tensor, "batch position"]:
        """The index of each token among the real tokens of its text, from 0; the values at padding have no meaning."""
        return (self.mask.cumsum(dim=1) - 1).clamp_min(0)

    @property
    def columns(self) -> Int[Tensor, "batch position"]:
        """The columns of each text's tokens, in order, before those of its padding: where its position p lies."""
        return torch.argsort(~self.mask, dim=1, stable=True)

    def at(self, positions: Sequence[int]) -> Bool[Tensor, "batch position"]:
        """True at these positions of each text: 0 is its first real token and -1 its last, on whichever side it is
        padded.

        >>> logits[batch.at([-1])]  # those of each text's last token: [batch vocab]        # doctest: +SKIP

        Raises `InputError` if a text has no such position.
        """
        shortest = int(self.lengths.min())
        missing = [position for position in positions if not -shortest <= position < shortest]
        if missing:
            raise InputError(
                f"position {missing[0]} is not in every text: the shortest has {shortest} "
                f"token{'' if shortest == 1 else 's'}, {-shortest} to {shortest - 1}. Positions count a text's own "
                "tokens, padding excluded."
            )
        wanted = torch.tensor(list(positions), device=self.mask.device)
        ahead, back = self.places, self.places - self.lengths[:, None]
        return self.mask & (torch.isin(ahead, wanted) | torch.isin(back, wanted))

    @cached_property
    def digests(self) -> Int[Tensor, " batch"]:
        """For each text, the first 64 bits of the SHA-256 of its input without padding: the same for copies."""
        here = self.on(torch.device("cpu"))
        digests = []
        ids, mask = here.ids.numpy(), here.mask.numpy()
        for row, real in enumerate(here.mask):
            digest = hashlib.sha256(ids[row][mask[row]].tobytes())
            for name, value in sorted(here.extra.items()):
                # All texts share an input with a single row.
                own = value[row if len(value) == len(here.ids) else 0]
                if name == "position_ids" and bool((own[real].diff() == 1).all()):
                    continue  # as without them, where padding moves no position
                digest.update(name.encode() + bytes_of(own[real] if own.shape[:1] == real.shape else own))
            for name, value in sorted(here.senses[row].items()) if here.senses else ():
                digest.update(f"{name} {tuple(value.shape)}".encode() + bytes_of(value))
            if here.target is not None:
                digest.update(bytes_of(here.target.ids[row][here.target.mask[row]]))
            digests.append(int.from_bytes(digest.digest()[:8], signed=True))
        return torch.tensor(digests)

    @property
    def padded(self) -> bool:
        """Whether any position is padding."""
        return not bool(self.mask.all())


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Tensors joined along their first axis, each with zeros after its entries along the others."""
    largest = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    joined = values[0].new_zeros(sum(map(len, values)), *largest)
    end = 0
    for value in values:
        joined[(slice(end, end + len(value)), *(slice(size) for size in value.shape[1:]))] = value
        end += len(value)
    return joined


def bytes_of(value: Tensor) -> bytes:
    """The bytes of a tensor on the CPU."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
