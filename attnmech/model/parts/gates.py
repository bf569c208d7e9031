"""Defines gates: factors by which some models multiply the pattern-weighted sum of v before W_O."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...basics.public import public
from ...maths.norms import reciprocal_rms
from .weights import select


@public
@dataclass(frozen=True)
class Gate:
    """A gate that is a function of some columns of a projection of `attn_in`."""

    path: str
    """The path of the projection within the attention module."""
    columns: tuple[int, ...]
    """The columns of the projection's output, one for each entry of z, head by head."""
    function: str
    """The name of the function in torch.nn.functional."""

    def __str__(self) -> str:
        return f"{self.function} of columns of {self.path}"

    def of(self, output: Float[Tensor, "*places features"], heads: int) -> Float[Tensor, "*places head d_value"]:
        """Computes the gate from the projection's output."""
        chosen: Tensor = getattr(nn.functional, self.function)(select(output, self.columns))
        return rearrange(chosen, "... (head d_value) -> ... head d_value", head=heads)


@public
@dataclass(frozen=True)
class NormGate:
    """An RMSNorm of the pattern-weighted sum of v over all heads (BitNet), written as a factor of that sum.

    g = (weight + offset) / √(mean_d y² + ε), where y is the weighted sum of all heads, concatenated: each head's gate
    depends on every head.
    """

    path: str
    """The path of the norm within the attention module."""
    offset: float = 0.0
    """The number that the norm adds to its weight."""

    def __str__(self) -> str:
        return f"the norm {self.path}"

    def of(
        self, weight: Float[Tensor, " features"], epsilon: float, ungated: Float[Tensor, "*places head d_value"]
    ) -> Float[Tensor, "*places head d_value"]:
        """Computes the gate from the norm's weight and input, in float32 at least, as these norms do."""
        heads = ungated.shape[-2]
        y = rearrange(ungated, "... head d_value -> ... (head d_value)")
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        scale = (weight.to(y) + self.offset) * reciprocal_rms(y, epsilon)[..., None]
        return rearrange(scale, "... (head d_value) -> ... head d_value", head=heads)


@dataclass(frozen=True)
class HalfOfRow:
    """A gate that is 1 in the half of a head's values that a row reads and 0 in the other (`local_global.py`)."""

    def __str__(self) -> str:
        return "1 in the half (local or global) that a row uses, 0 in the other"
