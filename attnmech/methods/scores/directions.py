"""Splits the stream that one layer reads along directions, exactly whatever their quality.

x = Σ_f a_f d_f + b + rest, where rest is what the directions leave (docs/formulas.md#writers-of-a-score).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...basics.arguments import dense, shown
from ...errors import InputError
from ...maths.float64 import as_float64
from ...maths.norms import FrozenNorm
from ...model.parts.hashes import tensors_hash


@runtime_checkable
class Dictionary(Protocol):
    """A sparse autoencoder, as SAELens has it."""

    W_dec: Tensor  # the directions, `[feature d_model]`; a `b_dec` of `[d_model]` is added to them, if there is one

    def encode(self, x: Tensor) -> Tensor:
        """The activations `[… feature]` of a stream `[… d_model]`."""
        ...


Directions: TypeAlias = Mapping[str, Any] | Dictionary
_SHIFT: Final = "norm shift"
_RESERVED: Final = ("rest", "bias", "other features", _SHIFT)


@dataclass(frozen=True)
class StreamSplit:
    """Directions, and how strongly each is active in a stream."""

    vectors: Float[Tensor, "feature d_model"]
    bias: Float[Tensor, " d_model"] | None
    encode: Callable[[Tensor], Tensor]
    names: tuple[str, ...] | None  # the names of the directions; None for a dictionary, whose features have numbers
    description: str

    @classmethod
    def of(cls, directions: Directions, d_model: int) -> "StreamSplit":
        """Named vectors, in which the stream is projected, or a dictionary, which encodes it."""
        if isinstance(directions, Mapping):
            return _projection(directions, d_model)
        if isinstance(directions, Dictionary) and callable(directions.encode):
            return _encoding(directions, d_model)
        raise InputError(
            "`directions` must map names to vectors, or have `encode` and `W_dec` [feature d_model], as an SAE of "
            f"SAELens; got {shown(directions)}."
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the directions and the bias."""
        return tensors_hash({"vectors": self.vectors} | ({} if self.bias is None else {"bias": self.bias}))

    def parts_of(
        self,
        x: Float[Tensor, "batch position d_model"],
        norm: FrozenNorm | None,
        places: Bool[Tensor, "batch position"],
        room: Callable[[int], None],
    ) -> Iterator[tuple[str, Float[Tensor, "batch position d_model"]]]:
        """Each direction's label and its part of the norm's output; the parts add up to that output.

        Of a dictionary, the features active at one of the `places` are parts of their own, and all others are one part,
        which is 0 there. `room` raises `InputError` if this number of parts is too large.
        """
        vectors, active = self.vectors.to(x), self._activations(x)
        split = x.new_zeros(x.shape) if self.bias is None else self.bias.to(x).expand(x.shape)
        rest = x - active @ vectors - split
        others = self.names is None
        numbers = active[places].any(dim=0).nonzero()[:, 0].tolist() if others else range(len(vectors))
        room(len(numbers) + 2 + others + (self.bias is not None))
        through: Callable[[Tensor], Tensor] = (lambda part: part) if norm is None else norm
        for number in numbers:
            label = f"feature {number}" if self.names is None else self.names[number]
            yield label, through(active[..., number, None] * vectors[number])
        if others:
            active[..., numbers] = 0
            yield "other features", through(active @ vectors)
        if self.bias is not None:
            yield "bias", through(split)
        yield "rest", through(rest)
        if norm is not None and norm.shift is not None:
            yield _SHIFT, norm.shift.to(x).expand(x.shape)

    def _activations(self, x: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position feature"]:
        with torch.no_grad():
            active = self.encode(x)
        wanted = (*x.shape[:2], len(self.vectors))
        if not isinstance(active, Tensor) or active.shape != wanted:
            raise InputError(
                f"`directions.encode` must return an activation for each of the {wanted[-1]} rows of `W_dec`, "
                f"{list(wanted)}; got {shown(active)}."
            )
        if not bool(torch.isfinite(dense("what `directions.encode` returns", active)).all()):
            raise InputError("`directions.encode` must return finite activations; got NaN or infinity.")
        # A copy, since the encoder may keep its tensor.
        return active.detach().to(x, copy=True)


def _projection(directions: Mapping[str, Any], d_model: int) -> StreamSplit:
    """The orthogonal projection into the span of named vectors, by the activations of the smallest norm.

    A = X U⁺, with the unit vectors U and their pseudoinverse; directions may depend on each other.
    """
    if not directions:
        raise InputError("`directions` must hold at least one direction; got an empty mapping.")
    for name in directions:
        if not isinstance(name, str) or name in _RESERVED:
            raise InputError(
                f"names of `directions` must be strings other than {', '.join(_RESERVED)}; got {shown(name)}."
            )
    vectors = torch.stack([_vector(name, vector, d_model) for name, vector in directions.items()])
    unit = vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    # Vectors computed in float32 depend on each other only up to its rounding.
    tolerance = max(unit.shape) * torch.finfo(torch.float32).eps
    rank = int(torch.linalg.matrix_rank(unit, rtol=tolerance))
    inverse = torch.linalg.pinv(unit, rtol=tolerance)
    named = f"{len(unit)} direction{'s' * (len(unit) > 1)}"
    return StreamSplit(
        vectors=unit,
        bias=None,
        encode=lambda x: as_float64(x) @ inverse.to(as_float64(x)),
        names=tuple(directions),
        description=named if rank == len(unit) else f"{named} of rank {rank} (activations of the smallest norm)",
    )


def _encoding(dictionary: Dictionary, d_model: int) -> StreamSplit:
    vectors, bias = dictionary.W_dec, getattr(dictionary, "b_dec", None)
    if not isinstance(vectors, Tensor) or vectors.ndim != 2 or vectors.shape[1] != d_model or not len(vectors):
        raise InputError(f"`directions.W_dec` must be a tensor [feature, {d_model}]; got {shown(vectors)}.")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (d_model,)):
        raise InputError(f"`directions.b_dec` must be a tensor [{d_model}]; got {shown(bias)}.")
    for name, value in (("W_dec", vectors), ("b_dec", bias)):
        if value is not None:
            _finite(f"`directions.{name}`", value)
    return StreamSplit(
        vectors=vectors.detach(),
        bias=None if bias is None else bias.detach(),
        encode=lambda x: dictionary.encode(x.to(vectors)),
        names=None,
        description=f"a dictionary of {len(vectors)} features",
    )


def _vector(name: str, value: Any, d_model: int) -> Float[Tensor, " d_model"]:
    what = f"direction {name!r}"
    try:
        vector = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        raise InputError(f"{what} must be a vector of {d_model} numbers; got {shown(value)}.") from None
    if vector.shape != (d_model,):
        raise InputError(f"{what} must be a vector of {d_model} numbers, the width of the stream; got {shown(value)}.")
    vector = as_float64(_finite(what, vector).detach()).cpu()
    if not bool(vector.any()):
        raise InputError(f"{what} must not be zero.")
    return vector


def _finite(what: str, value: Tensor) -> Tensor:
    if dense(what, value).is_complex() or not bool(torch.isfinite(value).all()):
        raise InputError(f"{what} must hold finite real numbers; got NaN, infinity or complex numbers.")
    return value
