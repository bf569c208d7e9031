"""Families whose structure is read from a traced pass, against plain transformers and their raw weights."""

import copy
import sys
from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import tiny
import torch
from caching import cached
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

import attnmech as am
from attnmech.model.files.load import UnprovenWarning
from attnmech.model.structure.families import ARCHITECTURES

KINDS = (
    "gemma", "gemma3", "gemma3_text", "llama4_text", "phi", "phi3", "phimoe", "mixtral", "ministral", "qwen2_moe",
    "qwen3_moe", "qwen3_next", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "smollm3", "cohere",
    "cohere2", "glm4", "helium", "stablelm", "starcoder2", "gpt_bigcode", "gpt_neo", "codegen", "nemotron", "exaone4",
    "seed_oss", "ernie4_5", "arcee", "apertus", "biogpt", "falcon_h1", "granitemoehybrid", "granitemoeshared",
    "nemotron_h", "bitnet", "minimax", "gemma4_text",
)  # fmt: skip
SIDES = dict(zip(KINDS, cycle(("", "right", "left"))))
"""The side of the padding, which alternates from type to type; a third of them has no padding."""
OTHERS = ("phi3", "gpt_bigcode", "olmo2", "falcon_h1", "gemma4_text")
DOUBLE = ("phi3", "gpt_bigcode", "glm4", "falcon_h1")
NO_STREAM = ("minimax", "gemma4_text")
"""Types whose blocks combine attention and stream differently, so that the stream's points are absent."""
NO_HEAD = ("olmo", "nemotron_h", *NO_STREAM)
"""OLMo's norm has no ε as an attribute, so it is not recognised; Nemotron-H ends in a block without attention."""
TABLE = ("codegen", "gpt_neo")
"""Types that the table describes; their attention does not go through transformers' interface."""
F32, F64 = torch.float32, torch.float64
LENGTH = 9
OUT = (
    "self_attn.o_proj",
    "self_attn.dense",
    "self_attn.out_proj",
    "mixer.o_proj",
    "attn.c_proj",
    "attn.out_proj",
    "attention.out_proj",
)


@cached
def raw(kind: str, other: bool = False, dtype: torch.dtype = F32) -> Any:
    """transformers' model in eager attention, shared by the tests, which must not change it."""
    model = tiny.model_of(kind, tiny.OTHER if other else tiny.ONE, dtype=dtype)
    model.set_attn_implementation("eager")
    return model


@cached
def hooked(kind: str, other: bool = False, dtype: torch.dtype = F32) -> am.HookedModel:
    return am.load(raw(kind, other, dtype))


def inputs_of(kind: str, side: str = "") -> dict[str, Tensor]:
    """Texts of 9 and 6 tokens, padded on one side; without a side, both have 9."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(10, 80, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if side:
        mask[1, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


@cached
def acts_of(kind: str, side: str = "", other: bool = False, dtype: torch.dtype = F32) -> am.results.Activations:
    model = hooked(kind, other, dtype)
    wanted = [name for name in ("q", "k", "v", "q_rot", "k_rot", "pattern", "scores", "logits") if present(model, name)]
    return model.run(inputs_of(kind, side), points=wanted)


@cached
def output_of(kind: str, side: str = "", other: bool = False, dtype: torch.dtype = F32) -> Any:
    with torch.no_grad():
        return raw(kind, other, dtype)(**inputs_of(kind, side), use_cache=False, output_attentions=True)


def present(model: am.HookedModel, name: str) -> bool:
    return model.points[name].absent is None


def layers_of(kind: str) -> list[int]:
    return list(hooked(kind).stacks[""].layers)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


# -- certificate and logits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_certificate_holds(kind: str) -> None:
    assert (kind in ARCHITECTURES) == (kind in TABLE)
    certificate = hooked(kind).certificate
    assert certificate.ok, repr(certificate)
    assert certificate.refused == {}
    held = {check.name for check in certificate.checks if check.passed}
    always = {"transformers", "streams", "attentions", "padding", "causal", "projections", "ledger", "softmax", "z",
              "heads", "chain", "pattern edit"}  # fmt: skip
    assert always - ({"streams", "chain"} if kind in NO_STREAM else set()) <= held
    assert ("logits" in held) == (kind not in NO_HEAD)
    assert hooked(kind).causal


@pytest.mark.parametrize(("kind", "side"), [*SIDES.items()])
def test_logits_are_those_of_plain_transformers(kind: str, side: str) -> None:
    real = inputs_of(kind, side)["attention_mask"].bool()
    close(acts_of(kind, side)["logits"][real], output_of(kind, side).logits[real], 2e-5)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_sizes(kind: str) -> None:
    assert hooked(kind, True).certificate.ok
    assert hooked(kind, True).stacks[""].d_head != hooked(kind).stacks[""].d_head
    close(acts_of(kind, "right", True)["logits"][0], output_of(kind, "right", True).logits[0], 2e-5)


@pytest.mark.parametrize("kind", DOUBLE)
def test_in_float64(kind: str) -> None:
    assert hooked(kind, dtype=F64).certificate.ok, repr(hooked(kind, dtype=F64).certificate)
    acts, split = acts_of(kind, dtype=F64), am.decompose_scores(hooked(kind, dtype=F64), inputs_of(kind))
    close(acts["logits"], output_of(kind, dtype=F64).logits, 1e-6)
    assert float((split.residual / split.largest).max()) <= 1e-12


@pytest.mark.parametrize("kind", ["llama4_text", "modernbert"])
def test_families_that_rotate_in_float32_are_certified_in_float64(kind: str) -> None:
    """Their queries and keys are in float32, and so is the ledger's tolerance; a slightly larger error fails."""
    model = hooked(kind, dtype=F64)
    assert model.certificate.ok, repr(model.certificate)
    split = am.decompose_scores(model, inputs_of(kind))
    assert 1e-12 < float((split.residual / split.largest).max()) <= 1e-6


