"""Projections whose weights are packed by a quantisation: their matrices, read from what they return.

Whatever the method (torchao, quanto, bitsandbytes, GPTQ, …), the matrix by which a projection multiplies is what it
returns for the unit vectors, without its bias. Matrices are computed on demand, one projection at a time, and not kept.
A projection that also rounds its inputs multiplies by no matrix: the certificate then refuses the points concerned.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...basics.messages import first_line
from ...errors import InputError, UnsupportedModelError

_LEAST_BYTES = 2  # floating-point numbers of fewer bytes are codes, to be multiplied by a scale


def is_packed(weight: Tensor) -> bool:
    """Whether a tensor holds codes of weights instead of the weights that a model computes with."""
    plain = type(weight) in (Tensor, nn.Parameter)
    return not plain or not weight.is_floating_point() or weight.element_size() < _LEAST_BYTES


def is_packed_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    sized = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    return sized and not (isinstance(weight, Tensor) and not is_packed(weight))


def packed_projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The projections of a model with packed weights, by their paths."""
    return ((path, part) for path, part in model.named_modules() if is_packed_projection(part))


def outline_of(module: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """A tensor of the shape of a packed projection's matrix, without memory."""
    return torch.zeros(()).expand(int(module.in_features), int(module.out_features))  # type: ignore[arg-type]


def unpacked(module: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """The matrix of a packed projection, in float32 at least, if its kernels accept float32."""
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    numbers = (tensor.dtype for tensor in held if tensor.is_floating_point() and tensor.element_size() >= _LEAST_BYTES)
    own = next(numbers, torch.float32)
    units = torch.eye(int(module.in_features), device=held[0].device if held else None)  # type: ignore[arg-type]
    alone, made = _without_bias(module), None
    try:
        with torch.no_grad():
            with suppress(Exception):  # whatever the kernels of a method raise
                made = type(module).forward(alone, units.to(torch.promote_types(own, units.dtype)))
            made = type(module).forward(alone, units.to(own)) if made is None else made
    except Exception as error:
        raise UnsupportedModelError(
            f"the packed weights of a {type(module).__name__} cannot be read from its outputs ({first_line(error)}); "
            "load the unquantised weights, or a GGUF file, which attnmech dequantises."
        ) from error
    if not isinstance(made, Tensor) or made.shape != (len(units), module.out_features):
        raise UnsupportedModelError(
            f"the packed weights of a {type(module).__name__} cannot be read from its outputs, which are not "
            f"{module.out_features} numbers for each input; load the unquantised weights, or a GGUF file."
        )
    return made


def _without_bias(module: nn.Module) -> nn.Module:
    """A copy that shares everything but the bias, which is 0."""
    bias = getattr(module, "bias", None)
    alone = copy.copy(module)
    if isinstance(bias, Tensor):
        alone._parameters = {name: value for name, value in module._parameters.items() if name != "bias"}
        alone._buffers = {name: value for name, value in module._buffers.items() if name != "bias"}
        alone.__dict__["bias"] = torch.zeros_like(bias)
    return alone


def quantised_as(model: nn.Module) -> str:
    """A suffix for the name of a quantised model: " (quantised by torchao)"; empty for any other."""
    if next(packed_projections(model), None) is None:
        return ""
    method = _method_of(getattr(model, "config", None))
    return f" (quantised by {method})" if method else " (quantised)"


def require_movable(model: nn.Module) -> None:
    """Raises `InputError` for a quantised model, whose packed weights have one precision and stay on their device."""
    if remark := quantised_as(model):
        raise InputError(
            f"{type(model).__name__}{remark} keeps its precision and its device; leave `device` and `dtype` out, or "
            "quantise it elsewhere: from_pretrained(..., device_map=..., dtype=...)."
        )


def require_unquantised(config: Any, name: str) -> None:
    """Raises `UnsupportedModelError`, naming the method, for a quantised model's config (GGUF is dequantised)."""
    method = _method_of(config)
    if method:
        raise UnsupportedModelError(
            f"{name} is quantised by {method}, which transformers unpacks with that method's package. Load it by "
            "transformers and give am.load the object, which is read as it computes; or load the unquantised weights, "
            "or a GGUF file, which attnmech dequantises."
        )


def _method_of(config: Any) -> str:
    """The method of a quantised model's config, "bitsandbytes to 4 bits"; empty for any other, and for GGUF."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    entries = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    method = entries.get("quant_method")
    method = str(getattr(method, "value", method or "an unnamed method"))
    if method == "gguf":
        return ""
    loaded = (n for n in (4, 8) if entries.get(f"load_in_{n}bit") or entries.get(f"_load_in_{n}bit"))
    weights = entries.get("weights")  # quanto's "int8"
    named = (n for n in (2, 4, 8) if isinstance(weights, str) and weights.endswith(str(n)))
    bits = entries.get("bits") or next(loaded, None) or next(named, None)
    return f"{method} to {bits} bits" if bits else method
