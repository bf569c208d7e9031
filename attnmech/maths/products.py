"""Which routine multiplies activations by a weight? oneDNN's on AMD processors with 512-bit vectors, else torch's own.

torch's own, Intel's MKL, uses half of these vectors on AMD's processors and takes twice as long.
"""

from functools import cache
from pathlib import Path
from typing import Final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

_LEAST: Final = 2**16
"""With weights of fewer numbers, oneDNN's call takes as long as what it saves."""


def product(
    x: Float[Tensor, "*places d_in"], weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None = None
) -> Float[Tensor, "*places d_out"]:
    """x Wᵀ + b, rounded in float32 by either routine.

    >>> x, W = torch.randn(3, 400), torch.randn(300, 400)
    >>> torch.allclose(product(x, W), x @ W.T, atol=1e-4)
    True
    """
    if _suits(x, weight, bias):
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return found
    return linear(x, weight, bias)


def product_by_head(
    x: Float[Tensor, "*batch position d_in"], W: Float[Tensor, "head d_in d_head"]
) -> Float[Tensor, "*batch head position d_head"]:
    """x W of every head.

    >>> x, W = torch.randn(2, 3, 4), torch.randn(5, 4, 6)
    >>> torch.allclose(product_by_head(x, W)[1, 4], x[1] @ W[4], atol=1e-5)
    True
    """
    made = product(x, rearrange(W, "head d_in d_head -> (head d_head) d_in"))
    return rearrange(made, "... position (head d_head) -> ... head position d_head", head=len(W))


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN takes these: in float32 on the CPU, without gradients, many enough to be worth its call."""
    if weight.numel() < _LEAST or not x.numel() or not _faster() or torch.is_grad_enabled():
        return False
    exact = torch.backends.mkldnn.enabled and torch.get_float32_matmul_precision() == "highest"
    return bool(exact) and all(map(_plain, (x, weight) if bias is None else (x, weight, bias)))


def _plain(tensor: Tensor) -> bool:
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested
    return known and tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.layout == torch.strided


@cache
def _faster() -> bool:
    """Whether this is such a processor, and a torch with oneDNN."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    there = there and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return there and torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() == "AuthenticAMD"


def _vendor() -> str:
    """Who made the processor, in Linux's words; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
