"""Hooks of TransformerLens with another meaning: the certificate names them, and attnmech's points are right."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor

import attnmech as am

LENGTH = 6


def verdicts(name: str) -> Any:
    return models.hooked(name).certificate.lens_frame().set_index("point").verdict


def output_of(name: str, path: str, ids: Tensor) -> Tensor:
    found: list[Tensor] = []
    module = models.blocks_of(models.plain(name))[1].get_submodule(path)
    with module.register_forward_hook(lambda module, args, output: found.append(output)), torch.no_grad():
        models.plain(name)(ids)
    return found[0]


HELD: dict[tuple[str, str], tuple[str, Callable[[am.results.Activations, Tensor], Tensor]]] = {
    **{
        (name, "scores"): ("blocks.1.attn.hook_attn_scores", lambda acts, ids: acts["pattern", 1])
        for name in ("bert", "roberta", "opt")
    },
    **{
        (name, "attn_out"): (
            "blocks.1.hook_attn_out", lambda acts, ids, name=name: output_of(name, "attention.output", ids))
        for name in ("bert", "roberta")
    },
}  # fmt: skip
"""What hooks of TransformerLens hold instead: the pattern, the norm of the sum."""


@pytest.mark.parametrize(("name", "point"), HELD)
def test_a_hook_holds_something_else(name: str, point: str) -> None:
    """The certificate says so; test_points.py and test_families.py compare attnmech's points with the raw weights."""
    hook, held = HELD[name, point]
    hooked, ids = models.hooked(name), models.token_ids(name, 2, LENGTH)
    assert verdicts(name)[point] == "differs" and verdicts(name)["pattern"] == "agrees"
    acts = hooked.run(ids, points=["scores", "pattern", "attn_out", "logits"])
    with torch.no_grad():
        theirs, expected = hooked.bridge.run_with_cache(ids)[1][hook], held(acts, ids)
    seen = theirs > -1e30
    torch.testing.assert_close(theirs[seen], expected[seen], rtol=1e-4, atol=1e-4)


def test_logits_of_gemma_2_are_after_their_soft_cap() -> None:
    hooked, ids = models.hooked("gemma2"), models.token_ids("gemma2", 2, LENGTH)
    assert verdicts("gemma2")["logits"] == "differs"
    with torch.no_grad():
        theirs = hooked.bridge.run_with_cache(ids)[1]["unembed.hook_out"]
    torch.testing.assert_close(hooked.run(ids).logits, 3.0 * torch.tanh(theirs / 3.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "opt", "bloom6", "gptj", "gemma2"])
def test_the_check_of_the_bridge_names_the_hooks_that_differ(name: str) -> None:
    check = next(check for check in models.hooked(name).certificate.checks if check.name == "bridge")
    differing = list(verdicts(name)[verdicts(name) == "differs"].index)
    assert check.passed and differing
    assert check.detail.endswith(", ".join(differing))


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
