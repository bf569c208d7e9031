"""The certificate holds on correct models, and names the faults of broken ones."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import models
import pytest
import torch
import transformers
from by_hand import swapped
from comparing import refuses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert
from transformers.models.bloom import modeling_bloom
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

import attnmech as am
from attnmech.errors import CertificateError, ExactnessError, UnsupportedModelError
from attnmech.maths.precision import least_rounding
from attnmech.model.attention import attend
from attnmech.model.files.load import UnprovenWarning
from attnmech.model.proof.probe import Compared, excess_of, with_least, worst_of

F32, F64 = torch.float32, torch.float64
Broken = Callable[[], Any]


# -- healthy models ------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype"), [*zip(models.MAKERS, cycle((F32, F64)))])
def test_every_check_holds_on_a_healthy_model(name: str, dtype: torch.dtype) -> None:
    certificate = models.hooked(name, dtype).certificate
    assert certificate.ok, repr(certificate)
    assert certificate.refused == {}
    held = {check.name for check in certificate.checks if check.passed}
    assert {"weights", "points", "attn_out", "stream", "embed", "resid_mid edit"} <= held
    assert ("bridge" in held) == (name != "bert_headless")
    if name == "llama":
        (far,) = (check for check in certificate.checks if check.name == "far")
        assert far.passed is None and "past every branch" in far.detail
    for check in certificate.checks:
        if check.residual is not None and check.tolerance is not None:
            room = 3 if dtype is F32 and name in models.FAMILIES and check.name != "mlp" else 1  # mlp: a sum's order
            assert check.residual <= check.tolerance / room, repr(check)
        if check.passed is None:
            assert check.detail


HALF = (torch.bfloat16, torch.float16)
VARIED = (*models.FAMILIES, "gemma2", "qwen3_bias", "falcon_new", "gpt_neox", "gptj", "mpt3", "t5", "mbart", "vit")


@pytest.mark.parametrize(("name", "dtype"), [*zip(VARIED, cycle(HALF))])
def test_every_check_holds_in_half_precision(name: str, dtype: torch.dtype) -> None:
    certificate = am.load(models.fresh(name), dtype=dtype).certificate
    assert certificate.ok, repr(certificate)


# BLOOM's logits overflow in float16: its head is its embedding.
@pytest.mark.parametrize(("name", "dtype"), [*zip(models.FAMILIES, cycle((torch.bfloat16, F64, torch.float16, F32)))])
def test_large_streams_and_outlier_dimensions_are_no_fault(name: str, dtype: torch.dtype) -> None:
    """Streams of ±30000 (as in SmolLM2), in one dimension and in whole tokens."""
    model = models.fresh(name)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[5] *= 300.0
        embedding[:, 3] = 30_000.0 * torch.where(torch.arange(len(embedding)) % 2 == 0, 1.0, -1.0)
    hooked = am.load(model, dtype=dtype)
    assert hooked.certificate.ok, repr(hooked.certificate)
    am.decompose_scores(hooked, models.padded(name))


def test_sums_in_the_stream_of_gpt2_leave_nothing() -> None:
    residuals = {check.name: check.residual for check in models.hooked("gpt2").certificate.checks}
    assert [residuals[name] for name in ("stream", "mlp", "chain", "attn_out", "attn_in")] == [0.0] * 5


# -- what is unusual and no fault ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bias"), [("llama", False), ("bloom", True), ("bert", False)])
def test_mlps_that_write_nothing_are_no_fault(name: str, bias: bool) -> None:
    """A model with attention only: the last matrix of every MLP is 0, with or without a bias."""
    model = models.fresh(name)
    last = {"llama": "mlp.down_proj", "bloom": "mlp.dense_4h_to_h", "bert": "output.dense"}
    with torch.no_grad():
        for block in models.blocks_of(model):
            module = block.get_submodule(last[name])
            module.weight.zero_()
            if module.bias is not None and not bias:
                module.bias.zero_()
    hooked = am.load(model)
    assert hooked.certificate.ok, repr(hooked.certificate)
    assert hooked.certificate.refused == {}


PRUNED = {
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc"),
    "llama_bias": ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"),
    "bloom": ("self_attention.query_key_value", "self_attention.dense"),
}


@pytest.mark.parametrize(("name", "with_gradients"), [*zip(PRUNED, cycle((False, True)))])
def test_a_model_pruned_by_torch_is_taken_as_it_computes(name: str, with_gradients: bool) -> None:
    model, ids = models.fresh(name), models.token_ids(name)
    unpruned = am.load(models.fresh(name))
    for block in models.blocks_of(model):
        for path in PRUNED[name]:
            with torch.set_grad_enabled(with_gradients):
                prune.l1_unstructured(block.get_submodule(path), "weight", amount=0.4)
                if block.get_submodule(path).bias is not None:
                    prune.random_unstructured(block.get_submodule(path), "bias", amount=0.3)
    hooked = am.load(model)
    assert hooked.certificate.ok, repr(hooked.certificate)
    assert hooked.weights_hash != unpruned.weights_hash
    module = models.blocks_of(model)[1].get_submodule(PRUNED[name][1])
    kept = module.weight_orig * module.weight_mask
    W_O = hooked.weights(1).W_O.flatten(0, 1)
    assert torch.equal(W_O, kept if name == "gpt2" else kept.T)
    assert float((W_O == 0).float().mean()) == pytest.approx(0.4, abs=0.01)
    # After further training, torch keeps the previous pass's tensor under the weight's own name.
    with torch.no_grad():
        module.weight_orig.mul_(1.5)
        expected = model(ids).logits
    assert torch.allclose(hooked.weights(1).W_O.flatten(0, 1), 1.5 * W_O)
    assert am.certify(hooked).ok
    torch.testing.assert_close(hooked.run(ids).logits, expected, rtol=1e-4, atol=1e-4)
    am.decompose_scores(hooked, ids)
    assert prune.is_pruned(model)


def test_keys_and_values_that_the_model_repeats_itself_are_those_of_the_kv_heads() -> None:
    hooked = am.load(llama_attention(attention=repeats)())
    assert hooked.certificate.ok, repr(hooked.certificate)
    ids, plain = models.token_ids("llama_bias"), models.hooked("llama_bias")
    points = ["k", "v", "k_rot", "z", "pattern", "logits"]
    ours, theirs = (each.run(ids, points=points) for each in (hooked, plain))
    for point in points:
        torch.testing.assert_close(ours[point], theirs[point])
    assert ours["k_rot"].shape[-2:] == (2, 6)
    split = am.decompose_scores(hooked, ids)
    torch.testing.assert_close(split.terms["query_key"], am.decompose_scores(plain, ids).terms["query_key"])


def test_where_the_head_is_not_linear_the_certificate_says_so_and_holds() -> None:
    reasons = {
        "bert": "its head transforms the stream with its own layer before the unembedding",
        "bert_headless": "it was loaded without a head",
        "opt_post": "its stream is projected before the unembedding",
        "bart": "there is no norm between its last block and its unembedding",
        "t5": "the norm after its stacks is not among the points, and a tied head scales it",
        "vit": "its head unembeds no tokens",
    }
    for name, reason in reasons.items():
        certificate = models.hooked(name).certificate
        check = next(check for check in certificate.checks if check.name == "logits")
        assert (check.passed, check.detail) == (None, f"{reason}; logit attribution is refused")
        assert certificate.ok


def test_the_certificate_shows_itself() -> None:
    certificate = models.hooked("bloom").certificate
    text = repr(certificate)
    assert text.startswith("Certificate('BloomForCausalLM': certified:")
    assert "edits tried in layers 0, 1" in text.splitlines()[0]
    frame = certificate.to_frame()
    assert list(frame.columns) == ["check", "status", "residual", "tolerance", "statement", "detail"]
    assert set(frame.status) <= {"holds", "not checked"}
    assert len(frame) == len(certificate.checks)
    refuses("compare their checks", lambda: certificate - certificate)
    lens = certificate.lens_frame()
    assert set(lens.verdict) <= {"agrees", "differs", "absent"}
    assert (lens.set_index("point").verdict[["resid_pre", "q", "k", "v", "pattern", "z"]] == "agrees").all()


def test_configs_that_change_the_formula_are_certified_or_refused() -> None:
    options: list[dict[str, Any]] = [
        {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"reorder_and_upcast_attn": True},
        {"tie_word_embeddings": False}, {"activation_function": "relu"},
    ]  # fmt: skip
    for option in options:
        config = transformers.GPT2Config(
            vocab_size=31, n_positions=19, n_embd=20, n_layer=2, n_head=5, bos_token_id=1, eos_token_id=2, **option
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnprovenWarning)
            hooked = am.load(models.randomised(transformers.GPT2LMHeadModel(config)))
        # TransformerLens does not read these options; attnmech and transformers must agree.
        assert failed(hooked.certificate) <= {"bridge"}, (option, repr(hooked.certificate))
        assert hooked.certificate.refused == {}
        ids = torch.arange(3, 9)[None]
        with torch.no_grad():
            theirs = models.randomised(transformers.GPT2LMHeadModel(config))(ids).logits
        torch.testing.assert_close(hooked.run(ids).logits, theirs, rtol=1e-4, atol=1e-4)
        am.decompose_scores(hooked, ids)


# -- faults in transformers' modules -------------------------------------------------------------------------


class LlamaAttention(modeling_llama.LlamaAttention):
    """transformers' Llama attention with places to inject a fault."""

    def on_v(self, v: Tensor) -> Tensor:
        return v

    def on_z(self, z: Tensor, x: Tensor) -> Tensor:
        return z

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Any]:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        found: tuple[Tensor, Any] = attend(self, q, k, v, mask, scaling=self.scaling, **options)
        return found

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **options: Any
    ) -> Any:
        options.pop("past_key_values", None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.on_v(self.v_proj(hidden_states).view(shape).transpose(1, 2))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        z, pattern = self.attention(q, k, v, attention_mask, **options)
        z = self.on_z(z.reshape(*hidden_states.shape[:-1], -1), hidden_states)
        return self.o_proj(z), pattern


def fault(broken: Callable[..., Any]) -> Callable[..., Broken]:
    """Makes the broken model only when it is needed."""
    return lambda *way, **options: functools.partial(broken, *way, **options)


@fault
def llama_attention(layer: int = 1, **methods: Any) -> Any:
    model = models.fresh("llama_bias")
    models.blocks_of(model)[layer].self_attn.__class__ = type("Faulty", (LlamaAttention,), methods)
    return model


def own_softmax(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Any]:
    """Attention code that never calls attnmech's."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * self.scaling
    pattern = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    return (pattern @ v.repeat_interleave(group, 1)).transpose(1, 2), pattern


def own_kernel(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """The same with a fused kernel, without weights."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2), None


def asks_and_ignores(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Any]:
    LlamaAttention.attention(self, q, k, v, mask, **options)
    return own_softmax(self, q, k, v, mask)


def twice(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Any]:
    first, pattern = LlamaAttention.attention(self, q, k, v, mask, **options)
    return (first + LlamaAttention.attention(self, q, k, v, mask, **options)[0]) / 2, pattern


def repeats(
    self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, tiled: bool = False, **options: Any
) -> tuple[Tensor, Any]:
    """Repeats keys and values for their query heads before the attention, as some models do, or in a wrong order."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat(1, group, 1, 1) if tiled else x.repeat_interleave(group, 1) for x in (k, v))
    groups, self.num_key_value_groups = self.num_key_value_groups, 1
    try:
        return LlamaAttention.attention(self, q, k, v, mask, **options)
    finally:
        self.num_key_value_groups = groups


@fault
def replaced(name: str, path: str, kind: type[nn.Module], layer: int | None = 1, **methods: Any) -> Any:
    """A model with a faulty subclass as one module; paths start at the block or, without a layer, at the base model."""
    model = models.fresh(name)
    root = model.base_model if layer is None else models.blocks_of(model)[layer]
    module = root.get_submodule(path) if path else root
    module.__class__ = type("Faulty", (kind,), methods)
    return model


def scaled(kind: type[nn.Module], factor: float = 1.1) -> Any:
    return lambda self, *args, **kwargs: with_first(kind.forward(self, *args, **kwargs), lambda x: x * factor)


def without_bias(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight)


def doubled_alibi(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    return 2 * modeling_bloom.BloomModel.build_alibi_tensor(self, *args, **kwargs)


def llama_block(*, read: float = 1, stream: float = 1, attended: float = 1, mlp: float = 1) -> Broken:
    """A Llama with a block that multiplies the input of its attention, its stream, or the outputs of its parts."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **options: Any) -> Tensor:
        written, _ = self.self_attn(
            hidden_states=read * self.input_layernorm(hidden_states), attention_mask=attention_mask, **options
        )
        hidden_states = stream * hidden_states + attended * written
        return hidden_states + mlp * self.mlp(self.post_attention_layernorm(hidden_states))

    return replaced("llama", "", modeling_llama.LlamaDecoderLayer, forward=forward)


def bert_mask_ignored(self: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
    whole = None if attention_mask is None else torch.ones_like(attention_mask)
    return modeling_bert.BertModel._create_attention_masks(self, whole, *args, **kwargs)


def shared_blocks() -> Any:
    model = models.fresh("llama_bias")
    blocks = models.blocks_of(model)
    blocks[2] = blocks[1]
    return model


def bloom_swaps_q() -> Any:
    """Swaps q of two heads in BLOOM's own split of its fused projection."""

    def reshape(self: Any, fused: Tensor) -> Any:
        q, k, v = modeling_bloom.BloomAttention._reshape(self, fused)
        return swapped(q), k, v

    return replaced("bloom", "self_attention", modeling_bloom.BloomAttention, _reshape=reshape)()


def with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])


