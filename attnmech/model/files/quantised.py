"""Quantised models: transformers makes them, attnmech reads the objects and says in their name what they are."""

from typing import Any

from torch import nn

from ...errors import InputError, UnsupportedModelError
from ..parts.packed import packed_projections


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
    """Raises `UnsupportedModelError`, naming the method, for the config of a quantised model (GGUF is dequantised
    instead).
    """
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
