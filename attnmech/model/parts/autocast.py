"""Refuses to compute inside `torch.autocast`: it changes the precision, and the certificate holds for the model's
own.
"""

import torch

from ...errors import InputError


def require_no_autocast(device: torch.device | None = None) -> None:
    """Raises `InputError` if `torch.autocast` is in force on a device (on any device, if none is given)."""
    accelerator = torch.accelerator.current_accelerator() if device is None else None
    kinds = ["cpu", *([] if accelerator is None else [accelerator.type])] if device is None else [device.type]
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            raise InputError(
                f"attnmech computes in the model's own precision, and torch.autocast({kind!r}) is in force. Call it "
                'outside, or load the model in the precision that you want: am.load(..., dtype="bfloat16").'
            )
