"""Encoder-decoders: three stacks, read from the model or taken from the table, against plain transformers and their raw
weights."""

import copy
from dataclasses import replace
from typing import Any

import models
import pytest
import tiny
import torch
from caching import cached
from torch import Tensor

import attnmech as am
from attnmech.errors import UnsupportedModelError

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


# -- against plain transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", NAMES)
def test_every_check_holds(name: str, dtype: torch.dtype) -> None:
    certificate = hooked(name, dtype).certificate
    assert certificate.ok, repr(certificate)
    held = {check.name for check in certificate.checks if check.passed}
    for stack in STACKS:
        always = ("attentions", "projections", "ledger", "softmax", "mask", "z", "heads", "pattern edit")
        assert {f"{stack} {each}" for each in always} <= held
    for stack in ("encoder", "decoder"):
        assert {
            f"{stack} {each}" for each in ("streams", "attn_in", "stream", "mlp", "chain", "resid_mid edit")
        } <= held
    assert {"transformers", "padding", "causal", "cross queries", "cross states"} <= held
    assert ("logits" in held) == (name == "mbart")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", NAMES)
def test_patterns_and_logits_are_those_of_transformers(name: str, stack: str) -> None:
    raw = models.fresh(name)
    raw.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = raw(**inputs(name), output_attentions=True, use_cache=False)
    ours = hooked(name).run(inputs(name), points=[f"{stack}.pattern", "logits"])
    patterns = getattr(theirs, f"{stack}_attentions")
    assert len(patterns) == hooked(name).stacks[stack].n_layers
    for layer, pattern in enumerate(patterns):
        torch.testing.assert_close(ours[f"{stack}.pattern", layer], pattern, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=2e-5)


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
    for layer in range(3):
        middle = acts["decoder.resid_pre", layer] + acts["decoder.attn_out", layer]
        torch.testing.assert_close(acts["decoder.resid_mid", layer], middle)
        crossed, added = acts["cross.attn_out", layer], acts["decoder.mlp_out", layer]
        block = models.fresh(name, F64).base_model.get_submodule(plan.blocks)[layer]
        ended = middle + crossed + added
        if name in POST:
            ended = block.self_attn_layer_norm(middle) + crossed
            ended = block.final_layer_norm(block.encoder_attn_layer_norm(ended) + added)
        torch.testing.assert_close(acts["decoder.resid_post", layer], ended.detach())


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", NAMES)
def test_zeroing_a_head_is_zeroing_its_columns_of_w_o(name: str, stack: str) -> None:
    model, changed = hooked(name), models.fresh(name)
    found, layer, head = model.stacks[stack], 1, 1
    plan, d = found.architecture, found.d_head
    path = ".".join(part for part in (plan.blocks, str(layer), plan.within, plan.out) if part)
    with torch.no_grad():
        changed.base_model.get_submodule(path).weight[:, head * d : head * d + d] = 0
        expected, before = changed(**inputs(name)).logits, models.plain(name)(**inputs(name)).logits
    with model.intervene(am.Intervention.zero([(layer, head)], stack=stack)):
        ours = model.run(inputs(name)).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)
    assert float((expected - before).abs().max()) > 1e-2


@pytest.mark.parametrize("name", LIKE_BART)
def test_gradient_at_cross_attention_against_finite_differences(name: str) -> None:
    model, given, step = hooked(name, F64), inputs(name), 1e-4

    def measure(logits: Tensor) -> Tensor:
        return logits[:, -1, 5].sum()

    gradient = model.run(given, points=[("cross.scores", 1)], gradients_of=measure).gradients
    assert gradient is not None
    slopes = gradient["cross.scores", 1][0]
    head, query, key = (int(place) for place in (slopes.abs() == slopes.abs().max()).nonzero()[0])
    found = []
    for sign in (1, -1):

        def shift(scores: Tensor, sign: int = sign) -> Tensor:
            scores[0, head, query, key] += sign * step
            return scores

        with model.hooks({("cross.scores", 1): shift}):
            found.append(float(measure(model.run(given).logits)))
    assert float(slopes[head, query, key]) == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_generation_is_that_of_transformers(name: str) -> None:
    raw, given = models.fresh(name), inputs(name)["input_ids"][:1]
    said = hooked(name).generate(given, 6, points=["cross.pattern"], stop_at_eos=False)
    assert said.target is not None
    raw.generation_config.eos_token_id = None
    expected = raw.generate(
        input_ids=given, max_new_tokens=6, do_sample=False, num_beams=1, use_cache=False
    )  # fmt: skip
    assert said.target.ids.tolist() == expected.tolist()
    assert said.target.ids[0, 0] == raw.config.decoder_start_token_id
    assert [step["cross.pattern", 2].shape[-2:] for step in said.steps] == [(n, 9) for n in range(1, 7)]