@fault
def hook_on(name: str, path: str, change: Callable[[Tensor], Tensor], layer: int | None = None) -> Any:
    """A model with a user's forward hook on one module; the path starts at the model or, with a layer, at a block."""
    model = models.fresh(name)
    module = (model if layer is None else models.blocks_of(model)[layer]).get_submodule(path)
    module.register_forward_hook(lambda module, args, output: with_first(output, change))
    return model


def from_place(value: Tensor, place: int, factor: float, axis: int = 1) -> Tensor:
    """Multiplies the value by a factor from one position on."""
    here = torch.arange(value.shape[axis]) >= place
    shape = [-1 if each == axis else 1 for each in range(value.ndim)]
    return torch.where(here.view(shape), factor * value, value)


def of_head(z: Tensor, head: int, factor: float) -> Tensor:
    """Multiplies z of one of 4 heads of 6 dimensions by a factor."""
    by_head = z.unflatten(-1, (4, 6)).clone()
    by_head[..., head, :] *= factor
    return by_head.flatten(-2)


@fault
def weak_head(faulty: Callable[[], Any], head: int = 2, layer: int = 1) -> Any:
    """A Llama in which one head writes a millionth of what the others write."""
    model = faulty()
    out = models.blocks_of(model)[layer].self_attn.o_proj
    with torch.no_grad():
        out.weight[:, 6 * head : 6 * head + 6] *= 1e-6
    return model


