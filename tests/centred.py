"""The terms of the centred ledger, written out: queries and keys are rotated back by matrices, in loops over texts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import models
import reference
import tiny
import torch
import transformers
from torch import Tensor

import attnmech as am

F32, F64 = torch.float32, torch.float64

LENGTHS: Final = [5, 9, 2, 14, 7, 11, 3, 16, 8, 6, 12, 4]

Turns = Callable[[int, int], Tensor | None]
"""Maps layer and position to the matrix R such that x R is x rotated; None if a layer does not rotate."""


def dtype_of(name: str) -> torch.dtype:
    """Single precision for families that transformers computes in float32 whatever the dtype."""
    return F32 if name in ("gpt_oss_yarn", "cohere", "llama4_text") else F64


@dataclass(frozen=True)
class Split:
    """Queries and keys of one layer as they enter the score, rotated back: `[batch position head d_head]`."""

    q: Tensor
    k: Tensor
    scale: float
    turns: list[Tensor] | None

    def turned(self, x: Tensor, place: int) -> Tensor:
        return x if self.turns is None else x @ self.turns[place]


def gemma3() -> Any:
    """Layers with rotary tables of two bases: local ones with a short base, the others with a long one."""
    config = transformers.Gemma3TextConfig(
        vocab_size=47, hidden_size=36, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
        intermediate_size=34, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"], sliding_window=4, query_pre_attn_scalar=11,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            "full_attention": {"rope_type": "default", "rope_theta": 7000.0},
        },
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


_FROM_REFERENCE: Final = ("llama", "llama_bias", "qwen2", "qwen3_bias", "gemma2", "gpt_neox", "gptj", "gpt_oss_yarn")


def theta_of(name: str, layer: int) -> float:
    return 500_000.0 if name in ("cohere", "llama4_text") else (30.0, 7000.0)[layer]


def turns_of(name: str, length: int, dtype: torch.dtype) -> Turns:
    """How a family rotates, from its config."""
    if name in _FROM_REFERENCE:
        made = reference.turns(models.plain(name, dtype), length, dtype)
        assert made is not None
        return lambda layer, place: made[place]
    if name in ("cohere", "llama4_text"):
        d_head = 8 if name == "cohere" else 16

        def pairs(layer: int, place: int) -> Tensor | None:
            if (name, layer) == ("llama4_text", 3):
                return None
            return reference.rotation(place, d_head, 500_000.0, dtype, pairs=True)

        return pairs
    if name == "gemma3":
        return lambda layer, place: reference.rotation(place, 8, theta_of(name, layer), dtype)
    return lambda layer, place: None


def scale_of(name: str) -> float:
    if name == "gemma3":
        return 11**-0.5
    if name == "t5":
        return 1.0
    d_head = {"cohere": 8, "llama4_text": 16}.get(name)
    return reference.scale(models.plain(name)) if d_head is None else 1 / math.sqrt(d_head)


@cache
def hooked(name: str, dtype: torch.dtype) -> am.HookedModel:
    if name == "gemma3":
        return am.load(models.randomised(gemma3(), dtype=dtype))
    if name in ("cohere", "llama4_text"):
        return am.load(tiny.model_of(name, dtype=dtype))
    return models.hooked(name, dtype)


def back(value: Tensor, turns: Turns, layer: int) -> Tensor:
    """x R⁻¹ at every position of every text and head."""
    found = torch.zeros_like(value)
    for place in range(value.shape[1]):
        R = turns(layer, place)
        inverse = None if R is None else torch.linalg.inv(R)
        for text in range(value.shape[0]):
            found[text, place] = value[text, place] if inverse is None else value[text, place] @ inverse
    return found


def split_of(name: str, model: am.HookedModel, inputs: Any, layer: int, stack: str = "") -> Split:
    """The queries and keys of a layer that a run captured, rotated back."""
    dot = f"{stack}." if stack else ""
    points = [
        rotated if model.points[f"{dot}{rotated}"].absent is None else plain
        for rotated, plain in (("q_rot", "q"), ("k_rot", "k"))
    ]
    points = [f"{dot}{point}" for point in points]
    if name == "llama4_text" and layer == 3:
        points = ["q", "k"]
    acts = model.run(inputs, points=points)
    q, k = (acts[point, layer] for point in points)
    turns = turns_of(name, max(q.shape[1], k.shape[1]), q.dtype)
    there = [turns(layer, place) for place in range(max(q.shape[1], k.shape[1]))]
    rotates = there[0] is not None
    return Split(
        back(q, turns, layer), back(k, turns, layer), scale_of(name),
        [R for R in there if R is not None] if rotates else None,
    )  # fmt: skip


def own_means(value: Tensor, counted: Tensor) -> Tensor:
    """Each text's mean over its counted tokens, at every position: `[batch position head d_head]`."""
    found = torch.zeros_like(value)
    for text in range(len(value)):
        rows = [value[text, place] for place in range(value.shape[1]) if counted[text, place]]
        found[text] = sum(rows[1:], rows[0]) / len(rows)
    return found


