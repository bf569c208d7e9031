"""What a block or an attention module is called with and returns: the stream among its arguments."""

from typing import Any, Final

import torch
from torch import Tensor

KEY_STATES: Final = ("key_value_states", "encoder_hidden_states")
"""The arguments of transformers' attention modules that keys and values are made of, in cross-attention."""


def first_tensor(output: Any) -> Tensor:
    """The tensor that a block or attention module returns, alone or first in a tuple."""
    found = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(found, torch.Tensor)
    return found
