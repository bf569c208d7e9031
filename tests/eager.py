"""transformers' results for a text in eager attention: the reference for trained decoders of Llama's layout."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def loss(logits: Tensor, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))


class Raw:
    """The results of transformers for one text."""

    def __init__(self, plain: Any, ids: Tensor) -> None:
        self.plain, self.ids = plain, ids
        self.d_head = plain.config.head_dim
        self.group = plain.config.num_attention_heads // plain.config.num_key_value_heads
        self.values: dict[int, Tensor] = {}

        def keep(number: int) -> Callable[..., None]:
            return lambda _, __, out: self.values.update({number: out[0]})

        hooks = [
            layer.self_attn.v_proj.register_forward_hook(keep(number))
            for number, layer in enumerate(plain.model.layers)
        ]
        with torch.no_grad():
            found = plain(ids, output_attentions=True, output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        self.logits = found.logits[0]
        self.pattern = torch.cat(found.attentions)  # [layer head query key]
        self.streams = torch.cat(found.hidden_states)  # [layer position d_model]
        self.loss = loss(found.logits, ids)

    def value(self, layer: int, head: int) -> Tensor:
        at = head // self.group * self.d_head
        return self.values[layer][:, at : at + self.d_head]

    def z(self, layer: int, head: int) -> Tensor:
        return self.pattern[layer, head] @ self.value(layer, head)

    def effect(self, layer: int, head: int, z: Tensor) -> float:
        """The change of the loss if one head's z is replaced."""

        def replaced(_: Any, given: tuple[Tensor]) -> None:
            given[0][0, :, head * self.d_head : (head + 1) * self.d_head] = z

        hook = self.plain.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(replaced)
        try:
            with torch.no_grad():
                return loss(self.plain(self.ids).logits, self.ids) - self.loss
        finally:
            hook.remove()