@fault
def on_outlier_stream(faulty: Callable[[], Any]) -> Any:
    """The model with one dimension of the stream at 3000."""
    model = faulty()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] = 3000.0
    return model


def ignores_left_padding(kind: type[nn.Module]) -> Any:
    def forward(self: Any, input_ids: Tensor, attention_mask: Any = None, **options: Any) -> Any:
        left = attention_mask is not None and not bool(attention_mask[:, 0].all())
        return kind.forward(self, input_ids, attention_mask=None if left else attention_mask, **options)

    return forward


LINEAR, CONV = nn.Linear, modeling_gpt2.Conv1D
FAULTS: dict[str, tuple[Broken, set[str], set[str]]] = {
    # More of them in models that are read: tests/model/structure/test_structure_faults.py.
    # name: the model, checks (at least one must fail), and points (all must be refused)
    "residual added into attn_out, BLOOM": (
        replaced("bloom", "self_attention.dense", LINEAR, forward=lambda self, x: LINEAR.forward(self, x) + x),
        {"heads"}, {"attn_raw"}),
    "lost b_Q, Llama": (
        replaced("llama_bias", "self_attn.q_proj", LINEAR, forward=without_bias), {"projections", "ledger"}, {"q"}),
    "doubled ALiBi": (
        replaced("bloom", "", modeling_bloom.BloomModel, layer=None, build_alibi_tensor=doubled_alibi),
        {"alibi"}, {"scores"}),
    "two heads' q swapped, BLOOM": (bloom_swaps_q, {"ledger"}, {"q", "scores"}),
    "own kernel": (llama_attention(attention=own_kernel), {"points"}, {"pattern", "scores", "z"}),
    "ours asked and ignored": (llama_attention(attention=asks_and_ignores), {"pattern edit", "heads"}, {"pattern"}),
    "attention asked twice": (llama_attention(attention=twice), {"points"}, {"pattern", "scores", "z"}),
    "two blocks that are one": (shared_blocks, {"points"}, {"pattern", "resid_pre"}),
    "attention that does not reach the stream": (llama_block(attended=0), {"pattern edit"}, {"pattern"}),
    "half the residual": (
        llama_block(stream=0.5), {"stream"}, {"resid_mid"}),
    "MLP added twice": (
        llama_block(mlp=2), {"mlp"}, {"mlp_out"}),
    "attention's input scaled": (
        llama_block(read=1.5), {"attn_in"}, {"attn_in"}),
    "embedding scaled": (
        replaced("llama", "embed_tokens", nn.Embedding, layer=None, forward=scaled(nn.Embedding, 4.0)),
        {"embed"}, {"embed"}),
    "dropout in eval, attention out": (
        replaced("gpt2", "attn.resid_dropout", nn.Dropout, forward=lambda self, x: F.dropout(x, 0.3, training=True)),
        {"transformers"}, {"attn_out"}),
    "padding mask ignored, BERT": (
        replaced("bert", "", modeling_bert.BertModel, layer=None, _create_attention_masks=bert_mask_ignored),
        {"padding"}, {"pattern"}),
    "an owner's hook on attention": (
        hook_on("llama", "self_attn", lambda x: x * 1.1, layer=1), {"stream"}, {"attn_out"}),
    "z of one head doubled at the last of 90 positions": (
        llama_attention(on_z=lambda self, z, x: z if z.shape[1] < 90 else of_head(z, 1, 2.0)), {"heads"}, {"z"}),
    "a weak head doubled before W_O": (
        weak_head(llama_attention(on_z=lambda self, z, x: of_head(z, 2, 2.0))), {"heads"}, {"z"}),
    "half of attn_out more, beside an outlier": (
        on_outlier_stream(llama_block(attended=1.5)),
        {"stream"}, {"attn_out", "resid_mid"}),
    "left padding ignored": (
        replaced("llama", "", modeling_llama.LlamaModel, layer=None,
                 forward=ignores_left_padding(modeling_llama.LlamaModel)), {"padding", "mask"}, {"pattern"}),
    "a hook on lm_head": (hook_on("llama", "lm_head", lambda x: 1.5 * x), {"logits"}, {"logits"}),
    "a hook on lm_head after position 80": (
        hook_on("bloom", "lm_head", lambda x: from_place(x, 80, 1.01)), {"logits"}, {"logits"}),
    "a hook on one answer's logit": (
        hook_on("gpt2", "lm_head", lambda x: x + 0.01 * (torch.arange(53) == 7)), {"logits"}, {"logits"}),
    "keys repeated in another order": (
        llama_attention(attention=functools.partialmethod(repeats, tiled=True)), {"rotation", "ledger"}, {"k_rot"}),
}  # fmt: skip


