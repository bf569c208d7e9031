"""How far two computations of the same quantity may lie apart, by precision."""

import torch


def step_tolerance(dtype: torch.dtype) -> float:
    """Largest relative residual of one step of a model, such as Σ terms = score.

    >>> step_tolerance(torch.float32)
    1e-05
    """
    return {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]


def pass_tolerance(dtype: torch.dtype) -> float:
    """Largest relative residual of a whole forward pass between two implementations of a model.

    In float64 transformers still takes some softmaxes and its rotary tables in float32, whose rounding the layers
    after them amplify; there its logits stop agreeing.
    """
    return {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}[dtype]


def table_tolerance(dtype: torch.dtype) -> float:
    """Largest relative residual of a position table against its closed form.

    Tables are made in float32 at best, whatever the model's precision.
    """
    return {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(dtype, 1e-5)
