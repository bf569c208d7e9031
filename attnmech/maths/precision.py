"""Bounds on the distance between two computations of the same quantity, by precision.

Rounding errors are measured against the terms of a sum, never against another entry of a tensor: a sum may be tiny by
cancellation, and a head may be tiny next to another. With ε = 2u the distance from 1 to the next number,

- a sum of up to three values is off by 2u Σ|t| at most (Higham 2002, §4.2): two computations lie 2ε Σ|t| apart;
- a dot product of n terms is off by n u Σ|t| at most, and since roundings are nearly independent by about
  √n u Σ|t| (Higham & Mary 2019): two computations lie (2 + √n) ε Σ|t| apart. Σ|t| ≤ ‖x‖ ‖w‖ for x·w. It is computed
  in float32 at least, whatever the model's precision;
- a value that passes through a few steps of a model (a bias, a rotation, a norm) is rounded to the model's precision in
  each: 4ε|x|. Numbers that are too small for ε, which in float16 begins at 6e-5, are rounded by a fixed step.
"""

import math

import torch
from torch import Tensor


def step_tolerance(dtype: torch.dtype) -> float:
    """Returns the largest relative residual of one step of a model, such as Σ terms = score.

    >>> step_tolerance(torch.float32)
    1e-05
    """
    return {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]


def pass_tolerance(dtype: torch.dtype) -> float:
    """Returns the largest relative residual between two implementations of a model, over a whole forward pass.

    In float64, transformers still computes some softmaxes and its rotary tables in float32. Later layers amplify that
    rounding, so logits agree less closely.
    """
    return {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 2e-1, torch.float16: 2e-2}[dtype]


def table_tolerance(dtype: torch.dtype) -> float:
    """Returns the largest relative residual of a position table compared with its closed form.

    Tables are computed in float32 at best, whatever the model's precision.
    """
    return {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(dtype, 1e-5)


def sum_rounding(dtype: torch.dtype) -> float:
    """Returns 2ε, the share of Σ|t| by which two computations of a sum of up to three values may differ.

    >>> sum_rounding(torch.float64) == 2 * torch.finfo(torch.float64).eps
    True
    """
    return 2 * torch.finfo(dtype).eps


def steps_rounding(dtype: torch.dtype) -> float:
    """Returns 4ε, the share by which a few roundings to a model's precision may change a value."""
    return 4 * torch.finfo(dtype).eps


def score_rounding(dtype: torch.dtype) -> float:
    """Returns the share by which scores of two implementations may differ: eager attention rounds queries, keys and
    scores to a model's precision and, even in a float64 model, scores to float32 for the softmax.
    """
    return max(steps_rounding(dtype), torch.finfo(torch.float32).eps)


def computed_in(value: Tensor) -> torch.dtype:
    """Returns float32 for a float64 tensor whose values are float32 up to a few roundings of its rows; otherwise its
    type.

    >>> computed_in(torch.tensor([0.1]).double()), computed_in(torch.tensor([0.1], dtype=torch.float64))
    (torch.float32, torch.float64)
    """
    if value.dtype != torch.float64:
        return value.dtype
    least = steps_rounding(value.dtype) * value.abs().amax(dim=-1, keepdim=True)
    single = ((value.float().double() - value).abs() <= least) | value.isnan()
    return torch.float32 if bool(single.all()) else value.dtype


def least_rounding(dtype: torch.dtype) -> float:
    """Returns four steps between the smallest numbers of a precision, to which ε does not apply.

    >>> least_rounding(torch.float16) == 4 * 2**-24
    True
    """
    limits = torch.finfo(dtype)
    return 4 * limits.smallest_normal * limits.eps


def product_rounding(dtype: torch.dtype, terms: int) -> float:
    """Returns (2 + √n) ε, the share of Σ|t| by which two dot products of n terms may differ, in float32 at least.

    >>> product_rounding(torch.bfloat16, 64) == 10 * torch.finfo(torch.float32).eps
    True
    """
    return (2 + math.sqrt(terms)) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