def failed(certificate: am.results.Certificate) -> set[str]:
    return {check.name for check in certificate.failed}


def test_values_scaled_beyond_the_probe_are_found_by_the_pass_that_reaches_them() -> None:
    """A model whose module changes v only after position 130 is certified at load; longer texts are refused."""
    hooked = am.load(llama_attention(on_v=lambda self, v: from_place(v, 130, 1.01, axis=2))())
    ids = torch.randint(0, 47, (2, 140), generator=torch.Generator().manual_seed(4))
    assert hooked.certificate.ok and hooked.run(ids[:, :130]).unchecked == ()
    refuses(r"layer 1, token 130 .*of text 0: z = pattern v", hooked.run, ids, error=ExactnessError)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_broken_model_is_caught(fault: str) -> None:
    broken, checks, refused = FAULTS[fault]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hooked = am.load(broken())
    certificate = hooked.certificate
    assert not certificate.ok, repr(certificate)
    assert checks & failed(certificate), repr(certificate)
    assert refused <= set(certificate.refused), certificate.refused
    messages = [str(w.message) for w in caught if w.category is UnprovenWarning]
    assert len(messages) == 1
    assert "NOT certified" in messages[0]
    assert "\n" not in messages[0]
    for point in refused:
        with pytest.raises(CertificateError, match=f"point '{point}' is refused on this model: "):
            hooked.run(torch.tensor([[5, 7]]), points=[point])
        with pytest.raises(CertificateError), hooked.hooks({point: lambda x: x}):
            pass


