"""transformers' results for a text in eager attention: the reference for trained decoders of Llama's layout."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnmech as am
from attnmech.model.files.gguf import dequantised


def loss(logits: Tensor, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))


class Raw:
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

        with self.plain.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(zeroed), torch.no_grad():
            return loss(self.plain(self.ids).logits, self.ids) - self.loss


@dataclass(frozen=True)
class Trained:
    """A GGUF file as attnmech loads it in one precision, and transformers' reference for that: it computes in float32,
    with the weights rounded to the precision."""

    hooked: am.HookedModel
    plain: Any
    texts: list[str]

    @classmethod
    def of(cls, file: Path, dtype: str, texts: list[str]) -> Self:
        hooked, folder = am.load(file, dtype=dtype), dequantised(file).folder
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(parameter.to(hooked.dtype))
        return cls(hooked, plain, texts)

    @cached_property
    def raw(self) -> list[Raw]:
        return [Raw(self.plain, self.hooked.tokenizer(text, return_tensors="pt").input_ids) for text in self.texts]

    def within(self, float32: float, bfloat16: float, float16: float = 0.0) -> float:
        """The tolerance of this precision: two to four times what was measured."""
        return {torch.float32: float32, torch.bfloat16: bfloat16, torch.float16: float16}[self.hooked.dtype]
