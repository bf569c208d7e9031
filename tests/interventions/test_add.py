"""Values added to a point, against a hook that adds them; and the definition of a new edit."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import models
import pytest
import torch
from torch import Tensor

from attnmech.errors import InputError
from attnmech.interventions import Intervention
from attnmech.interventions.edits import EDITS, PointEdit
from attnmech.interventions.values import BatchPart

SHAPES = {"z": ("head", "d_head"), "q": ("head", "d_head"), "k": ("kv_head", "d_head"), "v": ("kv_head", "d_head")}
ROTATED = (("gpt2", "z"), ("llama", "k"), ("llama", "v"), ("bloom", "q"), ("gemma2", "resid_pre"), ("opt", "resid_mid"),
           ("gpt_neox", "resid_post"), ("mistral", "attn_out"), ("qwen3_bias", "mlp_out"))  # fmt: skip
"""Every point once, each on a different family."""


@pytest.mark.parametrize(("name", "point"), ROTATED)
@pytest.mark.parametrize("positions", [None, [0, -2]])
def test_adds_what_a_hook_adds(name: str, point: str, positions: list[int] | None) -> None:
    model, ids, layer, head = models.hooked(name), models.token_ids(name), 1, 1
    sizes = model.output_stack.sizes(point)
    axes = [sizes[axis] for axis in SHAPES.get(point, ("d_model",))]
    added = torch.randn(len(ids), ids.shape[1], *axes, generator=torch.Generator().manual_seed(3))
    rows = list(range(ids.shape[1])) if positions is None else [0, ids.shape[1] - 2]

    def by_hand(value: Tensor) -> None:
        at: Any = (slice(None), rows, head) if point in SHAPES else (slice(None), rows)
        value[at] = value[at] + -1.5 * added[at]

    place: dict[str, Any] = {"heads": [(layer, head)]} if point in SHAPES else {"layers": [layer]}
    change = Intervention.add(point, {layer: added}, **place, factor=-1.5, positions=positions)  # type: ignore[arg-type]
    with model.intervene(change):
        logits = model.run(ids).logits
    with model.hooks({(point, layer): by_hand}):
        expected = model.run(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, model.run(ids).logits)


def test_a_vector_is_added_in_each_layer_of_layers_or_heads() -> None:
    model, ids = models.hooked("llama"), models.token_ids("llama")
    wide, narrow = (
        torch.randn(size, generator=torch.Generator().manual_seed(5)) for size in (model.d_model, model.d_head)
    )

    def at_head(z: Tensor) -> None:
        z[:, :, 2] += narrow

    changes = (
        (Intervention.add("resid_post", wide, layers=[0, 1]), {"resid_post": lambda x: x + wide}),
        (Intervention.add("z", narrow, heads=[(1, 2)]), {("z", 1): at_head}),
        (Intervention.stream("attn_out", [1], wide), {("attn_out", 1): lambda x: wide.expand_as(x)}),
    )  # fmt: skip
    for change, hooks in changes:
        with model.hooks(hooks):
            expected = model.run(ids).logits
        with model.intervene(change):
            torch.testing.assert_close(model.run(ids).logits, expected, rtol=1e-5, atol=1e-5)
    values = model.run(ids + 1, points=["z"])["z", 1]
    assert Intervention.replace([(1, 2)], values) == Intervention.replace([(1, 2)], {1: values})
    with pytest.raises(InputError, match=r"got Tensor; one tensor needs `layers=\[3\]`, or heads as a list"):
        Intervention.add("resid_post", wide)
    with (
        pytest.raises(InputError, match="its values must be"),
        model.intervene(Intervention.add("z", wide, heads=[(1, 2)])),
    ):
        pass


@patch.dict(EDITS)
def test_a_new_edit_is_its_class(tmp_path: Any) -> None:
    @dataclass(frozen=True)
    class Flip(PointEdit):
        POINTS = ("z",)
        point: str = "z"

        def sentence(self, heads: str) -> str:
            return f"{self.point} of {heads} changes its sign"

        def new(self, value: Tensor, layer: int, part: BatchPart) -> Tensor:
            return -value

    model, ids = models.hooked("llama"), models.token_ids("llama")
    flip = Intervention(Flip(), ((1, 2),), positions=(-1,))
    assert str(flip) == "z of L1H2 changes its sign at the last position"
    assert Intervention.load(flip.save(tmp_path / "flip.safetensors")) == flip

    def by_hand(z: Tensor) -> None:
        z[:, -1, 2] *= -1

    with model.hooks({("z", 1): by_hand}):
        expected = model.run(ids).logits
    with model.intervene(flip):
        torch.testing.assert_close(model.run(ids).logits, expected)