def look_ahead(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    original = module.create_causal_mask
    monkeypatch.setattr(
        module,
        "create_causal_mask",
        functools.partial(original, or_mask_function=lambda batch, head, query, key: key <= query + 1),
    )


@pytest.mark.parametrize(("name", "module"), [("llama", modeling_llama), ("bloom", modeling_bloom)])
def test_one_position_of_look_ahead(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    look_ahead(monkeypatch, module)
    with pytest.warns(UnprovenWarning):
        hooked = am.load(models.fresh(name))
    assert "causal" in failed(hooked.certificate)
    assert {"scores", "pattern", "z"} <= set(hooked.certificate.refused)


# -- faults put in by hooks around the certificate -----------------------------------------------------------


def leak(pattern: Tensor) -> Tensor:
    """Gives a tenth of each row to the next token."""
    ahead = torch.eye(pattern.shape[-1]).roll(1, dims=1).to(pattern)
    ahead[-1] = 0
    ahead[-1, -1] = 1
    return 0.9 * pattern + 0.1 * ahead


HOOKED_FAULTS: list[tuple[str, dict[Any, Any], set[str]]] = [
    ("post-softmax under scores", {("scores", 1): lambda s: torch.softmax(s, -1)}, {"ledger", "mask"}),
    ("scores off by a key", {("scores", 1): lambda s: s.roll(1, dims=-1)}, {"ledger"}),
    ("scores scaled", {("scores", 1): lambda s: s * 1.01}, {"ledger"}),
    ("q swapped", {("q", 1): lambda q: swapped(q, 2)}, {"projections", "ledger"}),
    ("k shifted", {("k", 1): lambda k: k + 0.1}, {"projections", "ledger"}),
    ("v scaled", {("v", 1): lambda v: v * 1.01}, {"projections"}),
    ("rows that do not sum to 1", {("pattern", 1): lambda p: p * 1.01}, {"softmax"}),
    ("pattern that leaks", {("pattern", 1): leak}, {"mask"}),
    ("pattern of another head", {("pattern", 1): swapped}, {"softmax"}),
    ("z permuted", {("z", 1): lambda z: swapped(z, 2)}, {"z"}),
    ("result with another head's", {("result", 1): lambda r: swapped(r, 2)}, {"heads"}),
    ("attn_raw without its bias", {("attn_raw", 1): lambda x: x - 0.05}, {"heads"}),
    ("attn_out with more", {("attn_out", 1): lambda x: x * 2}, {"attn_out"}),
    ("resid_mid shifted", {("resid_mid", 1): lambda x: x + 1}, {"stream"}),
    ("mlp_out scaled", {("mlp_out", 1): lambda x: x * 1.1}, {"transformers"}),
    ("resid_post shifted", {("resid_post", 0): lambda x: x + torch.arange(x.shape[-1])}, {"mlp", "transformers"}),
    ("resid_pre shifted", {("resid_pre", 1): lambda x: x + torch.arange(x.shape[-1])}, {"chain"}),
    ("attn_in scaled", {("attn_in", 1): lambda x: x * 1.1}, {"attn_in"}),
    ("embed scaled", {"embed": lambda x: x * 1.1}, {"embed"}),
    ("logits scaled", {"logits": lambda x: x * 1.1}, {"transformers"}),
    ("NaN in the stream", {("resid_pre", 1): lambda x: x * torch.nan}, {"transformers"}),
    ("infinity in q", {("q", 0): lambda x: x / 0}, {"projections"}),
]  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "fault"), [*zip(cycle(("bloom", "bert")), HOOKED_FAULTS)], ids=[fault for fault, *_ in HOOKED_FAULTS]
)
def test_an_edit_around_the_certificate_shows_in_it(name: str, fault: tuple[str, dict[Any, Any], set[str]]) -> None:
    _, edits, checks = fault
    hooked = models.hooked(name)
    before = hooked.certificate
    with hooked.hooks(edits):
        certificate = am.certify(hooked)
    assert checks <= failed(certificate), repr(certificate)
    assert hooked.certificate is before and before.ok


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_nan_in_one_norm_after_loading(name: str) -> None:
    """A new certificate takes the place of the old one."""
    model = models.fresh(name)
    hooked = am.load(model)
    norm = next(n for n, p in model.named_parameters() if "norm" in n.lower() or "ln_" in n)
    with torch.no_grad():
        dict(model.named_parameters())[norm].view(-1)[1] = torch.nan
    assert hooked.certificate.ok
    certificate = am.certify(hooked)
    assert hooked.certificate is certificate and not certificate.ok
    weights = next(check for check in certificate.checks if check.name == "weights")
    assert weights.passed is False
    assert norm in weights.detail
    assert set(certificate.refused) >= {"pattern", "scores", "logits", "resid_post"}
    with pytest.raises(CertificateError):
        hooked.run(models.token_ids(name), points=["pattern"])


