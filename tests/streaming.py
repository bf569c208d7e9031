"""Attention to the first and the last keys alone, in plain transformers with a mask made by hand."""

from typing import Any

import models
import torch
from torch import Tensor

import attnmech as am

FIRST, LAST = 1, 3


def kept(length: int) -> Tensor:
    """True where a row keeps a key, in causal attention."""
    keeps = torch.zeros(length, length, dtype=torch.bool)
    for row in range(length):
        for key in range(row + 1):
            keeps[row, key] = key < FIRST or row - key < LAST
    return keeps


def by_hand(name: str, ids: Tensor, model: am.HookedModel | None = None) -> Tensor:
    """The logits of plain transformers in which all heads see those keys alone."""
    plain = models.in_attention((model or models.hooked(name)).original, "eager")
    keeps, hooks = kept(ids.shape[1]), []
    if name == "bloom":  # its position bias is made from the mask, so the pattern itself is changed

        def renormalised(module: Any, args: Any, pattern: Tensor) -> Tensor:
            return pattern * keeps / (pattern * keeps).sum(dim=-1, keepdim=True)

        for block in plain.transformer.h:
            hooks.append(block.self_attention.attention_dropout.register_forward_hook(renormalised))
        mask = torch.ones_like(ids)
    else:
        hidden = torch.finfo(torch.float32).min
        mask: Any = torch.where(keeps, 0.0, hidden).expand(len(ids), 1, -1, -1)
        if name == "gemma2":
            inside = torch.ones_like(keeps).triu(1 - plain.config.sliding_window)
            mask = {"full_attention": mask, "sliding_attention": mask.masked_fill(~inside, hidden)}
    with torch.no_grad():
        logits: Tensor = plain(ids, attention_mask=mask).logits
    for hook in hooks:
        hook.remove()
    return logits
