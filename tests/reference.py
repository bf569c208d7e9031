"""The same quantities computed independently of attnmech: from state dicts, with loops and matrix products only."""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """The places of one block's attention in a family, under transformers' names."""

    block: str
    qkv: tuple[str, ...]
    out: str
    norm: str | None
    """The norm that returns the attention's input; None if that is the stream itself."""
    norm_kind: str = "layer"
    """"layer", "rms" (Llama) or "rms + 1" (Gemma 2)."""
    before: tuple[str, str | None] = ("", None)
    """Post-norm: the last norm of a block, and the norm of the embedding."""
    eps: str = "layer_norm_epsilon"


_SEPARATE: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA: Final = Place(
    "model.layers.{}.", _SEPARATE, "self_attn.o_proj", "input_layernorm", norm_kind="rms", eps="rms_norm_eps"
)
_BERT: Final = ("attention.self.query", "attention.self.key", "attention.self.value")

_PLACES: Final = {
    "bloom": Place(
        "transformer.h.{}.", ("self_attention.query_key_value",), "self_attention.dense", "input_layernorm"
    ),
    "falcon": Place(
        "transformer.h.{}.", ("self_attention.query_key_value",), "self_attention.dense", "input_layernorm"
    ),
    "gpt2": Place("transformer.h.{}.", ("attn.c_attn",), "attn.c_proj", "ln_1"),
    "gptj": Place("transformer.h.{}.", ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.out_proj", "ln_1"),
    "gpt_neox": Place(
        "gpt_neox.layers.{}.", ("attention.query_key_value",), "attention.dense", "input_layernorm",
        eps="layer_norm_eps",
    ),
    "mpt": Place("transformer.blocks.{}.", ("attn.Wqkv",), "attn.out_proj", "norm_1"),
    "opt": Place("model.decoder.layers.{}.", _SEPARATE, "self_attn.out_proj", "self_attn_layer_norm", eps=""),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt_oss": _LLAMA,
    "gemma2": Place(
        "model.layers.{}.", _SEPARATE, "self_attn.o_proj", "input_layernorm", norm_kind="rms + 1", eps="rms_norm_eps"
    ),
    "bert": Place(
        "bert.encoder.layer.{}.", _BERT, "attention.output.dense", None,
        before=("output.LayerNorm", "bert.embeddings.LayerNorm"), eps="layer_norm_eps",
    ),
    "roberta": Place(
        "roberta.encoder.layer.{}.", _BERT, "attention.output.dense", None,
        before=("output.LayerNorm", "roberta.embeddings.LayerNorm"), eps="layer_norm_eps",
    ),
}  # fmt: skip
_PLACES["xlm-roberta"] = _PLACES["roberta"]
_DEBERTA: Final = {
    "out": "attention.output.dense", "norm": None, "before": ("output.LayerNorm", "deberta.embeddings.LayerNorm"),
    "eps": "layer_norm_eps", "block": "deberta.encoder.layer.{}.",
}  # fmt: skip
_PLACES["deberta"] = Place(qkv=("attention.self.in_proj",), **_DEBERTA)  # type: ignore[arg-type]
_PLACES["deberta-v2"] = Place(
    qkv=tuple(f"attention.self.{name}_proj" for name in ("query", "key", "value")),
    **_DEBERTA,  # type: ignore[arg-type]
)

ENCODERS: Final = ("bert", "roberta", "xlm-roberta", "deberta", "deberta-v2")


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
    """Weight of the norm that returns the attention's input; None if there is none."""
    beta: Tensor | None
    """Shift of the norm that returns the attention's input, wherever that norm is."""
    eps: float
    d_head: int


def family(model: Any) -> str:
    return str(model.config.model_type)


def _place(model: Any) -> Place:
    kind, config = family(model), model.config
    place = _PLACES[kind]
    if kind == "opt" and not config.do_layer_norm_before:
        return Place(place.block, place.qkv, place.out, None, before=("final_layer_norm", None), eps="")
    two = kind == "falcon" and config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1
    return Place(place.block, place.qkv, place.out, "ln_attn") if two else place


def heads_of(model: Any) -> tuple[int, int, int]:
    """Heads, heads of keys and values, and the dimensions of a head."""
    config = model.config
    heads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    if family(model) == "falcon":
        kv = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    return heads, kv, getattr(config, "head_dim", None) or config.hidden_size // heads


def _start(kind: str, part: int, head: int, heads: int, kv: int) -> int:
    """The index of the d_head rows of a fused projection that hold a head of q (part 0), k (1) or v (2)."""
    if kind in ("gpt2", "mpt"):
        return part * heads + head
    if kind in ("bloom", "gpt_neox", "deberta"):
        return 3 * head + part
    group = heads // kv
    if part == 0:
        return head // group * (group + 2) + head % group
    return head * (group + 2) + group + part - 1


def layer_weights(model: Any, layer: int) -> Layer:
    """The weights of one layer, cut out of the state dict by explicit slices."""
    kind, config, place = family(model), model.config, _place(model)
    state = {name: value.detach() for name, value in model.state_dict().items()}
    at = place.block.format(layer)
    heads, kv, d = heads_of(model)
    counts = (heads, kv, kv)
    W: list[list[Tensor]] = []
    b: list[list[Tensor] | None] = []
    for part, count in enumerate(counts):
        path = at + place.qkv[0 if len(place.qkv) == 1 else part]
        matrix, bias = state[path + ".weight"], state.get(path + ".bias")
        matrix = matrix.T if kind == "gpt2" else matrix
        starts = [d * (_start(kind, part, head, heads, kv) if len(place.qkv) == 1 else head) for head in range(count)]
        W.append([matrix[start : start + d].T for start in starts])
        if kind == "deberta" and part != 1:
            bias, starts = state[f"{at}attention.self.{'qkv'[part]}_bias"], [d * head for head in range(count)]
        b.append(None if bias is None else [bias[start : start + d] for start in starts])
    out = state[at + place.out + ".weight"]
    out = out if kind == "gpt2" else out.T
    W_O = [out[h * d : (h + 1) * d] for h in range(heads)]
    gamma = beta = None
    if place.norm is not None:
        gamma, beta = state[at + place.norm + ".weight"], state.get(at + place.norm + ".bias")
    elif layer:
        beta = state[place.block.format(layer - 1) + place.before[0] + ".bias"]
    elif place.before[1]:
        beta = state[place.before[1] + ".bias"]
    eps = float(getattr(config, place.eps)) if place.eps else 1e-5
    return Layer(*W, W_O, *b, state.get(at + place.out + ".bias"), gamma, beta, eps, d)


def _rms(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square, in float32 whatever the model's precision, as in transformers."""
    single = x.float()
    return single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)


def attention_input(model: Any, layer: int, stream: Tensor) -> Tensor:
    """The input of the projections: the stream after the norm of a pre-norm block, written out."""
    weights, kind = layer_weights(model, layer), _place(model).norm_kind
    if weights.gamma is None:
        return stream
    if kind == "rms":
        return _rms(stream, weights.eps).to(stream.dtype) * weights.gamma
    if kind == "rms + 1":
        return (_rms(stream, weights.eps) * (1 + weights.gamma.float())).to(stream.dtype)
    centred = stream - stream.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + weights.eps).sqrt() * weights.gamma
    return normed if weights.beta is None else normed + weights.beta


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes, as the recursion in Press et al. 2022."""
    if math.log2(heads).is_integer():
        first = 2.0 ** (-(2.0 ** -(math.log2(heads) - 3)))
        return [first * first**h for h in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return slopes(closest) + slopes(2 * closest)[0::2][: heads - closest]


def slopes_mpt(heads: int) -> list[float]:
    """MPT's slopes: those of the next power of two, odd indices first, cut to the number of heads."""
    whole = 1
    while whole < heads:
        whole *= 2
    every = [0.5 ** (8.0 * (h + 1) / whole) for h in range(whole)]
    return every if whole == heads else (every[1::2] + every[0::2])[:heads]


