"""Defines the edits, one class each: its checks, its sentence, and what it does to a tensor.

Five kinds act at five steps of a layer:

| kind | what it changes |
|---|---|
| `PointEdit` | the value at a point: q, k, v, z, or the stream |
| `Scale` | a term of the scores |
| `KeyEdit` | the set of keys that the softmax sees |
| `PatternEdit` | the pattern |
| `ValueEdit` | the values of some keys, for single heads |

A new edit subclasses a kind; `EDITS` lists it automatically.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..basics.arguments import finite_number, option, shown, whole_number
from ..batch import Batch
from ..errors import InputError
from ..maths.softmax import left_for_sink
from ..results.codec import packed
from ..results.mean_qk import MeanQK
from .selection import CheckedKeys, Span, checked_keys, checked_span, keys_shown, span_shown
from .values import BatchPart, Block, Place, Values, checked_values

EDITS: Final[dict[str, type["Edit"]]] = {}  # all edits, by class name; files store these names

TERMS: Final = (
    "query_key", "key_bias", "query_bias", "constant", "position", "content_to_position", "position_to_content",
)  # fmt: skip
"""The terms of the scores that can be scaled."""


class Edit:
    """The change that an intervention makes, as an immutable value."""

    POINTS: ClassVar[tuple[str, ...]]
    """The points at which it may act."""
    BY_POSITION: ClassVar[bool] = True
    """Whether it can be limited to some rows."""

    point: str

    def __init_subclass__(cls) -> None:
        if "sentence" in vars(cls):
            EDITS[cls.__name__] = cls

    def __post_init__(self) -> None:
        """Checks every field, and converts it to the type in which edits are compared."""
        option("point", self.point, self.POINTS)
        for name, check in _CHECKS.items():
            if name in (field.name for field in dataclasses.fields(self)):  # type: ignore[arg-type]
                object.__setattr__(self, name, check(getattr(self, name)))

    def check(self, place: Place) -> None:
        """Raises `InputError` if it cannot act at this place."""
        if getattr(self, "keys", None) == "special" and place.no_special_keys:
            raise InputError(f"{place.no_special_keys}.")
        if isinstance(values := getattr(self, "values", None), Values):
            values.check(self.point, place, per_query_head=isinstance(self, ValueEdit))

    def sentence(self, heads: str) -> str:
        """The sentence that says what it does to `heads`."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """SHA-256 of its class and fields, tensors included."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        tensors = [field.digest for field in fields if isinstance(field, Values | MeanQK)]
        return hashlib.sha256(
            json.dumps([type(self).__name__, packed(self)[1], tensors], sort_keys=True).encode()
        ).hexdigest()


class PointEdit(Edit):
    """Changes the value at its point."""

    def new(self, value: Tensor, layer: int, part: BatchPart) -> Tensor:
        """The new value, `[batch position ...]`, in all heads and rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class Zero(PointEdit):
    """The value becomes 0."""

    POINTS = ("z", "attn_out", "mlp_out")

    point: str = "z"

    def sentence(self, heads: str) -> str:
        return f"{self.point} of {heads} becomes 0"

    def new(self, value: Tensor, layer: int, part: BatchPart) -> Tensor:
        return torch.zeros_like(value)


@dataclass(frozen=True)
class Replace(PointEdit):
    """Other values replace the value."""

    POINTS = ("z", "v", "q", "k", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")

    values: Values
    point: str = "z"

    def sentence(self, heads: str) -> str:
        return f"{self.point} of {heads} becomes {self.values}"

    def new(self, value: Tensor, layer: int, part: BatchPart) -> Tensor:
        return self.values.fitted(layer, value, part)


@dataclass(frozen=True)
class Add(PointEdit):
    """`factor` times another value is added to the value."""

    POINTS = Replace.POINTS

    values: Values
    point: str = "z"
    factor: float = 1.0

    def sentence(self, heads: str) -> str:
        times = "" if self.factor == 1 else f"{self.factor:g} × "
        return f"{times}{self.values} added to {self.point} of {heads}"

    def new(self, value: Tensor, layer: int, part: BatchPart) -> Tensor:
        return value + self.factor * self.values.fitted(layer, value, part)


@dataclass(frozen=True)
class Scale(Edit):
    """A term of the scores is multiplied by `factor`, before a soft cap and the softmax."""

    POINTS = ("scores",)
    BY_POSITION = False
    point = "scores"

    term: str
    factor: float = 0.0
    centre: MeanQK | None = None
    """The means at which queries and keys are split; None for the model's own terms."""

    def sentence(self, heads: str) -> str:
        effect = "dropped" if self.factor == 0 else f"multiplied by {self.factor:g}"
        split = "" if self.centre is None else f", split at {self.centre},"
        return f"{self.term} in the scores of {heads}{split} is {effect}"


