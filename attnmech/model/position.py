"""Closed forms of what a model knows of position, to check the model's own tables against, and rotation.

The score ledger uses the model's own tensors (its ALiBi tensor, its rotary tables); the formulas here say
what those ought to be, and how a rotary table is applied.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor


def alibi_slopes(heads: int) -> Float[Tensor, "head"]:
    """Slopes of ALiBi (Press et al. 2022), head 0 the steepest where the number of heads is a power of two.

    slope_h = 2^(−8(h+1)/H) for H a power of two. Otherwise the first n = 2^⌊log2 H⌋ heads take the slopes of
    n heads, and the rest every second slope of 2n heads, starting with the first. In float32, as models have
    them.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2.0 ** (-8 * (2 * extra + 1) / (2 * whole)) for extra in range(heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32)


def rotary_tables(
    parameters: Mapping[str, Any], d_head: int, positions: Int[Tensor, "position"]
) -> tuple[Float[Tensor, "position half"], Float[Tensor, "position half"]] | None:
    """Cosine and sine of position · θ^(−2i/d), i < d/2 (Su et al. 2021), in float64.

    Returns None where the model scales its frequencies by another rule (`rope_type` other than "default"),
    for which no closed form stands here.
    """
    if parameters.get("rope_type", "default") != "default" or "rope_theta" not in parameters:
        return None
    exponent = torch.arange(0, d_head, 2, dtype=torch.float64) / d_head
    angle = positions.double()[:, None] * float(parameters["rope_theta"]) ** -exponent
    return angle.cos(), angle.sin()


def rotate_halves(
    x: Float[Tensor, "*axes d_head"],
    cos: Float[Tensor, "*#axes d_head"],
    sin: Float[Tensor, "*#axes d_head"],
) -> Float[Tensor, "*axes d_head"]:
    """Rotary position embedding in Llama's layout: dimension i turns with dimension i + d/2.

    (x_i, x_{i+d/2}) ↦ (x_i cos − x_{i+d/2} sin, x_{i+d/2} cos + x_i sin), with the model's own tables, which
    hold every angle twice.
    """
    first, second = rearrange(x, "... (two half) -> two ... half", two=2)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