def rotation(
    position: int, d_head: int, theta: float, dtype: torch.dtype, *, turned: int | None = None, pairs: bool = False
) -> Tensor:
    """The matrix R such that x R is x rotated; angles are in float32, as in transformers.

    Only the first `turned` dimensions rotate: dimension i with i + turned/2 or, with `pairs`, 2i with 2i + 1.
    """
    turned = d_head if turned is None else turned
    frequency = 1.0 / theta ** (torch.arange(0, turned, 2).float() / turned)
    return _turn(float(position) * frequency, d_head, dtype, 1.0, pairs)


def _turn(angle: Tensor, d_head: int, dtype: torch.dtype, size: float, pairs: bool) -> Tensor:
    half = len(angle)
    cos, sin = (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)
    matrix = torch.eye(d_head, dtype=dtype)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if pairs else (i, i + half)
        matrix[first, first] = matrix[second, second] = cos[i]
        matrix[second, first] = -sin[i]
        matrix[first, second] = sin[i]
    return matrix


def _yarn(position: int, d_head: int, rope: Any, dtype: torch.dtype) -> Tensor:
    """YaRN (Peng et al. 2023): slow frequencies divided by the factor, fast ones kept, a ramp between."""

    def dimension(turns: float) -> float:
        return (
            d_head
            * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi))
            / (2 * math.log(rope["rope_theta"]))
        )

    low, high = max(dimension(rope["beta_fast"]), 0.0), min(dimension(rope["beta_slow"]), d_head - 1.0)
    angles = []
    for i in range(d_head // 2):
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        frequency = rope["rope_theta"] ** (-2 * i / d_head)
        angles.append(position * (frequency * (1 - slow) + frequency / rope["factor"] * slow))
    return _turn(torch.tensor(angles), d_head, dtype, 0.1 * math.log(rope["factor"]) + 1.0, pairs=False)


def turns(model: Any, length: int, dtype: torch.dtype) -> list[Tensor] | None:
    """The rotation at every position; None if the family has none."""
    kind, config = family(model), model.config
    d = heads_of(model)[2]
    if kind == "gptj":
        return [rotation(p, d, 10_000.0, dtype, turned=config.rotary_dim, pairs=True) for p in range(length)]
    if not (_place(model).norm_kind.startswith("rms") or kind == "gpt_neox" or (kind == "falcon" and not config.alibi)):
        return None
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        return [_yarn(p, d, rope, dtype) for p in range(length)]
    assert rope["rope_type"] == "default"
    turned = int(d * rope.get("partial_rotary_factor", 1.0))
    return [rotation(p, d, rope["rope_theta"], dtype, turned=turned) for p in range(length)]


def scale(model: Any) -> float:
    if family(model) == "gemma2":
        return float(model.config.query_pre_attn_scalar) ** -0.5
    if family(model) in ("deberta", "deberta-v2"):
        return 1 / math.sqrt(heads_of(model)[2] * (1 + len(model.config.pos_att_type)))
    return 1 / math.sqrt(heads_of(model)[2])


def position_term(model: Any, mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The position term `[batch head key]`; None if the family has none."""
    kind = family(model)
    heads, _, d = heads_of(model)
    batch, length = mask.shape
    if kind not in ("bloom", "mpt") and not (kind == "falcon" and model.config.alibi):
        return None
    found = torch.zeros(batch, heads, length, dtype=dtype)
    for n in range(batch):
        place = 0
        for j in range(length):
            for h in range(heads):
                if kind == "mpt":
                    found[n, h, j] = slopes_mpt(heads)[h] * (j - (length - 1))
                elif kind == "bloom":
                    found[n, h, j] = slopes(heads)[h] * place * int(mask[n, j])
                else:
                    slope = torch.tensor(slopes(heads)[h]).bfloat16()
                    found[n, h, j] = (slope.float() * (place * int(mask[n, j]))).bfloat16().to(dtype) / math.sqrt(d)
            place += int(mask[n, j])
    return found


def terms(model: Any, layer: int, x: Tensor, mask: Tensor, fold_norm: bool = False) -> dict[str, Tensor]:
    """Every term of the scores `[batch head query key]`, from the attention's input; absent ones left out."""
    w = layer_weights(model, layer)
    batch, length, _ = x.shape
    heads, group = len(w.W_Q), len(w.W_Q) // len(w.W_K)
    beta = w.beta if fold_norm else None
    turned, by = turns(model, length, x.dtype), scale(model)
    given = x
    if beta is not None:
        x = x - beta
    found = {name: torch.zeros(batch, heads, length, length, dtype=x.dtype) for name in ("qk", "bk", "qb", "bb")}
    for h in range(heads):
        W_K = w.W_K[h // group]
        zero = torch.zeros(w.d_head, dtype=x.dtype)
        b_Q = zero if w.b_Q is None else w.b_Q[h]
        b_K = zero if w.b_K is None else w.b_K[h // group]
        norms = _frozen(model, layer, given @ w.W_Q[h] + b_Q, "q"), _frozen(model, layer, given @ W_K + b_K, "k")
        if beta is not None:
            b_Q, b_K = b_Q + beta @ w.W_Q[h], b_K + beta @ W_K
        for n in range(batch):

            def scored(part: Tensor, frozen: Tensor, n: int = n) -> Tensor:
                """A part of q or k at every position, normalised and rotated as the model does it."""
                rows = [part[p] * frozen[n, p] for p in range(length)]
                return torch.stack(rows if turned is None else [row @ turned[p] for p, row in enumerate(rows)])

            query, key = scored(x[n] @ w.W_Q[h], norms[0]), scored(x[n] @ W_K, norms[1])
            query_bias, key_bias = (
                scored(b.expand(length, -1), norm) for b, norm in zip((b_Q, b_K), norms, strict=True)
            )
            for name, left, right in (
                ("qk", query, key), ("bk", query_bias, key), ("qb", query, key_bias), ("bb", query_bias, key_bias),
            ):  # fmt: skip
                found[name][n, h] = left @ right.T * by
    result = {"query_key": found["qk"]}
    has_q, has_k = w.b_Q is not None or beta is not None, w.b_K is not None or beta is not None
    if has_q:
        result["key_bias"] = found["bk"]
    if has_k:
        result["query_bias"] = found["qb"]
    if has_q and has_k:
        result["constant"] = found["bb"]
    position = position_term(model, mask, x.dtype)
    if position is not None:
        result["position"] = position[:, :, None].expand(batch, heads, length, length)
    if family(model) in ("deberta", "deberta-v2"):
        result |= relative_terms(model, layer, given)
    cap = getattr(model.config, "attn_logit_softcapping", None)
    if cap is not None:
        total = torch.stack(list(result.values())).sum(0)
        result["softcap"] = cap * torch.tanh(total / cap) - total
    hidden = torch.zeros(batch, heads, length, length, dtype=x.dtype)
    hidden[~visible(model, mask, layer).expand_as(hidden)] = torch.finfo(x.dtype).min
    result["mask"] = hidden
    return result


def relative_row(config: Any, distance: int) -> int:
    """The row of DeBERTa's embedding of relative positions for a distance, in exact arithmetic."""
    buckets, largest = getattr(config, "position_buckets", -1), config.max_relative_positions
    if buckets <= 0:
        return min(max(distance + largest, 0), 2 * largest - 1)
    half, far = buckets // 2, abs(distance)
    bucket = far
    if far > half:
        share = math.log(far / half) / math.log((largest - 1) / half)
        bucket = half + math.ceil(round(share * (half - 1), 6))
    return min(max((bucket if distance >= 0 else -bucket) + buckets, 0), 2 * buckets - 1)


def relative_tables(model: Any, layer: int) -> dict[str, Tensor]:
    """DeBERTa's embedding of relative positions, projected as keys (c2p) and as queries (p2c): `[place head d]`."""
    config, state = model.config, {name: value.detach() for name, value in model.state_dict().items()}
    heads, _, d = heads_of(model)
    rows = state["deberta.encoder.rel_embeddings.weight"]
    if "layer_norm" in getattr(config, "norm_rel_ebd", "none"):
        norm = "deberta.encoder.LayerNorm."
        spread = (rows - rows.mean(-1, keepdim=True)) / (rows.var(-1, unbiased=False, keepdim=True) + 1e-7).sqrt()
        rows = spread * state[norm + "weight"] + state[norm + "bias"]
    shared = getattr(config, "share_att_key", False)
    of_v2 = ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj")
    found = {}
    names = ("pos_proj", "pos_q_proj") if family(model) == "deberta" else of_v2
    for kind, name in zip(("c2p", "p2c"), names, strict=True):
        path = f"{_place(model).block.format(layer)}attention.self.{name}"
        if kind in config.pos_att_type:
            table = rows @ state[path + ".weight"].T
            found[kind] = (table + state.get(path + ".bias", torch.zeros(()))).reshape(-1, heads, d)
    return found


def relative_terms(model: Any, layer: int, x: Tensor) -> dict[str, Tensor]:
    """c2p and p2c of DeBERTa, pair by pair (He et al. 2021, eq. 4): whole queries and keys, with their biases."""
    w, tables = layer_weights(model, layer), relative_tables(model, layer)
    batch, length, _ = x.shape
    q, k = project(x, w.W_Q, w.b_Q), project(x, w.W_K, w.b_K)
    found = {}
    for kind, table in tables.items():
        term = torch.zeros(batch, len(w.W_Q), length, length, dtype=x.dtype)
        for i in range(length):
            for j in range(length):
                content = q[:, i] if kind == "c2p" else k[:, j]
                term[:, :, i, j] = (content * table[relative_row(model.config, i - j)]).sum(-1) * scale(model)
        found["content_to_position" if kind == "c2p" else "position_to_content"] = term
    return found


def _frozen(model: Any, layer: int, value: Tensor, which: str) -> Tensor:
    """The factors by which qk-norm multiplies q or k `[batch position d_head]` of one head; 1 without qk-norm."""
    gamma = model.state_dict().get(_place(model).block.format(layer) + f"self_attn.{which}_norm.weight")
    if gamma is None:
        return torch.ones_like(value)
    return _rms(value, model.config.rms_norm_eps).to(value.dtype) * gamma / value


def window(model: Any, layer: int) -> int | None:
    """The number of keys that a query sees, including itself; None if it sees all before it."""
    kinds = getattr(model.config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    found = getattr(model.config, "sliding_window", None)
    return None if found is None else int(found)


def visible(model: Any, mask: Tensor, layer: int = 0) -> Tensor:
    """True at the keys that a query sees: `[batch 1 query key]`."""
    batch, length = mask.shape
    wide = window(model, layer) or length
    seen = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for n in range(batch):
        for i in range(length):
            for j in range(length):
                seen[n, 0, i, j] = bool(mask[n, j]) and (family(model) in ENCODERS or i - wide < j <= i)
    return seen


def project(x: Tensor, W: list[Tensor], b: list[Tensor] | None) -> Tensor:
    """x W + b for each head: `[batch position head d]`."""
    return torch.stack([x @ W[h] + (0 if b is None else b[h]) for h in range(len(W))], dim=2)
