"""The same quantities once more, from state dicts, with loops and matrix products only: nothing of attnmech."""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_BLOCKS: Final = {
    "bloom": "transformer.h.{}.",
    "gpt2": "transformer.h.{}.",
    "llama": "model.layers.{}.",
    "bert": "bert.encoder.layer.{}.",
}


@dataclass
class Layer:
    """One layer's attention weights head by head, and the norm before it."""

    W_Q: list[Tensor]
    W_K: list[Tensor]
    W_V: list[Tensor]
    W_O: list[Tensor]
    b_Q: list[Tensor] | None
    b_K: list[Tensor] | None
    b_V: list[Tensor] | None
    b_O: Tensor | None
    gamma: Tensor | None
    """Weight of the norm that makes the attention's input out of the stream; None where none stands there."""
    beta: Tensor | None
    """Shift of the norm that made the attention's input, wherever that norm stands."""
    eps: float
    d_head: int


def family(model: Any) -> str:
    return str(model.config.model_type)


def layer_weights(model: Any, layer: int) -> Layer:
    """The weights of one layer, cut out of the state dict by explicit slices."""
    kind, config = family(model), model.config
    state = {name: value.detach() for name, value in model.state_dict().items()}
    at = _BLOCKS[kind].format(layer)
    heads = config.num_attention_heads
    d_model = config.hidden_size

    if kind == "bloom":
        d = d_model // heads
        fused, bias = (
            state[at + "self_attention.query_key_value.weight"],
            state[at + "self_attention.query_key_value.bias"],
        )
        rows = [[slice((3 * h + part) * d, (3 * h + part + 1) * d) for h in range(heads)] for part in range(3)]
        W = [[fused[rows[part][h]].T for h in range(heads)] for part in range(3)]
        b = [[bias[rows[part][h]] for h in range(heads)] for part in range(3)]
        dense = state[at + "self_attention.dense.weight"].T
        W_O = [dense[h * d : (h + 1) * d] for h in range(heads)]
        return Layer(
            *W, W_O, *b, state[at + "self_attention.dense.bias"], state[at + "input_layernorm.weight"],
            state[at + "input_layernorm.bias"], config.layer_norm_epsilon, d,
        )  # fmt: skip
    if kind == "gpt2":
        d = d_model // heads
        fused, bias = state[at + "attn.c_attn.weight"], state[at + "attn.c_attn.bias"]
        columns = [
            [slice(part * d_model + h * d, part * d_model + (h + 1) * d) for h in range(heads)] for part in range(3)
        ]
        W = [[fused[:, columns[part][h]] for h in range(heads)] for part in range(3)]
        b = [[bias[columns[part][h]] for h in range(heads)] for part in range(3)]
        dense = state[at + "attn.c_proj.weight"]
        W_O = [dense[h * d : (h + 1) * d] for h in range(heads)]
        return Layer(
            *W, W_O, *b, state[at + "attn.c_proj.bias"], state[at + "ln_1.weight"], state[at + "ln_1.bias"],
            config.layer_norm_epsilon, d,
        )  # fmt: skip
    if kind == "llama":
        d, kv = config.head_dim, config.num_key_value_heads
        names, out, counts = ("q_proj", "k_proj", "v_proj"), "o_proj", (heads, kv, kv)
        names, out = tuple("self_attn." + name for name in names), "self_attn.o_proj"
        gamma, beta, eps = state[at + "input_layernorm.weight"], None, config.rms_norm_eps
    else:
        d, counts = d_model // heads, (heads, heads, heads)
        names = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
        out = "attention.output.dense"
        gamma, eps = None, config.layer_norm_eps
        before = _BLOCKS[kind].format(layer - 1) + "output.LayerNorm" if layer else "bert.embeddings.LayerNorm"
        beta = state[before + ".bias"]
    W = [
        [state[f"{at}{name}.weight"][h * d : (h + 1) * d].T for h in range(count)]
        for name, count in zip(names, counts, strict=True)
    ]
    b = [
        [state[f"{at}{name}.bias"][h * d : (h + 1) * d] for h in range(count)]
        if f"{at}{name}.bias" in state else None
        for name, count in zip(names, counts, strict=True)
    ]  # fmt: skip
    W_O = [state[f"{at}{out}.weight"][:, h * d : (h + 1) * d].T for h in range(heads)]
    return Layer(*W, W_O, *b, state.get(f"{at}{out}.bias"), gamma, beta, eps, d)


