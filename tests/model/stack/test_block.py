"""The stream to which a block's MLP adds, and the end of a block, against the modules of the plain model."""

from typing import Any

import models
import pytest
import torch
from torch import Tensor

from attnmech.model.attention.observed import LayerEnd
from attnmech.model.stack.block import PostNormEnd, attention_scale, before_mlp

NAMES = ("resid_pre", "resid_mid", "attn_raw", "attn_out", "mlp_out", "resid_post")


def ends_of(name: str) -> list[LayerEnd]:
    """The end of every layer, with all points."""
    model, found = models.hooked(name), []
    stack = model.stack("decoder" if "decoder" in model.stacks else None)
    batch = model.encode(models.inputs_of(name))
    points = [
        (stack.point(point), layer)
        for point in NAMES
        if model.points[stack.point(point)].absent is None
        for layer in stack.layers
    ]
    layers = [(stack.label, layer) for layer in stack.layers]
    model.forward(batch, captures=points, ends=[found.append], layers=layers)
    return found


MODULES: dict[str, Any] = {
    "gpt2": lambda block: block.ln_2,
    "llama": lambda block: block.post_attention_layernorm,
    "bert": lambda block: block.intermediate,
    "gptj": lambda block: block.ln_1,
    "t5": lambda block: block.layer[2],
    "bart": lambda block: block.fc1,
    "mbart": lambda block: block.final_layer_norm,
}
"""A module of a block that receives the stream to which the MLP adds."""


@pytest.mark.parametrize("name", MODULES)
def test_the_mlp_adds_to_the_stream_that_the_block_gives_it(name: str) -> None:
    plain, given = models.plain(name), []
    blocks = plain.decoder.block if name == "t5" else models.blocks_of(plain)
    handles = [
        MODULES[name](block).register_forward_pre_hook(lambda _, args: given.append(args[0])) for block in blocks
    ]
    try:
        with torch.no_grad():
            plain(**models.inputs_of(name))
    finally:
        for handle in handles:
            handle.remove()
    stack = models.hooked(name).output_stack
    ends = ends_of(name)
    assert len(ends) == len(given)
    for end, expected in zip(ends, given, strict=True):
        torch.testing.assert_close(before_mlp(stack, end)[end.real], expected[end.real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_post_norm_block_ends_as_the_model_goes_on(name: str) -> None:
    stack = models.hooked(name).stack()
    for end in ends_of(name):
        made = PostNormEnd.of(stack, end.layer)(end["resid_mid"], end["mlp_out"])
        torch.testing.assert_close(made, end["resid_post"], rtol=1e-5, atol=1e-5)


def test_the_order_of_the_norms_matters() -> None:
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    def squared(x: Tensor) -> Tensor:
        return x.pow(2)

    middle, added = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, -1.0]])
    end = PostNormEnd(mid_norm=twice, post_norm=squared)
    assert end.before_mlp(middle).tolist() == [[2.0, 6.0]]
    assert end.before_norm(middle, added).tolist() == [[2.5, 5.0]]
    assert end(middle, added).tolist() == [[6.25, 25.0]]


def test_attention_is_scaled_where_a_norm_stands_after_it_and_nowhere_else() -> None:
    for name in ("gemma2", "bert", "gpt2"):
        stack = models.hooked(name).stack()
        for end in ends_of(name):
            scale = attention_scale(stack, end, torch.float32)
            written = scale.by_token[..., None] * scale.folded(end["attn_raw"])
            torch.testing.assert_close(written, end["attn_out"], rtol=1e-4, atol=1e-5)
            assert bool((scale.by_token == 1).all()) == (name != "gemma2")
