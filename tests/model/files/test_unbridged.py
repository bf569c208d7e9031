"""TransformerLens's bridges as models: the loaded model computes what the bridge computes, and the bridge stays
unchanged."""

import copy
from itertools import cycle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from comparing import refuses
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import attnmech as am
from attnmech.errors import UnsupportedModelError, WeightsError

FAMILIES = ["gpt2", "bloom", "llama_bias", "bert", "gpt_neox", "gemma2", "t5"]
FUSED = ["gpt2", "bloom", "gpt_neox"]
"""Models whose q, k and v are one layer, which a bridge splits."""


def bridge_of(name: str, tokenizer: Any = None) -> TransformerBridge:
    model = models.fresh(name)
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=tokenizer)


def logits_of(model: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        return _at_real_tokens(model(**models.inputs_of(name)).logits, name)


def loaded_logits(hooked: am.HookedModel, name: str) -> Tensor:
    return _at_real_tokens(hooked.run(models.inputs_of(name)).logits, name)


def _at_real_tokens(logits: Tensor, name: str) -> Tensor:
    given = models.inputs_of(name)
    return logits.flatten(0, 1) if "decoder_input_ids" in given else logits[given["attention_mask"].bool()]


def state_of(bridge: TransformerBridge) -> dict[str, Any]:
    """Everything that loading could change: modules, by identity and class; parameters and buffers, by value."""
    tensors = [*bridge.original_model.named_parameters(), *bridge.original_model.named_buffers()]
    return {
        "modules": [(path, id(part), type(part), part.training) for path, part in bridge.named_modules()],
        "own modules": [(path, id(part)) for path, part in bridge.original_model.named_modules()],
        "tensors": {path: (id(value), value.dtype, value.clone()) for path, value in tensors},
        "config": bridge.original_model.config.to_dict(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for what in ("modules", "own modules", "config"):
        assert before[what] == after[what]
    assert before["tensors"].keys() == after["tensors"].keys()
    for path, (identity, dtype, value) in before["tensors"].items():
        assert after["tensors"][path][:2] == (identity, dtype)
        assert torch.equal(after["tensors"][path][2], value)


@pytest.mark.parametrize(("name", "original"), [*zip(FAMILIES, cycle((False, True)))])
def test_a_bridge_is_the_model_that_was_bridged(name: str, original: bool) -> None:
    plain, bridge = models.plain(name), bridge_of(name)
    before = state_of(bridge)
    hooked = am.load(bridge.original_model if original else bridge)
    assert hooked.certificate.ok
    ours = loaded_logits(hooked, name)
    torch.testing.assert_close(ours, logits_of(plain, name), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ours, logits_of(bridge.original_model, name), atol=2e-5, rtol=2e-5)
    theirs = {id(weight) for weight in bridge.original_model.parameters()}
    assert {id(weight) for _, weight in hooked.named_parameters()} <= theirs
    assert hooked.weights_hash == models.hooked(name).weights_hash
    assert_same(before, state_of(bridge))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bridge_in_compatibility_mode_is_what_it_computes(name: str) -> None:
    bridge = bridge_of(name)
    bridge.enable_compatibility_mode(disable_warnings=True)
    before = state_of(bridge)
    hooked = am.load(bridge)
    assert hooked.certificate.ok
    torch.testing.assert_close(
        loaded_logits(hooked, name), logits_of(bridge.original_model, name), atol=2e-5, rtol=2e-5
    )
    assert hooked.weights_hash != models.hooked(name).weights_hash
    assert_same(before, state_of(bridge))
    if name == "gpt2":
        # Compatibility mode centres everything that is written to the stream.
        streams = [
            each.run(models.inputs_of(name), points=["resid_post"])["resid_post"]
            for each in (hooked, models.hooked(name))
        ]
        centred, trained = (stream.mean(-1).abs().max() for stream in streams)
        assert centred < 1e-4 < trained


@pytest.mark.parametrize("name", FUSED)
def test_changed_parts_of_a_fused_layer_are_joined(name: str) -> None:
    """A bridge computes with its own q, k and v, so a change of one of them changes the model."""
    bridge = bridge_of(name)
    attention = bridge.blocks[1].attn
    with torch.no_grad():
        attention.k.original_component.weight.mul_(1.5)
        attention.v.original_component.bias.sub_(0.25)
    unchanged = models.hooked(name)
    state = torch.random.get_rng_state()
    hooked = am.load(bridge)
    assert torch.equal(torch.random.get_rng_state(), state)
    ours = loaded_logits(hooked, name)
    torch.testing.assert_close(ours, logits_of(bridge.original_model, name), atol=2e-5, rtol=2e-5)
    assert (ours - loaded_logits(unchanged, name)).abs().max() > 1e-2
    for part, factor in (("W_Q", 1.0), ("W_K", 1.5), ("W_V", 1.0)):
        was = getattr(unchanged.weights(1), part)
        torch.testing.assert_close(getattr(hooked.weights(1), part), was * factor)
    torch.testing.assert_close(hooked.weights(1).b_V, unchanged.weights(1).b_V - 0.25)
    torch.testing.assert_close(hooked.weights(0).W_K, unchanged.weights(0).W_K)


def test_a_bridge_that_computes_something_else_is_refused() -> None:
    bridge = bridge_of("llama_bias")
    layer = bridge.blocks[1].attn.o.original_component
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)
    with pytest.raises(WeightsError, match=r"does not compute what LlamaForCausalLM .* Load the transformers model"):
        am.load(bridge)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_bridge_whose_own_forward_differs_from_its_model_is_refused(name: str) -> None:
    bridge = bridge_of(name)
    forward = bridge.forward
    bridge.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.01
    with pytest.raises(
        am.errors.WeightsError, match=r"the logits of its own forward pass differ by .* Load the transformers"
    ):
        am.load(bridge)
    assert am.load(bridge.original_model).certificate.ok


OPTIONS = [
    ("gpt2", {"refactor_factored_attn_matrices": True}),
    ("gpt_neox", {"fold_ln": False}),
    ("llama_bias", {"fold_value_biases": False}),
    ("bert", {"center_unembed": False}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_compatibility_mode_with_options(name: str, options: dict[str, bool]) -> None:
    bridge, ids = bridge_of(name), models.token_ids(name)
    bridge.enable_compatibility_mode(disable_warnings=True, **options)
    hooked = am.load(bridge)
    assert hooked.certificate.ok
    with torch.no_grad():
        theirs = bridge(ids)
    torch.testing.assert_close(hooked.run(ids).logits, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "bert"])
def test_flags_of_a_bridge_change_nothing(name: str) -> None:
    bridge = bridge_of(name)
    bridge.set_use_hook_mlp_in(True)
    if name != "bert":
        bridge.set_use_attn_result(True)
        bridge.set_use_split_qkv_input(True)
    ids = models.token_ids(name)
    torch.testing.assert_close(am.load(bridge).run(ids).logits, models.plain(name)(ids).logits, atol=2e-5, rtol=2e-5)


def test_a_bridge_of_images() -> None:
    given = models.inputs_of("vit")
    ours = am.load(bridge_of("vit")).run(given).logits
    torch.testing.assert_close(ours, models.plain("vit")(**given).logits, atol=2e-5, rtol=2e-5)
    assert am.load(bridge_of("vit_headless")).certificate.ok


def test_hooks_of_a_bridge_still_work_and_are_not_loaded() -> None:
    bridge, ids, calls = bridge_of("gpt2"), models.token_ids("gpt2"), []

    def zeroed(value: Tensor, hook: Any) -> Tensor:
        calls.append(hook.name)
        return value * 0

    bridge.add_hook("blocks.1.attn.hook_z", zeroed)
    hooked = am.load(bridge)
    assert calls == []
    torch.testing.assert_close(hooked.run(ids).logits, models.plain("gpt2")(ids).logits, atol=2e-5, rtol=2e-5)
    with torch.no_grad():
        changed = bridge(ids)
    assert len(calls) == 1
    bridge.reset_hooks()
    with hooked.intervene(am.Intervention.zero([(1, head) for head in range(hooked.n_heads)])):
        torch.testing.assert_close(hooked.run(ids).logits, changed, atol=2e-5, rtol=2e-5)
    _, cache = bridge.run_with_cache(ids)
    acts = hooked.run(ids, points=["pattern"])
    torch.testing.assert_close(cache["blocks.2.attn.hook_pattern"], acts["pattern", 2], atol=1e-5, rtol=1e-5)


def test_a_folder_that_was_booted_brings_its_tokenizer(tmp_path: Path) -> None:
    models.fresh("bloom").save_pretrained(tmp_path)
    models.tokenizer(has_bos=True).save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path))
    hooked = am.load(bridge)
    assert hooked.tokenizer is bridge.tokenizer
    assert hooked.encode("the keys", bos=True).ids.tolist() == [[2, 3, 4]]
    own = models.tokenizer()
    assert am.load(bridge, tokenizer=own).tokenizer is own
    assert am.load(bridge.original_model).tokenizer is None
    assert am.attention_focus(hooked, "the keys to").n_layers == 2


def test_a_bridge_in_another_precision_is_copied() -> None:
    bridge = bridge_of("bloom")
    before = state_of(bridge)
    hooked = am.load(bridge, dtype="float64")
    assert hooked.dtype == torch.float64 and hooked.certificate.ok
    assert_same(before, state_of(bridge))


@pytest.mark.usefixtures("unchecked")
def test_other_things_of_transformer_lens_are_refused() -> None:
    bridge = bridge_of("gpt2")
    with pytest.raises(UnsupportedModelError, match=r"got \w*BlockBridge, a part of .* am.load\(bridge\)"):
        am.load(bridge.blocks[0])
    refuses("a TransformerBridge, or left out; got TransformerBridgeConfig", am.load, bridge.cfg)
    native = copy.copy(bridge)
    native.original_model = nn.Linear(2, 3)
    refuses("must hold a transformers model; it holds Linear", am.load, native, error=UnsupportedModelError)
    refuses(r"must come from am\.load", am.attention_focus, bridge, "the keys")
    bridge.original_model = models.fresh("llama")
    with pytest.raises(
        am.errors.UnsupportedModelError, match=r"original_model is a LlamaForCausalLM without the bridge's"
    ):
        am.load(bridge)

    class HookedTransformer(nn.Linear):
        """A class with the name of TransformerLens's model before version 4."""

    with pytest.raises(
        am.errors.UnsupportedModelError, match="got HookedTransformer, a model of TransformerLens before"
    ):
        am.load(HookedTransformer(2, 3))
