"""Encoder-decoders: three stacks, read from the model or taken from the table, against plain transformers and their raw
weights."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from caching import cached
from comparing import refuses, require_gradient
from torch import Tensor

import attnmech as am
from attnmech.errors import CertificateError, InputError, MissingPointError, UnsupportedModelError

F32, F64 = torch.float32, torch.float64
LIKE_BART = ("mvp", *models.CROSSED)
NAMES = ("t5", *LIKE_BART)
STACKS = ("encoder", "decoder", "cross")
POST = ("bart", "marian", "mvp")


@cached
def hooked(name: str, dtype: torch.dtype = F32) -> am.HookedModel:
    return am.load(models.fresh(name, dtype))


def inputs(name: str) -> dict[str, Tensor]:
    """Texts of 9 tokens for the encoder, one padded, and of 7 for the decoder."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 43, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, 43, (3, 7), generator=generator),
    }


@cached
def attended(name: str, dtype: torch.dtype = F32) -> dict[tuple[str, int], tuple[Any, Tensor, Tensor]]:
    """Each attention module of plain transformers with its inputs: the stream, and the input of the keys."""
    found, handles, model = {}, [], models.fresh(name, dtype)

    def keep(place: tuple[str, int]) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            stream = args[0] if args else kwargs["hidden_states"]
            states = kwargs.get("key_value_states")
            found[place] = module, stream, stream if states is None else states

        return hook

    for path, module in model.named_modules():
        side = "decoder" if ".decoder." in f".{path}" else "encoder"
        label = "cross" if path.endswith(("encoder_attn", "EncDecAttention")) else side
        if path.endswith(("self_attn", "encoder_attn", "SelfAttention", "EncDecAttention")):
            layer = next(int(part) for part in path.split(".") if part.isdigit())
            handles.append(module.register_forward_pre_hook(keep((label, layer)), with_kwargs=True))
    with torch.no_grad():
        model(**inputs(name), use_cache=False)
    return found


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("stack", STACKS)
def test_terms_of_t5_against_the_raw_weights(stack: str, dtype: torch.dtype) -> None:
    split, heads = am.decompose_scores(hooked("t5", dtype), inputs("t5"), stack=stack), 4
    assert set(split.terms) == {"query_key", "mask"} | ({"position"} if stack != "cross" else set())
    relative = split.residual / split.largest.amax(dim=1, keepdim=True)
    assert float(relative.max()) <= (1e-5 if dtype == F32 else 1e-12)
    # transformers computes the norm's variance in float32, whatever the model's precision.
    atol = 2e-5 if dtype == F32 else 1e-5
    biased = attended("t5", dtype)[stack, 0][0]  # the first layer's table is that of all
    for layer in range(len(split.layers)):
        module, x, y = attended("t5", dtype)[stack, layer]
        q, k = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (module.q(x), module.k(y)))
        terms = {"query_key": q @ k.mT}
        if stack != "cross":
            terms["position"] = biased.compute_bias(x.shape[1], x.shape[1])
        for name, expected in terms.items():
            found = split.terms[name][:, layer].expand(3, heads, *expected.shape[2:])
            torch.testing.assert_close(found, expected.expand_as(found).detach(), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", LIKE_BART)
def test_terms_against_the_raw_weights(name: str, stack: str) -> None:
    """With biases, the terms sum to (x W_Q + b_Q)(y W_K + b_K)ᵀ / √d of the inputs of transformers' attention."""
    model = hooked(name, F64)
    split = am.decompose_scores(model, inputs(name), stack=stack)
    assert set(split.terms) == {"query_key", "key_bias", "query_bias", "constant", "mask"}
    assert float((split.residual / split.largest.amax(dim=1, keepdim=True)).max()) <= 1e-12
    heads = model.stacks[stack].n_heads
    for layer in range(model.stacks[stack].n_layers):
        module, x, y = attended(name, F64)[stack, layer]
        q, k = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (module.q_proj(x), module.k_proj(y)))
        expected = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).detach()
        content = ("query_key", "key_bias", "query_bias", "constant")
        total = torch.stack([split.terms[term][:, layer].expand(expected.shape) for term in content]).sum(dim=0)
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
        no_bias = x @ module.q_proj.weight.T, y @ module.k_proj.weight.T
        q, k = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in no_bias)
        plain = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).detach()
        torch.testing.assert_close(split.terms["query_key"][:, layer], plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_stream_adds_up_through_self_and_cross_attention(name: str) -> None:
    model = hooked(name, F64)
    wanted = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]
    acts = model.run(inputs(name), points=[f"decoder.{each}" for each in wanted] + ["cross.attn_out"])
    plan = model.stacks["decoder"].architecture
    relative = am.residual_updates(model, inputs(name), stack="decoder").blocks.by_row("mlp_magnitude")
    for layer in range(3):
        middle = acts["decoder.resid_pre", layer] + acts["decoder.attn_out", layer]
        torch.testing.assert_close(acts["decoder.resid_mid", layer], middle)
        crossed, added = acts["cross.attn_out", layer], acts["decoder.mlp_out", layer]
        block = models.fresh(name, F64).base_model.get_submodule(plan.blocks)[layer]
        ended, read = middle + crossed + added, middle + crossed
        if name in POST:
            ended = block.self_attn_layer_norm(middle) + crossed
            read = block.encoder_attn_layer_norm(ended)
            ended = block.final_layer_norm(read + added)
        torch.testing.assert_close(acts["decoder.resid_post", layer], ended.detach())
        torch.testing.assert_close(relative[layer, 0], (added.norm(dim=-1) / read.norm(dim=-1)).detach())


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_gradient_at_cross_attention_against_finite_differences(name: str) -> None:
    def measure(logits: Tensor) -> Tensor:
        return logits[:, -1, 5].sum()

    require_gradient(hooked(name, F64), inputs(name), ("cross.scores", 1), measure, step=1e-5, relative=1e-5)