class KeyEdit(Edit):
    """Hides keys: the softmax is taken without them, and a row left without keys attends to nothing."""

    POINTS = ("pattern",)
    point = "pattern"

    def hidden(self, block: Block) -> Bool[Tensor, "#batch #row key"]:
        """The keys that it hides from a block of rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class RemoveKeys(KeyEdit):
    """The keys are hidden from all rows."""

    keys: CheckedKeys

    def sentence(self, heads: str) -> str:
        return f"{keys_shown(self.keys)} removed from the pattern of {heads}"

    def hidden(self, block: Block) -> Bool[Tensor, "#batch #row key"]:
        return _selected(self.keys, block.keys, block.part)[:, None, : block.key_count]


@dataclass(frozen=True)
class Cut(KeyEdit):
    """The keys of one span are hidden from the rows of another."""

    BY_POSITION = False

    query_span: Span
    key_span: Span

    def sentence(self, heads: str) -> str:
        return f"attention of {span_shown(self.query_span)} to {span_shown(self.key_span)} cut in {heads}"

    def hidden(self, block: Block) -> Bool[Tensor, "#batch #row key"]:
        texts = block.part.texts
        rows, keys = block.queries.at(range(*self.query_span))[texts], block.keys.at(range(*self.key_span))[texts]
        return rows[:, block.rows, None] & keys[:, None, : block.key_count]


@dataclass(frozen=True)
class StreamOnly(KeyEdit):
    """Rows keep the first keys of their text and the last keys up to their own; those between are hidden."""

    BY_POSITION = False

    first: int
    last: int

    def check(self, place: Place) -> None:
        if place.stack == "cross":
            raise InputError(
                "the keys of cross-attention are another text's, so no row has last keys; choose another stack."
            )

    def sentence(self, heads: str) -> str:
        return f"keys between the first {self.first} and the last {self.last} removed from the pattern of {heads}"

    def hidden(self, block: Block) -> Bool[Tensor, "#batch #row key"]:
        texts = block.part.texts
        rows = block.queries.places[texts][:, block.rows, None]
        keys = block.keys.places[texts][:, None, : block.key_count]
        return (keys >= self.first) & (keys <= rows - self.last)


class PatternEdit(Edit):
    """Changes the pattern."""

    POINTS = ("pattern",)
    point = "pattern"
    ANY_KEY: ClassVar[bool] = False
    """Whether it may put weight on keys that no row of a block sees."""

    def new(self, pattern: Tensor, seen: Tensor, block: Block) -> Float[Tensor, "#batch #head #row key"]:
        """The new pattern of a block of rows, in all heads; `seen` is True at the keys that each row sees."""
        raise NotImplementedError

    def with_sink(
        self, pattern: Tensor, at_sink: Tensor | None, seen: Tensor, block: Block
    ) -> tuple[Float[Tensor, "#batch #head #row key"], Float[Tensor, "#batch #head #row"] | None]:
        """`new`, and the share that a sink takes of each row before and after; None without a sink."""
        new = self.new(pattern, seen, block)
        return new, None if at_sink is None else left_for_sink(new).expand_as(at_sink)


@dataclass(frozen=True)
class ReplacePattern(PatternEdit):
    """Other values replace the pattern."""

    ANY_KEY = True

    values: Values

    def sentence(self, heads: str) -> str:
        return f"pattern of {heads} becomes {self.values}"

    def new(self, pattern: Tensor, seen: Tensor, block: Block) -> Float[Tensor, "#batch #head #row key"]:
        return self.values.fitted(block.layer, pattern, block.part, positions=(2, 3), start=block.rows.start)


@dataclass(frozen=True)
class Attend(PatternEdit):
    """All attention goes to the visible keys in equal parts, to the token itself, or to the first token."""

    to: Literal["uniform", "self", "first"]

    def check(self, place: Place) -> None:
        if self.to == "self" and place.stack == "cross":
            raise InputError("in cross-attention, no key is the query token itself.")

    def sentence(self, heads: str) -> str:
        if self.to == "uniform":
            return f"pattern of {heads} becomes uniform"
        return f"attention of {heads} goes to the {'first token' if self.to == 'first' else 'token itself'}"

    def new(self, pattern: Tensor, seen: Tensor, block: Block) -> Float[Tensor, "#batch #head #row key"]:
        if self.to == "uniform":
            return seen / seen.sum(dim=-1, keepdim=True).clamp(min=1)
        place = torch.arange(pattern.shape[-1], device=pattern.device)
        if self.to == "self":
            target = torch.arange(block.rows.start, block.rows.stop, device=pattern.device)[:, None]
        else:
            target = block.keys.begins[block.part.texts, None, None, None]
        return (place == target).to(pattern).expand_as(pattern)


@dataclass(frozen=True)
class Reweight(PatternEdit):
    """The weights of some keys are multiplied by `factor`, and all weights of a row divided by their new sum."""

    keys: CheckedKeys
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 0:
            raise InputError(f"`factor` multiplies weights, so it must be 0 or more; got {self.factor:g}.")

    def sentence(self, heads: str) -> str:
        return f"attention of {heads} to {keys_shown(self.keys)} is multiplied by {self.factor:g}"

    def new(self, pattern: Tensor, seen: Tensor, block: Block) -> Float[Tensor, "#batch #head #row key"]:
        return self.with_sink(pattern, None, seen, block)[0]

    def with_sink(
        self, pattern: Tensor, at_sink: Tensor | None, seen: Tensor, block: Block
    ) -> tuple[Float[Tensor, "#batch #head #row key"], Float[Tensor, "#batch #head #row"] | None]:
        chosen = _selected(self.keys, block.keys, block.part)[:, None, None, : pattern.shape[-1]]
        weighted = torch.where(chosen, self.factor * pattern, pattern)
        # A sink is one more key. Its share is not 1 minus the others: beside a key with p near 1, that is rounding.
        total = weighted.sum(dim=-1) + (0 if at_sink is None else at_sink)
        total = torch.where(total > 0, total, 1.0)  # rows without keys stay 0
        return weighted / total[..., None], None if at_sink is None else at_sink / total


class ValueEdit(Edit):
    """Changes the values of some keys, for its heads only."""

    POINTS = ("v",)
    BY_POSITION = False
    point = "v"
    keys: CheckedKeys

    def selected(self, keys: Batch, part: BatchPart) -> Bool[Tensor, "batch key"]:
        """The keys whose values it changes."""
        return _selected(self.keys, keys, part)

    def new(self, v: Float[Tensor, "batch key head d_value"], layer: int, part: BatchPart) -> Tensor:
        """The new values, for all keys and heads."""
        raise NotImplementedError


@dataclass(frozen=True)
class ZeroValues(ValueEdit):
    """The values become 0."""

    keys: CheckedKeys

    def sentence(self, heads: str) -> str:
        return f"v at {keys_shown(self.keys)} of {heads} becomes 0"

    def new(self, v: Float[Tensor, "batch key head d_value"], layer: int, part: BatchPart) -> Tensor:
        return torch.zeros_like(v)


@dataclass(frozen=True)
class ReplaceValues(ValueEdit):
    """Other values replace the values of the keys."""

    keys: CheckedKeys
    values: Values

    def sentence(self, heads: str) -> str:
        return f"v at {keys_shown(self.keys)} of {heads} becomes {self.values}"

    def new(self, v: Float[Tensor, "batch key head d_value"], layer: int, part: BatchPart) -> Tensor:
        groups = v.shape[2] // self.values.by_layer[layer].shape[2]
        return self.values.fitted(layer, v[:, :, ::groups], part).repeat_interleave(groups, dim=2)


def _selected(keys: CheckedKeys, batch: Batch, part: BatchPart) -> Bool[Tensor, "batch key"]:
    if isinstance(keys, Values):
        mask = batch.mask[part.texts]
        texts, length = mask.shape
        chosen = part.of(keys.by_layer[0], texts).to(mask.device)
        if chosen.shape[1] < length:
            raise InputError(f"its mask is for {chosen.shape[1]} keys, but the text has {length}.")
        return chosen[:, :length].expand(texts, -1)
    if keys == "special":
        return (batch.is_special & batch.mask)[part.texts]
    return batch.at((0,) if keys == "first" else keys)[part.texts]


def _checked_centre(centre: Any) -> MeanQK | None:
    if centre is not None and not isinstance(centre, MeanQK):
        raise InputError(
            "`centre` must be fixed means, am.mean_qk(model, corpus); with means of the text itself, later tokens "
            f"would affect earlier ones. Got {shown(centre)}."
        )
    return centre


_CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {  # the function that checks each field, by the field's name
    "values": checked_values,
    "keys": checked_keys,
    "factor": lambda factor: finite_number("factor", factor),
    "term": lambda term: option("term", term, TERMS),
    "centre": _checked_centre,
    "to": lambda to: option("to", to, ("uniform", "self", "first")),
    "query_span": lambda span: checked_span("query_span", span),
    "key_span": lambda span: checked_span("key_span", span),
    "first": lambda first: whole_number("first", first, least=0),
    "last": lambda last: whole_number("last", last, least=1),
}
