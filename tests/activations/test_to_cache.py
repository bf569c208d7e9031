"""`acts.to_cache()` is TransformerLens's cache: names, shapes and values of the bridge's own `run_with_cache`."""

import re

import models
import pytest
import torch
from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import attnmech as am

FAMILIES = ["gpt2", "llama_bias", "gpt_neox", "bert", "gemma2"]
WITHOUT = {
    "gpt2": set(),
    "llama_bias": set(),
    "gpt_neox": {"q_rot", "k_rot"},
    "bert": {"embed", "scores", "attn_out", "resid_mid"},
    "gemma2": {"logits"},
}
"""The points of a family for which TransformerLens has no hook, or a hook with another value."""


def bridge_of(name: str, *, compatibility: bool) -> TransformerBridge:
    model = models.fresh(name)
    model.set_attn_implementation("eager")  # without it, a bridge of BERT has no patterns
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)
    if compatibility:
        bridge.enable_compatibility_mode(disable_warnings=True)
    return bridge


def every_point(model: am.HookedModel) -> list[str]:
    return [name for name, point in model.points.items() if point.absent is None]


@pytest.mark.parametrize("compatibility", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_equals_the_bridge_s_own(name: str, compatibility: bool) -> None:
    bridge, ids = bridge_of(name, compatibility=compatibility), models.token_ids(name)
    model = am.load(bridge)
    cache = model.run(ids, points=every_point(model)).to_cache(bridge)
    assert isinstance(cache, ActivationCache) and cache.model is bridge
    with torch.no_grad():
        _, theirs = bridge.run_with_cache(ids)
        if name != "bert":  # TransformerLens cannot compute them there
            bridge.set_use_attn_result(True)
            theirs.cache_dict |= bridge.run_with_cache(ids, names_filter=lambda hook: hook.endswith("hook_result"))[1]
    results = {f"blocks.{layer}.attn.hook_result" for layer in range(model.n_layers)}
    assert name == "bert" or results <= set(theirs)
    for hook, value in cache.items():
        if name == "bert" and hook in results:
            continue
        assert value.shape == theirs[hook].shape, hook
        visible = value > torch.finfo(value.dtype).min
        torch.testing.assert_close(value[visible], theirs[hook][visible], atol=2e-5, rtol=2e-5, msg=hook)
        assert visible.all() or "scores" in hook
    assert set(every_point(model)) - model.certificate.lens_points == WITHOUT[name]
    assert len(cache) == sum(
        1 if name in ("embed", "logits") else model.n_layers
        for name in every_point(model)
        if name in model.certificate.lens_points
    )


def test_methods_of_the_cache_work() -> None:
    bridge, ids = bridge_of("gpt2", compatibility=False), models.token_ids("gpt2")
    acts = am.load(bridge).run(ids, points=["pattern", "resid_pre", "resid_mid", "resid_post"])
    cache = acts.to_cache(bridge)
    _, theirs = bridge.run_with_cache(ids)
    for mid in (False, True):
        ours, expected = (each.accumulated_resid(incl_mid=mid) for each in (cache, theirs))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache["pattern", -1], theirs["pattern", -1], atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.stack_activation("pattern"), acts["pattern"])
    alone = am.load(bridge).run(ids[:1], points=["pattern"]).to_cache()
    assert alone.model is None and alone.remove_batch_dim()["pattern", 1].ndim == 3


def test_gradients_are_left_out() -> None:
    acts = models.hooked("gpt2").run(models.token_ids("gpt2"), points=["z"], gradients_of=lambda logits: logits.sum())
    assert set(acts.to_cache()) == {f"blocks.{layer}.attn.hook_z" for layer in range(3)}


def test_what_cannot_be_a_cache_is_refused() -> None:
    model, ids = models.hooked("bert"), models.token_ids("bert")
    acts = model.run(ids, points=["scores", "resid_mid"])
    says = "no hook with the same value for any point of this run, which holds: scores 0-1, resid_mid 0-1"
    with pytest.raises(am.errors.InputError, match=re.escape(says)):
        acts.to_cache()
    with pytest.raises(am.errors.InputError, match=r"must be a TransformerBridge, such as model\.bridge, or None"):
        model.run(ids).to_cache(model)
    seq2seq = models.hooked("t5").run(models.inputs_of("t5"), points=["cross.pattern"])
    with pytest.raises(am.errors.InputError, match=re.escape("On this model these points have one: none.")):
        seq2seq.to_cache()