@pytest.mark.parametrize("name", LIKE_BART)
def test_the_decoder_starts_by_itself(name: str) -> None:
    acts = hooked(name).run(inputs(name)["input_ids"], points=["cross.pattern"])
    assert acts.batch.target is not None
    assert acts.batch.target.ids.tolist() == [[2], [2], [2]]


KINDS = (
    "blenderbot",
    "blenderbot-small",
    "m2m_100",
    "pegasus",
    "plbart",
    "seamless_m4t",
    "switch_transformers",
    "umt5",
)


@pytest.mark.parametrize("kind", KINDS)
def test_other_families(kind: str) -> None:
    """Certificate, logits of padded texts and patterns of all stacks against plain transformers."""
    raw = tiny.model_of(kind)
    raw.set_attn_implementation("eager")
    model, given = am.load(raw), inputs(kind)
    assert model.certificate.ok, repr(model.certificate)
    assert list(model.stacks) == list(STACKS)
    with torch.no_grad():
        theirs = raw(**given, output_attentions=True, use_cache=False)
    acts = model.run(given, points=[*(f"{stack}.pattern" for stack in STACKS), "logits"])
    allowed = 1e-4 * float(theirs.logits.abs().max())
    torch.testing.assert_close(acts.logits, theirs.logits, rtol=0, atol=allowed)
    for stack in STACKS:
        for layer, pattern in enumerate(getattr(theirs, f"{stack}_attentions")):
            torch.testing.assert_close(acts[f"{stack}.pattern", layer], pattern, rtol=1e-5, atol=1e-5)


# -- what was read, and what must not pass -------------------------------------------------------------------


def test_what_is_read() -> None:
    post, pre = hooked("bart"), hooked("mbart")
    found = post.stacks["decoder"].architecture
    assert (found.norm, found.mid_norm, found.interposed, found.interposed_norm, found.post_norm) == (
        "post", "self_attn_layer_norm", "cross", "encoder_attn_layer_norm", "final_layer_norm",
    )  # fmt: skip
    assert found.embed_norm == "decoder.layernorm_embedding"
    assert (found.position_limit, post.stacks["encoder"].architecture.final_norm) == (33, None)
    found = pre.stacks["decoder"].architecture
    assert (found.norm, found.attn_norm, found.mid_norm, found.interposed, found.interposed_norm) == (
        "pre", "self_attn_layer_norm", "encoder_attn_layer_norm", "cross", None,
    )  # fmt: skip
    assert (found.final_norm, found.logit_bias) == ("decoder.layer_norm", "final_logits_bias")
    assert found.embed_scale == pytest.approx(18**0.5)
    assert pre.stacks["encoder"].architecture.final_norm == "encoder.layer_norm"
    assert [(s.n_heads, s.d_head, s.n_layers) for s in post.stacks.values()] == [(3, 8, 2), (4, 6, 3), (4, 6, 3)]


def failed(name: str, stack: str, **changes: Any) -> set[str]:
    """The failed checks of a model with an incorrect description."""
    raw = models.fresh(name)
    model = am.load(raw)
    plan = model.stacks[stack].architecture
    plans = [replace(s.architecture, **changes) if s.label == stack else s.architecture for s in model.stacks.values()]
    wrong = am.HookedModel(raw, plans, name=name)
    assert wrong.stacks[stack].architecture != plan
    return {check.name for check in am.certify(wrong).failed}


def test_states_without_the_encoder_s_norm_are_found() -> None:
    assert failed("mbart", "encoder", final_norm=None) == {"cross states"}


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


def test_the_bias_of_logits_is_part_of_the_weights() -> None:
    raw = models.fresh("marian")
    before = am.load(raw).weights_hash
    raw.final_logits_bias[0, 3] += 1
    assert am.load(raw).weights_hash != before


def test_a_wrong_norm_after_cross_attention_is_found() -> None:
    assert "decoder mlp" in failed("bart", "decoder", interposed_norm="self_attn_layer_norm")


def test_a_wrong_norm_before_cross_attention_is_found() -> None:
    assert {"decoder mlp", "cross queries"} <= failed("bart", "decoder", mid_norm="final_layer_norm")


def test_a_decoder_without_what_cross_attention_adds_is_found() -> None:
    assert "decoder mlp" in failed("mbart", "decoder", interposed="")


