"""Refuses quantised models: special kernels unpack their packed matrices, so there are no weights to read."""

from typing import Any

from ...errors import UnsupportedModelError


def require_unquantised(config: Any, name: str) -> None:
    """Raises `UnsupportedModelError`, naming the method, for the config of a quantised model (GGUF is dequantised
    instead).
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    entries = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    method = entries.get("quant_method")
    method = str(getattr(method, "value", method or "an unnamed method"))
    if method == "gguf":
        return
    loaded = (n for n in (4, 8) if entries.get(f"load_in_{n}bit") or entries.get(f"_load_in_{n}bit"))
    bits = entries.get("bits") or next(loaded, None)
    raise UnsupportedModelError(
        f"{name} is quantised by {method}{f' to {bits} bits' if bits else ''}: kernels of that method unpack its "
        f"weights, so there are no matrices to read. Load the unquantised weights; or the dequantised "
        "model (model.dequantize(), where transformers can); or a GGUF file, which attnmech dequantises."
    )