def without_first(mask: Tensor) -> Tensor:
    """The real tokens except the first of each text."""
    found = mask.bool().clone()
    for row in found:
        row[row.nonzero()[0, 0]] = False
    return found


def naive_terms(split: Split, query_mean: Tensor, key_mean: Tensor, native: Tensor | None = None) -> dict[str, Tensor]:
    """The four terms `[batch head query key]`; means are given at every position, of query heads and of kv heads."""
    batch, queries, heads, _ = split.q.shape
    keys, kv = split.k.shape[1], split.k.shape[2]
    names = ("query_key", "key_bias", "query_bias", "position")
    found = {name: torch.zeros(batch, heads, queries, keys, dtype=split.q.dtype) for name in names}
    for text in range(batch):
        for head in range(heads):
            shared = head // (heads // kv)

            def rows(value: Tensor, at: int, count: int, text: int = text) -> Tensor:
                return torch.stack([split.turned(value[text, place, at], place) for place in range(count)])

            mean_q, mean_k = rows(query_mean, head, queries), rows(key_mean, shared, keys)
            rest_q, rest_k = rows(split.q - query_mean, head, queries), rows(split.k - key_mean, shared, keys)
            found["query_key"][text, head] = split.scale * rest_q @ rest_k.T
            found["key_bias"][text, head] = split.scale * mean_q @ rest_k.T
            found["query_bias"][text, head] = split.scale * rest_q @ mean_k.T
            found["position"][text, head] = split.scale * mean_q @ mean_k.T
    if native is not None:
        found["position"] = found["position"] + native
    return found


def at_biases(name: str, model: am.HookedModel, inputs: Any) -> am.results.MeanQK:
    """Means that are the model's biases: q̄ = b_Q, k̄ = b_K."""
    layers = [reference.layer_weights(models.plain(name, F64), layer) for layer in range(model.n_layers)]
    one, none = torch.ones(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    return replace(
        am.mean_qk(model, inputs),
        query_sums=torch.stack([torch.stack(each.b_Q)[None] for each in layers]),
        key_sums=torch.stack([torch.stack(each.b_K)[None] for each in layers]),
        query_counts=one, key_counts=one, texts=none,
    )  # fmt: skip


def in_the_stream() -> am.HookedModel:
    """GPT-2 with a head that attends to the previous token: q_i reads place i − 1 of the stream, k_j place j."""
    model = models.randomised(models.gpt2(heads=2, d_head=16, layers=1), dtype=F64)
    block = model.transformer.h[0]
    with torch.no_grad():
        model.transformer.wte.weight[:, 16:] = 0
        model.transformer.wte.weight[:, :16] *= 0.3
        model.transformer.wpe.weight.zero_()
        for place in range(16):
            model.transformer.wpe.weight[place, 16 + place] = 4
        block.ln_1.weight.fill_(1)
        block.ln_1.bias.zero_()
        fused = block.attn.c_attn.weight.view(32, 3, 2, 16)
        fused[:, :2, 1] *= 0.3
        fused[16:, :2, 0] = 0
        for place in range(16):
            fused[16 + place, 1, 1, place] += 2.5
            if place:
                fused[16 + place, 0, 1, place - 1] += 2.5
    return am.load(model)


def documents(lengths: list[int] = LENGTHS, seed: int = 3) -> list[Tensor]:
    """Random token ids that every small model knows."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 43, (length,), generator=generator) for length in lengths]
