"""Under the rules of relevance patching, gradients are those of a forward by hand with constants in place of the parts
that the rules freeze; what the rules do not cover is refused."""

import threading
from collections.abc import Callable
from typing import Any

import models
import pytest
import tiny
import torch
from comparing import refuses
from einops import rearrange
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.attribution import relevance
from attnmech.methods.attribution.relevance import relevance_rules

POINTS = ("resid_pre", "z", "attn_out", "mlp_out")


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - 0.5 * logits[:, -1, 9]


def gradients(model: am.HookedModel, inputs: Any, of: Callable[[Tensor], Tensor] = metric) -> dict[Any, Tensor]:
    run = model.run(inputs, POINTS, gradients_of=of)
    assert run.gradients is not None
    return {(point, layer): run.gradients[point, layer] for point in POINTS for layer in range(model.n_layers)}


def relevant(model: am.HookedModel, inputs: Any, of: Callable[[Tensor], Tensor] = metric) -> dict[Any, Tensor]:
    """The same under the rules."""
    with relevance_rules(model, model.encode(inputs)):
        return gradients(model, inputs, of)


def close(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key].reshape(value.shape), rtol=1e-8, atol=1e-8, msg=str(key))


def equal(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> bool:
    return all(torch.equal(value, expected[key]) for key, value in found.items())


def hooks_of(model: am.HookedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class ByHand:
    def __init__(self, plain: Any) -> None:
        self.plain = plain.requires_grad_(False)
        self.kept: dict[Any, Tensor] = {}

    def keep(self, point: str, layer: int, value: Tensor) -> Tensor:
        self.kept[point, layer] = value
        return value

    def gradients(self, ids: Tensor) -> dict[Any, Tensor]:
        value = metric(self.logits(ids)).sum()
        return dict(zip(self.kept, torch.autograd.grad(value, list(self.kept.values())), strict=True))

    def logits(self, ids: Tensor) -> Tensor:
        raise NotImplementedError


def constant_pattern(q: Tensor, k: Tensor) -> Tensor:
    """The causal softmax of q·k / √d, without its graph."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf).softmax(dim=-1).detach()


class GPT2ByHand(ByHand):
    """Its GELU is x · c with a constant c."""

    def logits(self, ids: Tensor) -> Tensor:
        base = self.plain.transformer
        x = base.wte.weight[ids] + base.wpe.weight[: ids.shape[1]]
        x.requires_grad_()
        for layer, block in enumerate(base.h):
            x = self.keep("resid_pre", layer, x)
            qkv = self.norm(block.ln_1, x) @ block.attn.c_attn.weight + block.attn.c_attn.bias
            q, k, v = rearrange(qkv, "b i (three h d) -> three b i h d", three=3, h=block.attn.num_heads)
            z = torch.einsum("bhqk,bkhd->bqhd", constant_pattern(q, k), v)
            z = self.keep("z", layer, z)
            out = z.flatten(2) @ block.attn.c_proj.weight + block.attn.c_proj.bias
            x = x + self.keep("attn_out", layer, out)
            h = self.norm(block.ln_2, x) @ block.mlp.c_fc.weight + block.mlp.c_fc.bias
            c = (0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))).detach()
            x = x + self.keep("mlp_out", layer, (h * c) @ block.mlp.c_proj.weight + block.mlp.c_proj.bias)
        return self.norm(base.ln_f, x) @ self.plain.lm_head.weight.T

    def norm(self, norm: Any, x: Tensor) -> Tensor:
        scale = (x.var(dim=-1, correction=0, keepdim=True) + norm.eps).sqrt().detach()
        return (x - x.mean(dim=-1, keepdim=True)) / scale * norm.weight + norm.bias


class LlamaByHand(ByHand):
    """Its SiLU is x · c with a constant c; the gradient of act(gate) · up is halved."""

    def logits(self, ids: Tensor) -> Tensor:
        base = self.plain.model
        x = base.embed_tokens.weight[ids].requires_grad_()
        cos, sin = base.rotary_emb(x, torch.arange(ids.shape[1])[None])
        for layer, block in enumerate(base.layers):
            x = self.keep("resid_pre", layer, x)
            read, attention, mlp = self.norm(block.input_layernorm, x), block.self_attn, block.mlp
            q, k, v = (
                rearrange(read @ projection.weight.T, "b i (h d) -> b i h d", d=attention.head_dim)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
            k, v = (value.repeat_interleave(attention.num_key_value_groups, dim=2) for value in (k, v))
            z = self.keep("z", layer, torch.einsum("bhqk,bkhd->bqhd", constant_pattern(q, k), v))
            x = x + self.keep("attn_out", layer, z.flatten(2) @ attention.o_proj.weight.T)
            read = self.norm(block.post_attention_layernorm, x)
            gate, up = read @ mlp.gate_proj.weight.T, read @ mlp.up_proj.weight.T
            act = gate * gate.sigmoid().detach()
            product = (act * up.detach() + act.detach() * up) / 2
            x = x + self.keep("mlp_out", layer, product @ mlp.down_proj.weight.T)
        return self.norm(base.norm, x) @ self.plain.lm_head.weight.T

    def norm(self, norm: Any, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + norm.variance_epsilon).sqrt().detach() * norm.weight


@pytest.fixture
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' RMSNorm computes in float32 in a float64 model, too; this one does not."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scaled: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return scaled

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


@pytest.mark.core
@pytest.mark.usefixtures("wide_norms")
@pytest.mark.parametrize(("family", "by_hand"), [("gpt2", GPT2ByHand), ("llama", LlamaByHand)])
def test_gradients_are_those_of_a_forward_by_hand(family: str, by_hand: type[ByHand]) -> None:
    model, ids = am.load(models.fresh(family, torch.float64)), models.token_ids(family)
    found, expected = relevant(model, ids), by_hand(models.fresh(family, torch.float64)).gradients(ids)
    close(found, expected)
    ordinary = gradients(model, ids)
    assert not torch.allclose(found["mlp_out", 0], ordinary["mlp_out", 0], rtol=1e-2)


@pytest.mark.core
@pytest.mark.parametrize(
    "family", ["gpt2", "llama_bias", "gemma2", "gpt_neox", "bloom", "bert", "mpt3", "falcon_new", "opt_post", "qwen3"]
)
def test_no_value_changes_and_nothing_remains(family: str) -> None:
    model, ids = models.hooked(family), models.token_ids(family)
    points = [*POINTS, "attn_in", "pattern", "logits"]
    before, plain, hooks = model.run(ids, points), model.run(ids)["logits"], hooks_of(model)
    ordinary, found = gradients(model, ids), relevant(model, ids)
    with relevance_rules(model, model.encode(ids)):
        assert hooks_of(model) > hooks
        under, without_graph = model.run(ids, points, gradients_of=metric), model.run(ids, points)
    assert all(torch.equal(under.values[key], value) for key, value in before.values.items())
    assert all(torch.equal(without_graph.values[key], value) for key, value in before.values.items())
    # Unless patterns are requested, attention leaves out keys that no row of a block sees.
    torch.testing.assert_close(under["logits"], plain, rtol=1e-5, atol=1e-5)
    assert hooks_of(model) == hooks and model.edited == ()
    assert equal(gradients(model, ids), ordinary) and not equal(found, ordinary)


@pytest.mark.parametrize("kind", ["phi3", "glm", "gemma3_text", "nemotron", "granite", "cohere", "gpt_bigcode"])
def test_packed_gates_and_further_norms_conserve_relevance(kind: str) -> None:
    model = am.load(tiny.model_of(kind))
    with relevance_rules(model, model.encode(torch.tensor([[5, 3, 8, 4]]))):
        pass


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_without_biases_the_relevance_of_the_stream_is_the_metric(family: str, activation: str) -> None:
    plain = models.fresh(family, torch.float64)
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    for block in models.blocks_of(plain):
        acting = next(name for name in ("act", "act_fn") if hasattr(block.mlp, name))
        setattr(block.mlp, acting, {"relu": nn.ReLU(), "gelu": nn.GELU(), "silu": nn.SiLU()}[activation])
    model, ids = am.load(plain), models.token_ids(family)
    with relevance_rules(model, model.encode(ids)):
        run = model.run(ids, ["resid_pre", "logits"], gradients_of=metric)
    assert run.gradients is not None
    for layer in range(model.n_layers):
        relevance_of_texts = (run["resid_pre", layer] * run.gradients["resid_pre", layer]).sum(dim=(1, 2))
        torch.testing.assert_close(relevance_of_texts, metric(run["logits"]), rtol=1e-10, atol=1e-10)


def test_the_soft_cap_of_logits_is_differentiated_as_usual() -> None:
    model, ids = models.hooked("gemma2", torch.float64), models.token_ids("gemma2")
    cap = model.architecture.logit_softcap
    assert cap is not None
    # A token whose logits are not saturated.
    token = int(model.run(ids)["logits"][:, -1].abs().amax(dim=0).argmin())

    def uncapped(logits: Tensor) -> Tensor:
        return cap * (logits[:, -1, token] / cap).atanh()

    with relevance_rules(model, model.encode(ids)):
        run = model.run(ids, ["resid_pre", "logits"], gradients_of=uncapped)
    assert run.gradients is not None
    total = (run["resid_pre", 1] * run.gradients["resid_pre", 1]).sum(dim=(1, 2))
    torch.testing.assert_close(total, uncapped(run["logits"]), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("family", "unseen"),
    [
        ("gpt2", "_is_activation"), ("llama", "_is_activation"), ("llama", "_is_product"), ("gemma2", "_is_product"),
        ("gpt2", "_has_epsilon"), ("gemma2", "_has_epsilon"), ("gpt_neox", "_is_activation"),
    ],
)  # fmt: skip
def test_a_part_that_no_rule_covers_is_refused(family: str, unseen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relevance, unseen, lambda *_: False)
    model = models.hooked(family)
    hooks = hooks_of(model)
    refuses(r'layer 0 does not conserve it .* use method="gradient"', relevant, model, models.token_ids(family))
    assert hooks_of(model) == hooks


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt_oss", "layer 0 does not conserve it"),
        ("jamba", "layer 1 does not conserve it"),
        ("roberta", "layer 1 or the head does not conserve it"),
    ],
)
def test_experts_mixers_and_functional_activations_are_refused(family: str, message: str) -> None:
    model, ids = models.hooked(family), models.token_ids(family)
    with pytest.raises(InputError, match=message), relevance_rules(model, model.encode(ids)):
        raise AssertionError


def test_several_stacks_and_models_without_a_stream_are_refused() -> None:
    model = models.hooked("t5")
    refuses("this model has several", relevant, model, models.inputs_of("t5"))
    model = am.load(tiny.model_of("gemma3n_text"))
    with pytest.raises(InputError, match=r"""needs the point 'resid_pre' \(.*; use method="gradient"."""):
        relevant(model, torch.tensor([[5, 3, 8, 4]]))


def test_an_entry_of_zero_passes_nothing_on() -> None:
    x = torch.tensor([0.0, 2.0, -1.0], requires_grad=True)
    model = models.hooked("gpt2")
    rules = relevance._Rules(model)
    with rules.in_force():
        gelu = next(module for module in model.modules() if module in rules._activations)
        gelu(x).sum().backward()
    assert x.grad is not None and x.grad[0] == 0
    torch.testing.assert_close(x.grad[1:], gelu(x.detach())[1:] / x.detach()[1:])


def test_other_threads_get_ordinary_gradients() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama")
    ordinary, expected = gradients(model, ids), relevant(model, ids)
    inside, done = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def under_rules() -> None:
        with relevance_rules(model, model.encode(ids)):
            inside.set()
            done.wait(60)
            found["rules"] = gradients(model, ids)

    def outside() -> None:
        inside.wait(60)
        found["ordinary"] = gradients(model, ids)
        found["own rules"] = relevant(model, ids)
        done.set()

    threads = [threading.Thread(target=target) for target in (under_rules, outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert equal(found["ordinary"], ordinary)
    assert equal(found["rules"], expected) and equal(found["own rules"], expected)


def test_blocks_can_be_nested_and_lie_within_edits() -> None:
    model, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    expected = relevant(model, ids)
    with relevance_rules(model, model.encode(ids)):
        assert equal(relevant(model, ids), expected)
        assert equal(gradients(model, ids), expected)
    edits: dict[Any, Any] = {("resid_pre", 1): lambda stream: stream.detach() * 2}
    with model.hooks(edits):
        edited = relevant(model, ids)
    assert not edited["mlp_out", 0].any() and edited["mlp_out", 1].any()