def test_swapped_heads_of_cross_attention_are_found() -> None:
    d, heads = 6, 4
    order = [1, 0, 2, 3]
    columns = tuple(head * d + place for head in order for place in range(d))
    same = tuple(range(heads * d))
    qkv = am.architecture.Columns(("q_proj", "k_proj", "v_proj"), (columns, same, same))
    assert failed("bart", "cross", qkv=qkv) == {"cross ledger"}


class _Shifted(torch.nn.Module):
    """A norm that returns, at each token, its output for the previous token."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.norm(x).roll(1, dims=1)
        return shifted


def test_a_model_that_reads_states_without_a_norm_is_read_so() -> None:
    raw = models.fresh("mbart")
    raw.model.encoder.layer_norm = torch.nn.Identity()
    model = am.load(raw)
    assert model.certificate.ok
    assert model.stacks["encoder"].architecture.final_norm is None


def test_states_that_are_no_norm_of_the_stream_are_refused() -> None:
    raw = models.fresh("mbart")
    raw.model.encoder.layer_norm = _Shifted(raw.model.encoder.layer_norm)
    with pytest.raises(UnsupportedModelError, match="reads neither the output of its encoder's last block nor a norm"):
        am.load(raw)


@pytest.mark.parametrize(("family", "d_model"), [("Bart", 24), ("Mvp", 28), ("MBart", 18)])
def test_a_decoder_alone_has_one_stack(family: str, d_model: int) -> None:
    model = am.load(models.randomised(models.seq2seq(family, d_model, (2, 2), f"{family}ForCausalLM")))
    assert model.certificate.ok
    assert list(model.stacks) == [""]
    assert model.architecture.causal


def test_a_model_without_its_head_has_three_stacks() -> None:
    model = am.load(models.fresh("bart").model)
    assert model.certificate.ok
    assert list(model.stacks) == list(STACKS)


def test_a_head_for_whole_texts_is_refused() -> None:
    raw = models.randomised(models.seq2seq("Bart", 24, (3, 4), "BartForSequenceClassification"))
    with pytest.raises(UnsupportedModelError, match="does not run on token ids alone"):
        am.load(raw)


def test_prompts_inside_attention_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use_prompt=True"):
        am.load(models.seq2seq("Mvp", 28, (4, 7), use_prompt=True))


def test_two_embeddings_are_refused() -> None:
    raw = models.fresh("bart")
    raw.model.decoder.embed_tokens = copy.deepcopy(raw.model.decoder.embed_tokens)
    with pytest.raises(UnsupportedModelError, match="embed tokens with different matrices"):
        am.load(raw)


def test_two_vocabularies_are_refused() -> None:
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    for size, reason in ((40, "43 tokens and its decoder 40"), (43, "embed tokens with different matrices")):
        raw = models.seq2seq("Marian", 20, (5, 2), "MarianMTModel", decoder_vocab_size=size, **apart)
        with pytest.raises(UnsupportedModelError, match=reason):
            am.load(models.randomised(raw))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5gemma", "a norm comes between its cross-attention and the stream"),
        ("t5gemma2", "in one softmax"),
        ("nllb-moe", "depends on other texts"),
        ("prophetnet", "several streams"),
        ("pegasus_x", "global tokens"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(kind: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        am.load(tiny.model_of(kind))


# -- methods -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stack", ["decoder", "cross"])
@pytest.mark.parametrize("name", LIKE_BART)
def test_a_sweep_over_heads_against_transformers(name: str, stack: str) -> None:
    """The loss without one head, the other, and both, against setting their columns of W_O to 0."""
    model, given = hooked(name), inputs(name)
    heads = [(1, 0), (2, 1)]
    single = [am.Intervention.zero([head], stack=stack) for head in heads]
    effects = am.sweep(model, given, [*single, single])
    changed = models.fresh(name)
    plan, d = model.stacks[stack].architecture, model.stacks[stack].d_head
    expected = [_loss(changed, given)]
    for layer, head in heads:
        path = ".".join(part for part in (plan.blocks, str(layer), plan.within, plan.out) if part)
        one = models.fresh(name)
        for each in (one, changed):
            with torch.no_grad():
                each.base_model.get_submodule(path).weight[:, head * d : head * d + d] = 0
        expected.append(_loss(one, given))
    expected.append(_loss(changed, given))
    torch.testing.assert_close(effects.before.float(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(effects.after.float(), torch.stack(expected[1:]), rtol=1e-5, atol=1e-5)


def _loss(raw: Any, given: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of the decoder's next token, text by text."""
    with torch.no_grad():
        logits = raw(**given, use_cache=False).logits
    ids = given["decoder_input_ids"]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.mean(dim=1)