def test_a_rotation_in_float32_excuses_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplies keys by 1 + 1e-5, in float32: a hundred roundings."""
    modeling = sys.modules["transformers.models.cohere.modeling_cohere"]
    rotate = modeling.apply_rotary_pos_emb

    def larger(q: Tensor, k: Tensor, *tables: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, k, *tables, **options)
        return q, (k.float() * (1 + 1e-5)).to(k)

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", larger)
    with pytest.warns(UnprovenWarning):
        model = am.load(tiny.model_of("cohere", dtype=F64))
    assert {"rotary", "ledger"} <= {check.name for check in model.certificate.failed}


@pytest.mark.parametrize("kind", ["phi3", "falcon_h1", "nanochat", "minicpm3"])
def test_in_bfloat16(kind: str) -> None:
    model = hooked(kind, dtype=torch.bfloat16)
    assert model.certificate.ok, repr(model.certificate)
    assert model.architecture == hooked(kind).architecture
    close(acts_of(kind, dtype=torch.bfloat16)["logits"], output_of(kind, dtype=torch.bfloat16).logits, 0.05)


def attentions_of(kind: str, side: str = "") -> list[Tensor]:
    """Eager transformers' patterns of the layers with attention; MiniMax also returns those of its linear layers."""
    found = [each for each in output_of(kind, side).attentions if each is not None]
    layers = layers_of(kind)
    return found if len(found) == len(layers) else [found[layer] for layer in layers]


# -- patterns, scores and the ledger -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_are_those_of_eager_transformers(kind: str) -> None:
    attentions = attentions_of(kind, "right")
    rows = inputs_of(kind, "right")["attention_mask"].bool()[:, None, :, None]
    for layer, theirs in zip(layers_of(kind), attentions, strict=True):
        close(acts_of(kind, "right")["pattern", layer] * rows, theirs * rows, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_terms_of_the_ledger_make_transformers_pattern(kind: str) -> None:
    split = am.decompose_scores(hooked(kind), inputs_of(kind))
    attentions = attentions_of(kind)
    for place, (layer, theirs) in enumerate(zip(layers_of(kind), attentions, strict=True)):
        total = torch.stack([term[:, place].expand(theirs.shape) for term in split.terms.values()]).sum(dim=0)
        scores = acts_of(kind)["scores", layer]
        seen = theirs > 0
        close(total[seen], scores[seen].to(total), 1e-5)
        close(total.softmax(dim=-1), theirs.to(total), 5e-5)


# -- queries, keys and values --------------------------------------------------------------------------------


@cache
def attended(kind: str) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """q, k and v `[batch position head d_head]` as transformers passes them to its attention function, by layer."""
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    model = copy.deepcopy(raw(kind))
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def keep(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        found[module.layer_idx] = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return inner(module, q, k, v, mask, **options)

    AttentionMaskInterface.register("kept_for_a_test", eager_mask)
    ALL_ATTENTION_FUNCTIONS.register("kept_for_a_test", keep)
    model.set_attn_implementation("kept_for_a_test")
    with torch.no_grad():
        model(**inputs_of(kind), use_cache=False)
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TABLE])
def test_q_rot_k_rot_and_v_are_what_transformers_hands_to_its_attention(kind: str) -> None:
    acts, given = acts_of(kind), attended(kind)
    assert sorted(given) == layers_of(kind)
    for layer, (q, k, v) in given.items():
        rotated = present(hooked(kind), "q_rot")
        close(acts["q_rot" if rotated else "q", layer], q, 1e-5)
        close(acts["k_rot" if rotated else "k", layer], k, 1e-5)
        close(acts["v", layer], v, 1e-5)


