"""Refuses to compute under settings of torch that change what is computed, or where.

`torch.autocast` changes the precision, and the certificate holds for the model's own. A default device would hold the
small tensors that belong on the CPU.
"""

import torch

from ...errors import InputError


def require_own_settings(device: torch.device | None = None) -> None:
    """Raises `InputError` if `torch.autocast` is in force on a device (on any device, if none is given), and for a
    default device other than the CPU.
    """
    accelerator = torch.accelerator.current_accelerator() if device is None else None
    kinds = ["cpu", *([] if accelerator is None else [accelerator.type])] if device is None else [device.type]
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            raise InputError(
                f"attnmech computes in the model's own precision, and torch.autocast({kind!r}) is in force. Call it "
                'outside, or load the model in the precision that you want: am.load(..., dtype="bfloat16").'
            )
    if (default := torch.get_default_device()).type != "cpu":
        raise InputError(
            f"attnmech needs the CPU as torch's default device, and {str(default)!r} is in force. "
            'Call it inside `with torch.device("cpu"):`; the model stays where it is, or '
            'goes where you say: am.load(..., device="cuda").'
        )
