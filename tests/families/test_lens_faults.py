"""Hooks of TransformerLens with another meaning: the certificate names them, and attnmech's points are right."""

from typing import Any

import models
import pytest
import torch
from torch import Tensor

import attnmech as am

LENGTH = 6
SCORES: dict[str, tuple[str, str, float]] = {
    "bert": ("attention.self.query", "attention.self.key", 7**-0.5),
    "roberta": ("attention.self.query", "attention.self.key", 7**-0.5),
    "opt": ("self_attn.q_proj", "self_attn.k_proj", 8**-0.5),
}
"""The projections of queries and keys, and the scale of their product."""


def verdicts(name: str) -> Any:
    return models.hooked(name).certificate.lens_frame().set_index("point").verdict


def plain_outputs(name: str, layer: int, ids: Tensor, *paths: str) -> list[Tensor]:
    """The outputs of some modules of one block in a plain model."""
    block, found = models.blocks_of(models.plain(name))[layer], {}

    def keep(path: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            found[path] = output

        return hook

    handles = [block.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        models.plain(name)(ids)
    for handle in handles:
        handle.remove()
    return [found[path] for path in paths]


def in_lens(name: str, ids: Tensor, hook: str) -> Tensor:
    with torch.no_grad():
        found: Tensor = models.hooked(name).bridge.run_with_cache(ids)[1][hook]
    return found


@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_hook_that_holds_the_pattern(name: str) -> None:
    assert verdicts(name)["scores"] == "differs"
    assert verdicts(name)["pattern"] == "agrees"
    hooked, ids = models.hooked(name), models.token_ids(name, 2, LENGTH)
    acts = hooked.run(ids, points=["scores", "pattern"])
    query, key, scale = SCORES[name]
    for layer in range(2):
        q, k = plain_outputs(name, layer, ids, query, key)
        for h in range(hooked.n_heads):
            columns = slice(h * hooked.d_head, (h + 1) * hooked.d_head)
            for i in range(LENGTH):
                for j in range(LENGTH if name != "opt" else i + 1):
                    expected = (q[:, i, columns] * k[:, j, columns]).sum(-1) * scale
                    torch.testing.assert_close(acts["scores", layer][:, h, i, j], expected, rtol=1e-4, atol=1e-4)
        theirs = in_lens(name, ids, f"blocks.{layer}.attn.hook_attn_scores")
        torch.testing.assert_close(theirs, acts["pattern", layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_attn_out_and_resid_mid_of_encoders(name: str) -> None:
    assert verdicts(name)["attn_out"] == verdicts(name)["resid_mid"] == "differs"
    assert verdicts(name)["attn_raw"] == "agrees"
    ids = models.token_ids(name, 2, LENGTH)
    acts = models.hooked(name).run(ids, points=["resid_pre", "attn_out", "resid_mid"])
    with torch.no_grad():
        states = models.plain(name)(ids, output_hidden_states=True).hidden_states
    for layer in range(2):
        raw, normed = plain_outputs(name, layer, ids, "attention.output.dense", "attention.output")
        torch.testing.assert_close(acts["attn_out", layer], raw, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(acts["resid_mid", layer], states[layer] + raw, rtol=1e-4, atol=1e-5)
        # TransformerLens returns the LayerNorm of the sum.
        theirs = in_lens(name, ids, f"blocks.{layer}.hook_attn_out")
        torch.testing.assert_close(theirs, normed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "opt", "bloom6", "gptj", "gemma2"])
def test_the_check_of_the_bridge_names_the_hooks_that_differ(name: str) -> None:
    check = next(check for check in models.hooked(name).certificate.checks if check.name == "bridge")
    differing = list(verdicts(name)[verdicts(name) == "differs"].index)
    assert check.passed and differing
    assert check.detail.endswith(", ".join(differing))


def test_what_attention_adds_in_gemma_2_is_after_its_norm() -> None:
    """TransformerLens's hook_attn_out is after the norm, where the output is added; attn_raw is before it."""
    assert verdicts("gemma2")["attn_out"] == verdicts("gemma2")["attn_raw"] == "agrees"
    ids = models.token_ids("gemma2", 2, LENGTH)
    acts = models.hooked("gemma2").run(ids, points=["attn_raw", "attn_out"])
    raw, added = plain_outputs("gemma2", 1, ids, "self_attn.o_proj", "post_attention_layernorm")
    torch.testing.assert_close(acts["attn_raw", 1], raw, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(acts["attn_out", 1], added, rtol=1e-4, atol=1e-5)
    assert float((raw - added).abs().max()) > 0.5


def test_logits_of_gemma_2_are_after_their_soft_cap() -> None:
    assert verdicts("gemma2")["logits"] == "differs"
    ids = models.token_ids("gemma2", 2, LENGTH)
    logits = models.hooked("gemma2").run(ids).logits
    assert float(logits.abs().max()) <= 3.0
    theirs = in_lens("gemma2", ids, "unembed.hook_out")
    torch.testing.assert_close(logits, 3.0 * torch.tanh(theirs / 3.0), rtol=1e-4, atol=1e-4)


def test_queries_of_gptj_are_scored_after_rotation_and_scale() -> None:
    assert verdicts("gptj")["scores"] == "differs"
    acts = models.hooked("gptj").run(models.token_ids("gptj", 2, LENGTH), points=["q_rot", "k_rot", "scores"])
    for i in range(LENGTH):
        for j in range(i + 1):
            expected = (acts["q_rot", 1][:, i] * acts["k_rot", 1][:, j]).sum(-1) / 8**0.5
            torch.testing.assert_close(acts["scores", 1][:, :, i, j], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["falcon_new", "falcon_new_one_norm", "opt_post", "gpt_neox_serial"])
def test_models_that_transformerlens_cannot_run_are_certified_without_it(name: str) -> None:
    certificate = models.hooked(name).certificate
    check = next(check for check in certificate.checks if check.name == "bridge")
    assert check.passed is None and check.detail
    assert certificate.ok and certificate.lens == ()
    am.decompose_scores(models.hooked(name), models.token_ids(name))


@pytest.mark.parametrize("name", ["falcon_alibi_serial", "falcon_alibi_parallel"])
def test_the_bridge_of_falcon_with_alibi_counts_it_twice(name: str) -> None:
    """It runs transformers' eager attention."""
    ids = models.token_ids(name)
    with torch.no_grad():
        bridge = models.hooked(name).bridge(ids)
        eager = models.in_attention(models.fresh(name), "eager")(ids).logits
    torch.testing.assert_close(bridge, eager, rtol=1e-3, atol=1e-3)
    assert float((bridge - models.hooked(name).run(ids).logits).abs().max()) > 1e-2
    check = next(check for check in models.hooked(name).certificate.checks if check.name == "bridge")
    assert check.passed is False and check.points == ()
