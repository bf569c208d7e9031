"""Is a model quantised? Then there are no weights to read: a packed matrix is unpacked by kernels of its own."""

from typing import Any

from ...errors import UnsupportedModelError


def require_unquantised(config: Any, name: str) -> None:
    """Raises `UnsupportedModelError`, naming the method, for the config of a quantised model (not GGUF, which is read
    dequantised).
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return
    about = given if isinstance(given, dict) else getattr(given, "__dict__", {})
    method = about.get("quant_method")
    method = str(getattr(method, "value", method or "an unnamed method"))
    if method == "gguf":
        return
    loaded = (n for n in (4, 8) if about.get(f"load_in_{n}bit") or about.get(f"_load_in_{n}bit"))
    bits = about.get("bits") or next(loaded, None)
    raise UnsupportedModelError(
        f"{name} is quantised by {method}{f' to {bits} bits' if bits else ''}: its packed weights are unpacked by "
        "kernels of that method, so there are no matrices to read. Load the unquantised weights; or the dequantised "
        "model (model.dequantize(), where transformers can); or a GGUF file, which attnmech dequantises."
    )