def failed(name: str, stack: str, **changes: Any) -> set[str]:
    """The failed checks of a model with an incorrect description."""
    raw = models.fresh(name)
    model = am.load(raw)
    plan = model.stacks[stack].architecture
    plans = [replace(s.architecture, **changes) if s.label == stack else s.architecture for s in model.stacks.values()]
    wrong = am.HookedModel(raw, plans, name=name)
    assert wrong.stacks[stack].architecture != plan
    return {check.name for check in am.certify(wrong).failed}


@pytest.mark.parametrize(("place", "check"), [("states", "cross states"), ("stream", "cross queries")])
@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_one_layer_that_reads_something_else_is_found(name: str, place: str, check: str) -> None:
    """The structure is read from all layers together; a fault in one layer must fail that layer's check."""
    raw = models.fresh(name)

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        if place == "states":
            return args, {**kwargs, "key_value_states": 1.5 * kwargs["key_value_states"]}
        if args:
            return (1.5 * args[0], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": 1.5 * kwargs["hidden_states"]}

    raw.model.decoder.layers[1].encoder_attn.register_forward_pre_hook(change, with_kwargs=True)
    with pytest.warns(UserWarning, match=check):
        model = am.load(raw)
    (failed_check,) = model.certificate.failed
    assert failed_check.name == check
    assert failed_check.detail.startswith("layer 1")


COLUMNS = tuple(range(24))
SWAPPED = am.architecture.Columns(
    ("q_proj", "k_proj", "v_proj"), ((*COLUMNS[6:12], *COLUMNS[:6], *COLUMNS[12:]), COLUMNS, COLUMNS)
)


@pytest.mark.parametrize(
    ("name", "stack", "changes", "checks"),
    [
        ("mbart", "encoder", {"final_norm": None}, {"cross states"}),
        ("mbart", "decoder", {"interposed": ""}, {"decoder mlp"}),
        ("bart", "decoder", {"interposed_norm": "self_attn_layer_norm"}, {"decoder mlp"}),
        ("bart", "decoder", {"mid_norm": "final_layer_norm"}, {"decoder mlp", "cross queries"}),
        ("bart", "cross", {"qkv": SWAPPED}, {"cross ledger"}),
    ],
)
def test_a_wrong_description_is_found(name: str, stack: str, changes: dict[str, Any], checks: set[str]) -> None:
    found = failed(name, stack, **changes)
    assert checks <= found and (stack == "decoder" or checks == found)


def test_the_bias_of_logits_is_part_of_the_weights() -> None:
    raw = models.fresh("marian")
    before = am.load(raw).weights_hash
    raw.final_logits_bias[0, 3] += 1
    assert am.load(raw).weights_hash != before


@pytest.mark.parametrize("family", ["Bart", "Mvp", "MBart"])
def test_a_decoder_alone_has_one_stack_and_a_model_without_its_head_has_three(family: str) -> None:
    raw = models.seq2seq(family, 28, (2, 2), f"{family}ForCausalLM")
    model, headless = am.load(models.randomised(raw)), am.load(models.fresh(family.lower()).model)
    assert model.certificate.ok and list(model.stacks) == [""] and model.architecture.causal
    assert headless.certificate.ok and list(headless.stacks) == list(STACKS)


class Shifted(torch.nn.LayerNorm):
    """A norm that returns, at each token, its output for the previous token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(1, dims=1)


def shifted(raw: Any) -> Any:
    raw.model.encoder.layer_norm.__class__ = Shifted
    return raw


def with_two_embeddings(raw: Any) -> Any:
    raw.model.decoder.embed_tokens = copy.deepcopy(raw.model.decoder.embed_tokens)
    return raw


def marian(size: int) -> Any:
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    return models.seq2seq("Marian", 20, (5, 2), "MarianMTModel", decoder_vocab_size=size, **apart)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "states that are the norm of other tokens": (
        lambda: shifted(models.fresh("mbart")), "reads neither the output of its encoder's last block nor a norm"),
    "a head for whole texts": (
        lambda: models.seq2seq("Bart", 24, (3, 4), "BartForSequenceClassification"), "run on token ids alone"),
    "prompts inside attention": (lambda: models.seq2seq("Mvp", 28, (4, 7), use_prompt=True), "use_prompt=True"),
    "two embeddings": (lambda: with_two_embeddings(models.fresh("bart")), "embed tokens with different matrices"),
    "two vocabularies": (lambda: marian(40), "43 tokens and its decoder 40"),
    "two vocabularies of one size": (lambda: marian(43), "embed tokens with different matrices"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_exact_is_refused_with_the_reason(what: str) -> None:
    make, reason = REFUSED[what]
    refuses(reason, am.load, make().eval(), error=UnsupportedModelError)


def test_states_without_a_norm_are_read_so() -> None:
    raw = models.fresh("mbart")
    raw.model.encoder.layer_norm = torch.nn.Identity()
    model = am.load(raw)
    assert model.certificate.ok and model.stacks["encoder"].architecture.final_norm is None


def test_what_heads_of_the_decoder_add_to_a_logit() -> None:
    """The heads' parts and the rest of the final stream sum to the logit; parts are computed from the raw weights."""
    raw, model, given = models.fresh("mbart", F64), hooked("mbart", F64), inputs("mbart")
    del given["attention_mask"]
    answers = torch.tensor([5, 17, 30])
    found = am.residual_updates(model, given, stack="decoder", answers=answers).logits
    acts = model.run(given, points=["decoder.z", ("decoder.resid_post", 2), "logits"])
    stream, norm = acts["decoder.resid_post", 2][:, -1], raw.model.decoder.layer_norm
    scale = (stream.var(dim=-1, correction=0) + norm.eps).rsqrt()
    for layer in range(3):
        W_O = raw.model.decoder.layers[layer].self_attn.out_proj.weight.unflatten(1, (3, 6))
        for head in range(3):
            written = acts["decoder.z", layer][:, -1, head] @ W_O[:, head].T
            part = (written - written.mean(dim=-1, keepdim=True)) * scale[:, None] * norm.weight
            expected = (part * raw.lm_head.weight[answers]).sum(dim=-1)
            torch.testing.assert_close(found[layer, head], expected.detach())
    logits = norm(stream) @ raw.lm_head.weight.T + raw.final_logits_bias
    torch.testing.assert_close(acts.logits[:, -1], logits.detach())


def test_contrast_and_shares_of_cross_attention() -> None:
    split = am.decompose_scores(hooked("t5", F64), inputs("t5"), stack="cross")
    scores = hooked("t5", F64).run(inputs("t5"), points=["cross.scores"])
    contrast = split.contrast(query=6, key_a=8, key_b=2)
    for layer in range(3):
        expected = scores["cross.scores", layer][:, :, 6, 8] - scores["cross.scores", layer][:, :, 6, 2]
        expected[1] = torch.nan  # key 8 of the second text is padding
        torch.testing.assert_close(contrast.total[:, layer], expected, equal_nan=True)
    assert split.shares_at(3)["query_key"].shape == (3, 3, 4, 7)
    assert len(split.key_tokens[0]) == 9
    assert len(split.tokens[0]) == 7


def test_a_stack_must_be_named() -> None:
    model = hooked("t5")
    with pytest.raises(InputError, match=r"choose one for 'pattern': 'encoder\.pattern', 'decoder\.pattern'"):
        model.run(inputs("t5"), points=["pattern"])
    refuses("`stack` must be one of 'encoder', 'decoder', 'cross'", am.decompose_scores, model, inputs("t5"))
    with pytest.raises(InputError, match=r"from 0 to 1 \(its encoder stack has 2 layers\); got 2"):
        model.run(inputs("t5"), points=[("encoder.pattern", 2)])
    refuses("the cross stack has no MLP", model.run, inputs("t5"), points=["cross.mlp_out"], error=MissingPointError)
    with pytest.raises(InputError, match="must have one row per text; got 2 rows for 3 texts"):
        model.run(inputs("t5") | {"decoder_input_ids": torch.ones(2, 4, dtype=torch.long)})


def test_an_encoder_alone_has_one_stack() -> None:
    model = am.load(models.fresh("t5_encoder_alone"))
    assert model.certificate.ok, repr(model.certificate)
    given = inputs("t5")
    given.pop("decoder_input_ids")
    acts = model.run(given, points=["pattern", "embed"])
    assert acts["pattern", 1].shape == (3, 4, 9, 9)
    torch.testing.assert_close(acts["embed"], models.plain("t5_encoder_alone").shared.weight[given["input_ids"]])


def test_a_fault_of_the_whole_model_refuses_the_points_of_every_stack() -> None:
    source = models.fresh("t5")
    model = am.load(source)
    with torch.no_grad():
        source.decoder.block[2].layer[1].layer_norm.weight[3] = torch.nan
    assert not am.certify(model).ok
    for stack in STACKS:
        refuses("holds NaN or infinity", model.run, inputs("t5"), points=[f"{stack}.pattern"], error=CertificateError)
        with pytest.raises(CertificateError):
            am.decompose_scores(model, inputs("t5"), stack=stack)
    with pytest.raises(CertificateError):
        model.run(inputs("t5"), points=["logits"])
