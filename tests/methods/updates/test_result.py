"""The vectors that heads write, against loops over raw weights and over values that plain transformers returns."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import models
import pytest
import reference
import torch
from by_hand import watched
from comparing import refuses
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import InputError, MissingPointError
from attnmech.maths.update_statistics import STATISTICS
from attnmech.runs.update_sums import BLOCK_STATISTICS

F32, F64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Place:
    """The modules of a family's block that write to the stream, under transformers' names."""

    attn_out: str
    mlp_out: str
    before_mlp: str
    """The module that receives the stream to which the MLP adds; empty for the block itself."""
    gives: bool = False
    """Whether that stream is the module's output (post-norm) instead of its input."""


_LLAMA: Final = Place("self_attn.o_proj", "mlp", "post_attention_layernorm")
_BERT: Final = Place("attention.output.dense", "output.dense", "attention.output.LayerNorm", gives=True)
_FALCON: Final = Place("self_attention.dense", "mlp", "")
_GEMMA: Final = Place("post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm")
_NEOX: Final = Place("attention.dense", "mlp", "")

PLACES: Final = {
    "bloom": Place("self_attention.dense", "mlp.dense_4h_to_h", "post_attention_layernorm"),
    "mpt3": Place("attn.out_proj", "ffn.down_proj", "norm_2"),
    "gpt2": Place("attn.c_proj", "mlp", "ln_2"),
    "gptj": Place("attn.out_proj", "mlp", ""),
    "llama": _LLAMA,
    "llama_bias": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt_oss": _LLAMA,
    "gemma2": _GEMMA,
    "gemma2_bias": _GEMMA,
    "bert": _BERT,
    "roberta": _BERT,
    "opt": Place("self_attn.out_proj", "fc2", "final_layer_norm"),
    "opt_post": Place("self_attn.out_proj", "fc2", "self_attn_layer_norm", gives=True),
    "falcon_new": _FALCON,
    "falcon_multi_query": _FALCON,
    "falcon_rotary_serial": Place("self_attention.dense", "mlp", "post_attention_layernorm"),
    "gpt_neox": _NEOX,
    "gpt_neox_serial": Place("attention.dense", "mlp", "post_attention_layernorm"),
    "encoder": Place("layer.0.SelfAttention.o", "layer.1.DenseReluDense", "layer.1.layer_norm"),
    "decoder": Place("layer.0.SelfAttention.o", "layer.2.DenseReluDense", "layer.2.layer_norm"),
    "cross": Place("layer.1.EncDecAttention.o", "", "layer.1.layer_norm"),
}
"""The names in `models`, T5 by stack, and a Gemma 2 whose output projection has a bias before the norm."""

T5: Final = ("encoder", "decoder", "cross")
WINDOWED: Final = ("mistral", "gemma2", "gemma2_bias")
"""Models in which rows of padding see only padding; in float64, transformers' eager attention gives NaN there."""

CASES: Final = [
    *((name, "left" if place % 2 and name not in T5 else "right", F32) for place, name in enumerate(PLACES)),
    *((name, "" if name in WINDOWED else "right", F64) for name in [*PLACES][::3] if name not in models.SINGLE_ONLY),
]
"""Every family on one side or the other, and every third in double precision."""