def _phi3(outputs: dict[str, Tensor], heads: int, kv: int, d: int) -> tuple[Tensor, ...]:
    return outputs["qkv_proj"].split([heads * d, kv * d, kv * d], dim=-1)


def _bigcode(outputs: dict[str, Tensor], heads: int, kv: int, d: int) -> tuple[Tensor, ...]:
    return outputs["c_attn"].split([heads * d, d, d], dim=-1)


def _codegen(outputs: dict[str, Tensor], heads: int, kv: int, d: int) -> tuple[Tensor, ...]:
    parts = outputs["qkv_proj"].unflatten(-1, (4, -1)).split(heads * d // 4, dim=-1)
    return tuple(parts[place].flatten(-2) for place in (0, 2, 1))


def _separate(outputs: dict[str, Tensor], heads: int, kv: int, d: int) -> tuple[Tensor, ...]:
    return tuple(outputs[f"{name}_proj"] for name in "qkv")


def _gated(outputs: dict[str, Tensor], heads: int, kv: int, d: int) -> tuple[Tensor, ...]:
    q = outputs["q_proj"].unflatten(-1, (heads, 2 * d))[..., :d].flatten(-2)
    return q, outputs["k_proj"], outputs["v_proj"]


ORDERS: dict[str, tuple[str, Callable[..., tuple[Tensor, ...]]]] = {
    "phi3": ("model.layers.2.self_attn", _phi3),
    "gpt_bigcode": ("transformer.h.2.attn", _bigcode),
    "codegen": ("transformer.h.2.attn", _codegen),
    "glm4": ("model.layers.2.self_attn", _separate),
    "olmo2": ("model.layers.2.self_attn", _separate),
    "qwen3_next": ("model.layers.3.self_attn", _gated),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_q_k_and_v_are_columns_of_the_model_s_own_projections(kind: str) -> None:
    path, split = ORDERS[kind]
    attention, outputs = raw(kind).get_submodule(path), dict[str, Tensor]()
    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
        for name, module in attention.named_children()
    ]
    try:
        with torch.no_grad():
            raw(kind)(**inputs_of(kind), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    stack, layer = hooked(kind).stacks[""], int(path.split(".")[2])
    heads, kv, d = stack.n_heads, stack.n_kv_heads, stack.d_head
    assert (kind == "gpt_bigcode") == (kv == 1)
    for name, value in zip("qkv", split(outputs, heads, kv, d), strict=True):
        ours = acts_of(kind)[name, layer]
        close(ours, value.unflatten(-1, (-1, d)), 1e-6)
        assert ours.shape[2] == (heads if name == "q" else kv)


# -- heads ---------------------------------------------------------------------------------------------------


def without_head(kind: str, layer: int, head: int) -> Any:
    """transformers' model with the columns of W_O that read one head set to 0."""
    model, d = copy.deepcopy(raw(kind)), hooked(kind).stacks[""].d_head
    named = {path: module for path, module in model.named_modules() if "vision" not in path and path.endswith(OUT)}
    (out,) = (module for path, module in named.items() if f".{layer}." in path)
    with torch.no_grad():
        (out.weight if isinstance(out, Conv1D) else out.weight.T)[head * d : head * d + d] = 0
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_a_head_is_zeroing_its_columns_of_w_o(kind: str) -> None:
    stack = hooked(kind).stacks[""]
    layer, head = stack.layers[0], stack.n_heads - 2
    with hooked(kind).intervene(am.Intervention.zero([(layer, head)])):
        ours = hooked(kind).run(inputs_of(kind, "right")).logits
    with torch.no_grad():
        theirs = without_head(kind, layer, head)(**inputs_of(kind, "right"), use_cache=False).logits
    real = inputs_of(kind, "right")["attention_mask"].bool()
    assert ours is not None
    close(ours[real], theirs[real], 2e-5)
    assert float((ours - acts_of(kind, "right")["logits"])[real].abs().max()) > 1e-2 * float(theirs.abs().max())