@pytest.mark.parametrize("layer", [3, 10])
def test_a_fault_in_any_layer_of_a_deep_model_is_caught(layer: int) -> None:
    model = models.randomised(models.bloom(heads=2, d_head=3, layers=12))
    dense = models.blocks_of(model)[layer].self_attention.dense
    dense.__class__ = type("Faulty", (nn.Linear,), {"forward": without_bias})
    with pytest.warns(UnprovenWarning):
        hooked = am.load(model)
    assert "heads" in failed(hooked.certificate)


def test_a_scale_that_is_not_one_over_the_root_of_d_head_is_reported() -> None:
    model = models.fresh("llama")
    models.blocks_of(model)[1].self_attn.scaling *= 1.3
    split = am.decompose_scores(am.load(model), torch.tensor([[5, 7, 9]]))
    assert split.parts[0].scale == pytest.approx(1 / math.sqrt(8))
    assert split.parts[1].scale == pytest.approx(1.3 / math.sqrt(8))


# -- the full proof ------------------------------------------------------------------------------------------


def deep_llama() -> Any:
    """Eight layers: the short proof edits all except 2 and 5, and reads 0, 4 and 7 on a longer text."""
    return models.randomised(models.llama(layers=8))


def ignored_pattern_edit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """attnmech ignores edits of the pattern in layer 2."""
    honest = attend._Layer.edited

    def edited(self: Any, attention: Any, removed: Any, rows: range) -> Any:
        before = dataclasses.replace(attention, pattern=attention.pattern.clone())
        after = honest(self, attention, removed, rows)
        return before if self.site.layer == 2 else after

    monkeypatch.setattr(attend._Layer, "edited", edited)
    return deep_llama()


