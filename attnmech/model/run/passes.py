"""One forward pass of a model, and what must happen before the first."""

from typing import Any, Final

import torch
from torch import nn

from ...batch import Batch
from ..own.module import OwnModule
from ..structure.passes_apart import reading
from ..structure.signals import KINDS, size_options

ENCODED: Final = "encoder's final stream"
"""The entry of a batch that replaces its recordings: what their encoder returns, which a pass then leaves out."""


def _set_up_vector_functions() -> None:
    """Makes the first call of each of torch's vector functions in a single thread.

    That call sets up Intel's MKL. If two threads make that call at the same time, one of them occasionally gets less
    exact results, and the certificate then refuses the model.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.tanh, torch.exp, torch.erf, torch.log, torch.sin, torch.cos):
            function(one)


_set_up_vector_functions()


def call(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """One forward pass of a model on a batch, without a cache."""
    if isinstance(model, OwnModule):
        return model(batch.extra, **options)
    inputs: dict[str, Any] = {**batch.extra, **options}
    if (states := inputs.pop(ENCODED, None)) is not None:
        inputs["encoder_outputs"] = (states,)
    elif KINDS.keys() & batch.extra.keys():
        inputs |= size_options(model, batch.extra)
        if batch.target is None:
            with reading(batch):
                return model(**inputs, return_dict=True)
    else:
        inputs |= {"input_ids": batch.ids, **batch.sensed}
        # Some models place pictures by the mask (Qwen2.5-Omni).
        if batch.padded or batch.senses:
            inputs["attention_mask"] = batch.mask.long()
    if batch.target is not None:
        inputs["decoder_input_ids"] = batch.target.ids
        if batch.target.padded:
            inputs["decoder_attention_mask"] = batch.target.mask.long()
    with reading(batch):
        return model(**inputs, use_cache=False, return_dict=True)