@dataclass(frozen=True)
class Truth:
    """One layer as transformers computed it: its tensors in float64."""

    weights: reference.Layer
    x: Tensor
    """The stream as it enters the block `[batch query d_model]`."""
    key_stream: Tensor
    v: Tensor
    """Values from the raw weights `[batch key kv_head d_head]`."""
    pattern: Tensor
    visible: Tensor
    mask: Tensor
    """True at real queries."""
    key_mask: Tensor
    scale: Tensor
    """The factor of the norm after attention `[batch query d_model]`; ones without a norm."""
    attn_out: Tensor
    mlp_out: Tensor | None
    before_mlp: Tensor
    cross: bool = False

    def written(self, b: int, h: int) -> Tensor:
        """v W_O of every key through head h, before a norm `[key d_model]`."""
        group = len(self.weights.W_O) // len(self.weights.W_V)
        return self.v[b, :, h // group] @ self.weights.W_O[h].double()

    def bias(self, b: int, i: int) -> Tensor:
        """The contribution of the output projection's bias at row i."""
        b_O = self.weights.b_O
        return torch.zeros_like(self.x[b, i]) if b_O is None else b_O.double() * self.scale[b, i]


def t5_weights(block: nn.Module, stack: str) -> reference.Layer:
    part: Any = block.get_submodule("layer.1.EncDecAttention" if stack == "cross" else "layer.0.SelfAttention")
    heads, d = part.n_heads, part.key_value_proj_dim
    q, k, v = ([each.weight.detach()[h * d : (h + 1) * d].T for h in range(heads)] for each in (part.q, part.k, part.v))
    W_O = [part.o.weight.detach().T[h * d : (h + 1) * d] for h in range(heads)]
    return reference.Layer(q, k, v, W_O, None, None, None, None, None, None, 1e-6, d)


def fresh(name: str, dtype: torch.dtype) -> Any:
    if name == "gemma2_bias":
        return models.randomised(models.gemma2(attention_bias=True), dtype=dtype)
    return models.fresh("t5" if name in T5 else name, dtype)


@cache
def plain(name: str, dtype: torch.dtype) -> Any:
    return models.in_attention(fresh(name, dtype), "eager")


@cache
def hooked(name: str, dtype: torch.dtype) -> am.HookedModel:
    return am.load(fresh(name, dtype))


def given_to(name: str, side: str = "right") -> dict[str, Tensor]:
    """Texts of 11, 9 and 7 tokens, or all of 11 without padding; T5's decoder has 6."""
    known = "t5" if name in T5 else name.removesuffix("_bias")
    inputs = models.padded(known, side or "right", batch=3, length=11)
    if not side:
        inputs["attention_mask"][:] = 1
    if name in T5:
        inputs["decoder_input_ids"] = models.token_ids("t5", batch=3, length=6, seed=2)
    return inputs


@cache
def truths(name: str, side: str = "right", dtype: torch.dtype = F32) -> list[Truth]:
    """Every layer of a model (or of a stack of T5) run by plain transformers."""
    if name in T5:
        return t5_truths(name, dtype)
    model, inputs, place = plain(name, dtype), given_to(name, side), PLACES[name]
    mask, modules = inputs["attention_mask"].bool(), {}
    for layer, block in enumerate(models.blocks_of(model)):
        modules |= {f"{layer}{path}": block.get_submodule(path) for path in vars(place).values() if type(path) is str}
        modules[f"{layer}"] = block
        if PLACES[name] is _GEMMA:
            modules[f"{layer}raw"] = block.get_submodule("self_attn.o_proj")
    with torch.no_grad(), watched(modules) as found:
        patterns = model(**inputs, output_attentions=True).attentions
    made = []
    for layer, pattern in enumerate(patterns):
        weights = reference.layer_weights(model, layer)
        x = found[f"{layer}"][0]
        attn_in = reference.attention_input(model, layer, x.to(dtype))
        scale = torch.ones_like(x)
        if PLACES[name] is _GEMMA:
            raw = found[f"{layer}raw"][1]
            weight = model.state_dict()[f"model.layers.{layer}.post_attention_layernorm.weight"].double()
            scale = (1 + weight) / (raw.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        truth = Truth(
            weights, x, x, reference.project(attn_in, weights.W_V, weights.b_V).double(), pattern.double(),
            reference.visible(model, mask, layer), mask, mask, scale, found[f"{layer}{place.attn_out}"][1],
            found[f"{layer}{place.mlp_out}"][1].view_as(x), found[f"{layer}{place.before_mlp}"][place.gives].view_as(x),
        )  # fmt: skip
        made.append(truth)
    return made


def t5_truths(stack: str, dtype: torch.dtype) -> list[Truth]:
    model, inputs, place = fresh(stack, dtype), given_to(stack), PLACES[stack]
    model.set_attn_implementation("eager")
    side = model.encoder if stack == "encoder" else model.decoder
    entry = "layer.1" if stack == "cross" else ""
    paths = ["", place.attn_out, place.before_mlp, *filter(None, [place.mlp_out, entry])]
    modules = {f"{n}{path}": block.get_submodule(path) for n, block in enumerate(side.block) for path in paths}
    with torch.no_grad(), watched(modules) as found:
        out = model(**inputs, output_attentions=True, use_cache=False)
    mask = inputs["attention_mask"].bool()
    real = mask if stack == "encoder" else torch.ones(3, 6, dtype=torch.bool)
    key_mask = real if stack == "decoder" else mask
    made = []
    for layer, block in enumerate(side.block):
        weights, (x, _) = t5_weights(block, stack), found[f"{layer}{entry}"]
        norm = block.get_submodule("layer.1" if stack == "cross" else "layer.0").layer_norm.weight.detach().double()
        normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm
        key_stream = out.encoder_last_hidden_state.double() if stack == "cross" else x
        source = key_stream if stack == "cross" else normed
        seen = key_mask[:, None, None].expand(-1, 1, x.shape[1], -1)
        if stack == "decoder":
            seen = seen & torch.ones(6, 6).tril().bool()
        truth = Truth(
            weights, x, key_stream, reference.project(source, [w.double() for w in weights.W_V], None),
            out[f"{stack}_attentions"][layer].double(), seen, real, key_mask, torch.ones_like(x),
            found[f"{layer}{place.attn_out}"][1], found[f"{layer}{place.mlp_out}"][1] if place.mlp_out else None,
            found[f"{layer}{place.before_mlp}"][0], stack == "cross",
        )  # fmt: skip
        made.append(truth)
    return made


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / one.norm() / other.norm())


def by_hand(truth: Truth) -> dict[str, Tensor]:
    """Every statistic of one layer, row by row `[head batch query]`; NaN where it is not defined."""
    batch, heads, queries, keys = truth.pattern.shape
    found = {name: torch.full((heads, batch, queries), math.nan, dtype=F64) for name in STATISTICS}
    found |= {name: torch.full((1, batch, queries), math.nan, dtype=F64) for name in BLOCK_STATISTICS}
    found["top_key"] = torch.full((heads, batch, queries), -1, dtype=torch.int32)
    for b in range(batch):
        begin = next(j for j in range(keys) if truth.key_mask[b, j])
        written = [truth.written(b, h) for h in range(heads)]
        for i in range(queries):
            if not truth.mask[b, i]:
                continue
            x = truth.x[b, i]
            updates = [truth.pattern[b, h, i] @ written[h] * truth.scale[b, i] for h in range(heads)]
            seen = [j for j in range(keys) if truth.visible[b, 0, i, j]]
            for h, u in enumerate(updates):

                def put(name: str, value: Tensor | float, at: tuple[int, int, int] = (h, b, i)) -> None:
                    found[name][at] = value

                put("magnitude", u.norm() / x.norm())
                put("orientation", cosine(u, x))
                part = (u @ x) / (x @ x) * x
                put("along", (u @ x) / (x @ x))
                put("across", (u - part).norm() / x.norm())
                if len(seen) < 2:
                    continue
                top = max(seen, key=lambda j: float(truth.pattern[b, h, i, j]))
                put("top_key", top)
                value, target = written[h][top] * truth.scale[b, i], truth.key_stream[b, top]
                put("target_magnitude", value.norm() / target.norm())
                put("target_orientation", cosine(value, target))
                itself = top == i and not truth.cross
                where = "self" if itself else "first" if top == begin else "elsewhere"
                put(f"magnitude_{'at_' if where != 'elsewhere' else ''}{where}", u.norm() / x.norm())
            out, parts = truth.attn_out[b, i], sum(float(u.norm()) for u in updates)
            # Heads and bias are what attention adds, whatever norm lies between.
            torch.testing.assert_close(torch.stack(updates).sum(0) + truth.bias(b, i), out, rtol=1e-4, atol=2e-5)
            found["attn_magnitude"][0, b, i] = out.norm() / x.norm()
            found["attn_orientation"][0, b, i] = cosine(out, x)
            found["cancellation"][0, b, i] = torch.stack(updates).sum(0).norm() / parts
            if truth.mlp_out is not None:
                mlp, before = truth.mlp_out[b, i], truth.before_mlp[b, i]
                found["mlp_magnitude"][0, b, i] = mlp.norm() / before.norm()
                found["mlp_orientation"][0, b, i] = cosine(mlp, before)
    return found


@cache
def expected(name: str, side: str = "right", dtype: torch.dtype = F32) -> dict[str, Tensor]:
    """`by_hand` of every layer `[layer head batch query]`."""
    layers = [by_hand(truth) for truth in truths(name, side, dtype)]
    return {key: torch.stack([layer[key] for layer in layers]) for key in layers[0]}


def measured(name: str, side: str = "right", dtype: torch.dtype = F32, **options: Any) -> am.results.ResidualUpdates:
    stack = name if name in T5 else None
    return am.residual_updates(hooked("t5" if stack else name, dtype), given_to(name, side), stack=stack, **options)


def require_close(found: Tensor, wanted: Tensor, close: float, what: Any) -> None:
    """Asserts equality up to a share of the largest value, with NaN in the same places."""
    assert found.shape == wanted.shape, what
    assert torch.equal(found.isnan(), wanted.isnan()), what
    size = float(wanted.nan_to_num().abs().max())
    difference = float((found.double() - wanted).nan_to_num().abs().max())
    assert difference <= close * size, (what, difference, size)


def precision(dtype: torch.dtype) -> float:
    # Even in float64, transformers computes the softmax and the variance of RMS norms in float32.
    return 1e-5 if dtype == F32 else 1e-6


@pytest.mark.core
@pytest.mark.parametrize(("name", "side", "dtype"), CASES)
def test_every_row_is_that_of_a_loop(name: str, side: str, dtype: torch.dtype) -> None:
    updates, wanted = measured(name, side, dtype), expected(name, side, dtype)
    assert torch.equal(updates.top_key, wanted["top_key"])
    for statistic in STATISTICS:
        require_close(updates.by_row(statistic), wanted[statistic], precision(dtype), statistic)
    for statistic in BLOCK_STATISTICS:
        require_close(updates.blocks.by_row(statistic), wanted[statistic], precision(dtype), statistic)


# -- means, intervals, choices of rows -----------------------------------------------------------------------


def mean_over(values: Tensor, rows: Tensor) -> Tensor:
    """The mean of `[layer head batch query]` over the selected rows, by a loop; NaN without rows."""
    found = torch.full(values.shape[:2], math.nan, dtype=F64)
    for layer in range(values.shape[0]):
        for head in range(values.shape[1]):
            here = [float(values[layer, head, b, i]) for b, i in rows.nonzero().tolist()]
            known = [value for value in here if not math.isnan(value)]
            if known:
                found[layer, head] = sum(known) / len(known)
    return found


def firsts(mask: Tensor) -> Tensor:
    found = torch.zeros_like(mask)
    for b in range(len(mask)):
        found[b, next(i for i in range(mask.shape[1]) if mask[b, i])] = True
    return found


@pytest.mark.parametrize(
    ("name", "side"), [("bloom", "left"), ("bert", "right"), ("gemma2", "right"), ("cross", "right")]
)
def test_means_leave_out_first_rows_and_padding(name: str, side: str) -> None:
    updates, wanted, mask = measured(name, side), expected(name, side), truths(name, side)[0].mask
    for chosen, rows in ((updates, mask & ~firsts(mask)), (updates.where(first_row=True), mask)):
        frame, blocks = chosen.to_frame(), chosen.blocks.to_frame()
        for statistic in STATISTICS:
            mean = mean_over(wanted[statistic], rows)
            require_close(chosen[statistic].mean, mean, 1e-5, statistic)
            require_close(getattr(chosen, statistic), chosen[statistic].mean, 0, statistic)
            require_close(torch.tensor(frame[statistic].tolist()).view_as(mean), mean, 1e-5, statistic)
        for statistic in BLOCK_STATISTICS:
            mean = mean_over(wanted[statistic], rows)
            require_close(chosen.blocks[statistic].mean, mean, 1e-5, statistic)
            require_close(torch.tensor(blocks[statistic].tolist()), mean[:, 0], 1e-5, statistic)
    heads = updates.magnitude.shape[1]
    assert frame["head"].tolist() == [*range(heads)] * len(updates.layers)
    assert frame["layer"].tolist() == [layer for layer in updates.layers for _ in range(heads)]
    assert "head" not in blocks and blocks["layer"].tolist() == list(updates.layers)


def test_rows_chosen_one_by_one() -> None:
    updates, wanted = measured("llama"), expected("llama")
    rows = torch.zeros(3, 11, dtype=torch.bool)
    for b, i in ((0, 0), (0, 4), (1, 7), (2, 2), (2, 9)):  # the first is a first row, the last is padding
        rows[b, i] = True
    without = rows.clone()
    without[0, 0] = False
    for chosen in (updates.where(rows=rows), updates.blocks.where(rows=rows)):
        for statistic in chosen.quantities:
            require_close(chosen[statistic].mean, mean_over(wanted[statistic], without), 1e-5, statistic)
            whole = chosen.where(first_row=True)[statistic].mean
            require_close(whole, mean_over(wanted[statistic], rows), 1e-5, statistic)
    refuses(r"use `\.blocks\.where\(rows=\.\.\.\)`", lambda: updates.where(rows=rows).blocks)
    refuses(r"each of the \[3, 11\] rows; got a Tensor of torch.bool \[3, 10\]", updates.where, rows=rows[:, 1:])


# -- closed forms, and the rest of the result ----------------------------------------------------------------


def edited(name: str, hooks: dict[Any, Any], ids: Tensor, dtype: torch.dtype = F64) -> am.results.ResidualUpdates:
    model = hooked(name, dtype)
    with model.hooks(hooks):
        return am.residual_updates(model, ids)


def look(pattern: Tensor, at: int) -> Tensor:
    """All rows from `at` on attend to it, those before to the first token."""
    pattern[:] = 0
    pattern[:, :, :at, 0] = 1
    pattern[:, :, at:, at] = 1
    return pattern


@pytest.mark.parametrize("at", [0, 3])
def test_a_stream_of_nothing_measures_nothing(at: int) -> None:
    """An embedding of zeros (a padding token's) leaves nothing to compare with, for the row and for its key."""

    def zero(x: Tensor) -> Tensor:
        x[:, at] = 0
        return x

    ids = models.token_ids("gpt2", batch=2, length=7)
    updates = edited("gpt2", {("resid_pre", 0): zero, ("pattern", 0): partial(look, at=at)}, ids)
    assert (updates.top_key[0, :, :, max(at, 1) :] == at).all()
    for statistic in STATISTICS:
        values = updates.by_row(statistic)[0]
        assert values[..., at].isnan().all(), statistic
        assert values.nan_to_num().abs().max() < 1e4, statistic
        if statistic.startswith("target"):
            assert values[..., at:].isnan().all()
    for statistic in ("attn_magnitude", "attn_orientation"):
        assert updates.blocks.by_row(statistic)[0, :, :, at].isnan().all()
    assert not updates.blocks.by_row("mlp_magnitude").isnan().any()


def test_a_value_of_nothing_has_no_direction() -> None:
    def zero(v: Tensor) -> Tensor:
        v[:, 3, 2] = 0
        return v

    hooks = {("v", 0): zero, ("pattern", 0): partial(look, at=3)}
    updates = edited("gpt2", hooks, models.token_ids("gpt2", batch=2, length=7))
    for statistic in ("orientation", "target_orientation"):
        assert updates.by_row(statistic)[0, 2, :, 3:].isnan().all(), statistic
    for statistic in ("magnitude", "target_magnitude"):
        assert (updates.by_row(statistic)[0, 2, :, 3:] == 0).all(), statistic


def test_heads_that_write_the_same_do_not_cancel_and_opposites_do() -> None:
    model = models.fresh("gpt2", F64)
    with torch.no_grad():
        out, fused = model.transformer.h[0].attn.c_proj, model.transformer.h[0].attn.c_attn
        for head in range(1, 5):  # d_head 4: every head becomes head 0
            for part in range(3):
                start = part * 20
                fused.weight[:, start + 4 * head : start + 4 * head + 4] = fused.weight[:, start : start + 4]
                fused.bias[start + 4 * head : start + 4 * head + 4] = fused.bias[start : start + 4]
            out.weight[4 * head : 4 * head + 4] = out.weight[:4]
        out.bias.fill_(3.0)
    ids = models.token_ids("gpt2", batch=2, length=9)
    same = am.residual_updates(am.load(model), ids).blocks["cancellation"].mean
    assert float(same[0, 0]) == pytest.approx(1, abs=1e-9)
    with torch.no_grad():
        out.weight[4:8] *= -1
        out.weight[8:12] *= -1
    opposite = am.residual_updates(am.load(model), ids).blocks["cancellation"].mean
    assert float(opposite[0, 0]) == pytest.approx(1 / 5, abs=1e-9)
    silent = edited("gpt2", {("v", 1): torch.zeros_like}, ids).blocks["cancellation"].mean
    assert silent.isnan().flatten().tolist() == [False, True, False]


def test_what_it_says_and_what_cannot_be_asked() -> None:
    updates = measured("gpt2")
    assert f"5 heads; mean magnitude {float(updates.magnitude.mean()):.3g} of the stream's norm" in repr(updates)
    assert measured("cross").provenance.options["stack"] == "cross"
    corpus = am.residual_updates(hooked("gpt2", F32), iter(models.token_ids("gpt2")))
    for ask in (lambda: corpus.by_row("magnitude"), lambda: corpus.top_key):
        refuses("not for a corpus", ask, error=MissingPointError)
    refuses(r"`statistic` must be one of magnitude, .*; got 'size'", lambda: updates["size"].mean)
    refuses("`statistic` must be one of magnitude, ", updates.by_row, "cancellation")
    refuses("`statistic` must be one of attn_magnitude, ", lambda: updates.blocks["magnitude"].interval())
    with pytest.raises(InputError, match="`stack` must be one of 'encoder', 'decoder', 'cross'"):
        am.residual_updates(hooked("t5", F32), given_to("cross"))
    refuses("from 0 to 2", measured, "gpt2", layers=[3])
    refuses("are for a corpus", measured, "gpt2", shard=(0, 2))
