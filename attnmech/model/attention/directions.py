"""The random vectors of the running certificate, and each layer's W_O and b_O multiplied by them."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..parts.weights import bias_of, matrix_of

_DIRECTIONS: Final = 2
_SEED: Final = 7
_TOGETHER: Final = 8
"""The number of sets of layers whose concatenated products are cached."""


@dataclass(frozen=True, eq=False)
class Written:
    """W_O and b_O of a layer, multiplied by the directions."""

    weight: Float[Tensor, "layer direction features"]
    bias: Float[Tensor, "layer direction 1"]
    size: Float[Tensor, "layer 1"]
    """‖W_O‖, the root of the sum of squares."""
    source: tuple[tuple[int, int], ...]
    """The address and version of each parameter that the products were computed from."""


_PRODUCTS: Final = ("weight", "bias", "size")


class Directions:
    """The random vectors of one model, and the weights multiplied by them."""

    def __init__(self, d_model: int, device: torch.device, *, packed: bool = False) -> None:
        self.d_model = d_model
        self.packed = packed
        """Whether the model's projections have packed weights."""
        generator = torch.Generator().manual_seed(_SEED)
        self._vectors = torch.randn(_DIRECTIONS, d_model, generator=generator, dtype=torch.float64)
        self._device = device
        self._by_dtype: dict[torch.dtype, Tensor] = {}
        self._written: dict[tuple[str, int], Written] = {}
        self._together: dict[tuple[Written, ...], Written] = {}
        self.changing: set[str] = set()
        """The kinds of tensors that this model changes in place; these are multiplied as soon as they are observed."""

    def of(self, dtype: torch.dtype) -> Float[Tensor, "direction d_model"]:
        """The random vectors, in a given precision."""
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self._vectors.to(dtype).to(self._device)
        return self._by_dtype[dtype]

    def written(self, key: tuple[str, int], out: nn.Module) -> Written:
        """W_O r and b_O · r of a layer for each vector r, cached until the parameters change."""
        source = tuple((part.data_ptr(), version_of(part)) for part in out.parameters(recurse=False))
        known = self._written.get(key)
        if known is None or known.source != source:
            known = self._written[key] = self._multiplied(out, source)
        return known

    def together(self, written: tuple[Written, ...]) -> Written:
        """The products of several layers, concatenated."""
        if len(written) == 1:
            return written[0]
        if written not in self._together:
            weight, bias, size = (torch.cat([getattr(layer, name) for layer in written]) for name in _PRODUCTS)
            if len(self._together) >= _TOGETHER:
                self._together.clear()
            self._together[written] = Written(weight, bias, size, ())
        return self._together[written]

    def forget_changed(self, key: tuple[str, int], out: nn.Module) -> bool:
        """Whether the weights changed although torch counts no change; if so, empties the cache."""
        known = self._written.get(key)
        fresh = self._multiplied(out, ())
        if known is None or (torch.equal(known.weight, fresh.weight) and torch.equal(known.bias, fresh.bias)):
            return False
        self._written.clear()
        return True

    def _multiplied(self, out: nn.Module, source: tuple[tuple[int, int], ...]) -> Written:
        matrix, bias = matrix_of(out).detach(), bias_of(out)
        wide = torch.promote_types(matrix.dtype, torch.float32)
        r, matrix = self.of(wide), matrix.to(wide)
        by_bias = r.new_zeros(len(r)) if bias is None else r @ bias.detach().to(wide)
        return Written(
            (r @ matrix.T)[None], by_bias[None, :, None], torch.linalg.vector_norm(matrix)[None, None], source
        )


def version_of(value: Tensor) -> int:
    """The number of times a tensor was changed in place; 0 if torch does not count them."""
    return 0 if value.is_inference() else value._version
