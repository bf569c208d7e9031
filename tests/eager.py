"""transformers' results for a text in eager attention: the reference for trained decoders of Llama's layout."""

from typing import Any

import torch
from torch import Tensor


def loss(logits: Tensor, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))


class Raw:
    """The results of transformers for one text."""

    def __init__(self, plain: Any, ids: Tensor) -> None:
        self.plain, self.ids = plain, ids
        with torch.no_grad():
            found = plain(ids, output_attentions=True)
        self.logits = found.logits[0]
        self.pattern = torch.cat(found.attentions)  # [layer head query key]
        self.loss = loss(found.logits, ids)

    def without(self, layer: int, head: int) -> float:
        """The change of the loss if one head's z is 0."""
        d_head = self.plain.config.head_dim

        def zeroed(_: Any, z: tuple[Tensor]) -> None:
            z[0][0, :, head * d_head : (head + 1) * d_head] = 0

        hook = self.plain.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(zeroed)
        try:
            with torch.no_grad():
                return loss(self.plain(self.ids).logits, self.ids) - self.loss
        finally:
            hook.remove()
