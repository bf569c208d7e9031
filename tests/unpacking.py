"""Numbers of a page, decoded by the description of the format in `attnmech/draw/packing.py`."""

import json
import re
from base64 import b64decode
from collections.abc import Mapping
from gzip import decompress
from typing import Any

import numpy as np


def page_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def unpacked(packed: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """The numbers; of those without a value, 0 for a probability, else NaN."""
    raw = np.frombuffer(decompress(b64decode(packed["codes"])), dtype=np.uint8).astype(int)
    low, step = (np.array(packed[name])[:, None] for name in ("low", "step"))
    scale = packed.get("scale")
    if scale == "root":
        return ((low + step * raw.reshape(len(low), -1)) ** 2).reshape(shape)
    high_bytes, low_bytes = raw.reshape(2, -1)
    codes = (256 * high_bytes + low_bytes).reshape(len(low), -1)
    values = low + step * codes
    values = np.where(codes == 65535, 0, np.exp(values)) if scale else np.where(codes == 65535, np.nan, values)
    return values.reshape(shape)