def attention_input(model: Any, layer: int, stream: Tensor) -> Tensor:
    """What the projections see: the stream through the norm of a pre-norm block, written out."""
    weights = layer_weights(model, layer)
    if weights.gamma is None:
        return stream
    if weights.beta is None:
        # Llama takes its norm in float32, whatever the model's precision.
        single = stream.float()
        root = torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + weights.eps)
        return (single * root).to(stream.dtype) * weights.gamma
    centred = stream - stream.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + weights.eps).sqrt() * weights.gamma + weights.beta


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes, as the recursion in Press et al. 2022."""
    if math.log2(heads).is_integer():
        first = 2.0 ** (-(2.0 ** -(math.log2(heads) - 3)))
        return [first * first**h for h in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return slopes(closest) + slopes(2 * closest)[0::2][: heads - closest]


def rotation(position: int, d_head: int, theta: float, dtype: torch.dtype) -> Tensor:
    """The matrix R so that x R is x rotated; angles in float32, as Llama takes them."""
    half = d_head // 2
    frequency = 1.0 / theta ** (torch.arange(0, d_head, 2).float() / d_head)
    angle = float(position) * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    matrix = torch.zeros(d_head, d_head, dtype=dtype)
    for i in range(half):
        matrix[i, i] = matrix[i + half, i + half] = cos[i]
        matrix[i + half, i] = -sin[i]
        matrix[i, i + half] = sin[i]
    return matrix


def terms(model: Any, layer: int, x: Tensor, mask: Tensor, fold_norm: bool = False) -> dict[str, Tensor]:
    """Every term of the scores `[batch head query key]`, from the attention's input; absent ones left out."""
    w, kind = layer_weights(model, layer), family(model)
    batch, length, _ = x.shape
    heads, group = len(w.W_Q), len(w.W_Q) // len(w.W_K)
    beta = w.beta if fold_norm else None
    theta = model.config.rope_parameters["rope_theta"] if kind == "llama" else None
    turns = [
        torch.eye(w.d_head, dtype=x.dtype) if theta is None else rotation(p, w.d_head, theta, x.dtype)
        for p in range(length)
    ]
    if beta is not None:
        x = x - beta
    found = {name: torch.zeros(batch, heads, length, length, dtype=x.dtype) for name in ("qk", "bk", "qb", "bb")}
    for h in range(heads):
        W_K = w.W_K[h // group]
        zero = torch.zeros(w.d_head, dtype=x.dtype)
        b_Q = zero if w.b_Q is None else w.b_Q[h]
        b_K = zero if w.b_K is None else w.b_K[h // group]
        if beta is not None:
            b_Q, b_K = b_Q + beta @ w.W_Q[h], b_K + beta @ W_K
        for n in range(batch):
            for i in range(length):
                query, query_bias = x[n, i] @ w.W_Q[h] @ turns[i], b_Q @ turns[i]
                for j in range(length):
                    key, key_bias = x[n, j] @ W_K @ turns[j], b_K @ turns[j]
                    for name, left, right in (
                        ("qk", query, key), ("bk", query_bias, key), ("qb", query, key_bias),
                        ("bb", query_bias, key_bias),
                    ):  # fmt: skip
                        found[name][n, h, i, j] = left @ right / math.sqrt(w.d_head)
    result = {"query_key": found["qk"]}
    has_q, has_k = w.b_Q is not None or beta is not None, w.b_K is not None or beta is not None
    if has_q:
        result["key_bias"] = found["bk"]
    if has_k:
        result["query_bias"] = found["qb"]
    if has_q and has_k:
        result["constant"] = found["bb"]
    if kind == "bloom":
        place = (mask.cumsum(1) - 1) * mask
        slope = torch.tensor(slopes(heads), dtype=x.dtype)
        result["position"] = (slope[None, :, None, None] * place[:, None, None, :]).expand(batch, heads, length, length)
    hidden = torch.zeros(batch, heads, length, length, dtype=x.dtype)
    hidden[~visible(model, mask).expand_as(hidden)] = torch.finfo(x.dtype).min
    result["mask"] = hidden
    return result


def visible(model: Any, mask: Tensor) -> Tensor:
    """Which keys a query may look at: `[batch 1 query key]`."""
    batch, length = mask.shape
    seen = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for n in range(batch):
        for i in range(length):
            for j in range(length):
                seen[n, 0, i, j] = bool(mask[n, j]) and (j <= i or family(model) == "bert")
    return seen


def project(x: Tensor, W: list[Tensor], b: list[Tensor] | None) -> Tensor:
    """x W + b for each head: `[batch position head d]`."""
    return torch.stack([x @ W[h] + (0 if b is None else b[h]) for h in range(len(W))], dim=2)