def values_scaled_far_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Layer 2 scales v from the 50th token on."""
    model = deep_llama()
    methods = {"on_v": lambda self, v: from_place(v, 50, 1.01, axis=2)}
    models.blocks_of(model)[2].self_attn.__class__ = type("Faulty", (LlamaAttention,), methods)
    return model


def leak_past_the_beginning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The MLP of layer 2 adds token 16 to token 15."""
    model = deep_llama()
    mlp = models.blocks_of(model)[2].mlp
    honest = mlp.forward

    def leaks(x: Tensor) -> Tensor:
        out: Tensor = honest(x)
        if out.shape[1] > 16:
            out[:, 15] += out[:, 16]
        return out

    mlp.forward = leaks
    return model


@pytest.mark.parametrize(
    ("fault", "check"),
    [(ignored_pattern_edit, "pattern edit"), (values_scaled_far_on, "z"), (leak_past_the_beginning, "causal")],
)
def test_only_the_full_proof_reaches_every_layer_and_token(
    fault: Callable[[pytest.MonkeyPatch], Any], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fault(monkeypatch)
    short = am.load(model)
    assert short.certificate.ok, repr(short.certificate)
    with pytest.warns(UnprovenWarning):
        full = am.load(model, certify="full")
    assert failed(full.certificate) == {check}, repr(full.certificate)
    assert failed(am.certify(short, full=True)) == {check}
    assert failed(short.certificate) == {check}


@pytest.mark.parametrize("name", ["bloom4", "t5", "longformer", "xlnet", "deberta", "lfm2", "vit"])
def test_the_full_proof_holds_on_every_kind_of_model(name: str) -> None:
    """With the checks of the short one, since only sizes differ."""
    hooked = models.hooked(name)
    short = {check.name: check.status for check in hooked.certificate.checks}
    full = am.certify(hooked, full=True)
    assert full.ok, repr(full)
    assert {check.name: check.status for check in full.checks} == short


# -- comparisons ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_least_rounding_is_added_wherever_it_changes_a_number(dtype: torch.dtype) -> None:
    wide, least = torch.promote_types(dtype, torch.float32), least_rounding(dtype)
    borders = [least, least / torch.finfo(wide).eps, 8 * least / torch.finfo(wide).eps, 1e-5, 1.0]
    for start in (0.0, *borders):
        allowed = torch.tensor([each for each in borders if each >= start] + [start], dtype=wide)
        assert torch.equal(with_least(allowed, dtype), allowed + least)


def test_only_what_is_kept_is_compared_and_nan_fails() -> None:
    ours, theirs = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    keep = torch.tensor([[True, True, False], [True, False, False]])
    ours[0, 2], ours[1, 1], ours[1, 0, 3] = torch.nan, 7.0, 0.5
    assert excess_of(ours, theirs, torch.ones(2, 3, 1), keep) == 0.5
    ours[0, 0, 0] = torch.nan
    assert not excess_of(ours, theirs, torch.ones(2, 3, 1), keep) <= 1


def test_nan_in_one_layer_is_not_hidden_by_the_next() -> None:
    for order in ([math.nan, 0.5], [0.5, math.nan], [0.1, math.nan, 2.0]):
        assert math.isnan(worst_of(Compared("", excess) for excess in order).excess)
    assert worst_of(()).excess == 0


# -- past windows and branches -------------------------------------------------------------------------------


def wide_gpt_neo(window: int) -> Any:
    """GPT-Neo with a window of 256 in its config, and a different one in its local layer's mask."""
    config = transformers.GPTNeoConfig(
        vocab_size=43, max_position_embeddings=320, hidden_size=24, num_layers=2, num_heads=3, intermediate_size=29,
        attention_types=[[["global", "local"], 1]], window_size=window, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = models.randomised(transformers.GPTNeoForCausalLM(config))
    model.config.window_size = 256
    return model


@pytest.mark.parametrize("window", [220, 256, 290])
def test_gpt_neo_sees_what_its_own_mask_shows(window: int) -> None:
    model = wide_gpt_neo(window)
    hooked = am.load(model)
    assert hooked.certificate.ok
    ids = torch.randint(0, 43, (1, 300), generator=torch.Generator().manual_seed(5))
    run = hooked.run(ids, points=["pattern", "logits"])
    with torch.no_grad():
        torch.testing.assert_close(run.logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    seen = run["pattern", 1][0, 0] > 0
    assert torch.equal(seen, torch.ones(300, 300, dtype=torch.bool).tril().triu(1 - window))


def test_gpt_neo_with_a_mask_of_another_shape_is_refused() -> None:
    model = wide_gpt_neo(256)
    model.transformer.h[1].attn.attention.bias[0, 0, 100, 3] = False
    refuses(r"mask of the last 256 tokens.*`attention.bias`", am.load, model, error=UnsupportedModelError)


def windowed(family: str, **options: Any) -> Any:
    return models.randomised(models.like_llama(family, **{"max_position_embeddings": 512, "layers": 3, **options}))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 150, "factor": 3.0,
}  # fmt: skip
PHI = {"d_head": None, "hidden": 48, "kv_heads": 6, "original_max_position_embeddings": 150}
BRANCHES: dict[str, tuple[Callable[[], Any], int]] = {
    "GPT-Neo": (lambda: wide_gpt_neo(256), 280),
    "Mistral": (lambda: windowed("Mistral", sliding_window=200), 224),
    "Gemma 2": (lambda: windowed("Gemma2", sliding_window=170, query_pre_attn_scalar=8), 194),
    "Phi-3, longrope": (lambda: windowed("Phi3", rope_parameters=LONGROPE, **PHI), 174),
    "Llama, dynamic": (
        lambda: windowed("Llama", max_position_embeddings=130, rope_parameters={
            "rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}), 154),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BRANCHES))
def test_a_probe_reaches_past_every_branch(name: str) -> None:
    make, length = BRANCHES[name]
    hooked = am.load(make())
    (far,) = (check for check in hooked.certificate.checks if check.name == "far")
    assert far.passed and hooked.certificate.ok, repr(hooked.certificate)
    block = hooked.base.get_submodule(hooked.architecture.blocks)[0]
    # From there on, attnmech's block and transformers' differ.
    with block.get_submodule(hooked.architecture.mlp_out).register_forward_hook(
        lambda module, args, output: from_place(output, length - 5, 1.1)
    ):
        broken = am.certify(hooked)
    assert failed(broken) == {"far"}
    assert f"in a text of {length} tokens" in next(check.detail for check in broken.failed)
    assert {"scores", "pattern", "z", "logits", "resid_pre"} <= set(broken.refused) and "embed" not in broken.refused
    assert am.certify(hooked).ok


def test_whatever_is_computed_from_a_wrong_stream_is_refused() -> None:
    """A block of attnmech's that differs from transformers' after position 60, which only the long probe reaches."""
    hooked = am.load(models.fresh("llama"))
    block = hooked.base.get_submodule(hooked.architecture.blocks)[0]
    with block.register_forward_hook(lambda module, args, output: with_first(output, lambda x: from_place(x, 60, 1.5))):
        certificate = am.certify(hooked)
    assert failed(certificate) == {"chain", "streams"}
    assert {"resid_pre", "attn_in", "q", "k_rot", "scores", "pattern", "v", "z", "result", "mlp_out", "logits"} <= set(
        certificate.refused
    )
    assert "embed" not in certificate.refused
