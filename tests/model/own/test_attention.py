"""Attention of the user's own code: by its call of scaled_dot_product_attention, or named by an Architecture."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own import D, noise, randomised
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import CertificateError, UnsupportedModelError
from attnmech.model.files.load import UnprovenWarning

X = noise(3, 9, 5)
SHOWN = torch.ones(9, 9, dtype=torch.bool).tril()


class Product(nn.Module):
    """One projection for q, k and v, with fewer heads of keys, and one product."""

    def __init__(self, *, kv_heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.widths = [D, 6 * kv_heads, 6 * kv_heads]
        self.qkv, self.o = nn.Linear(D, sum(self.widths)), nn.Linear(D, D)
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 6)).transpose(1, 2) for each in self.qkv(x).split(self.widths, dim=-1))
        z = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=True)
        return self.o(z.transpose(1, 2).flatten(2))


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 6)).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = q @ k.mT / 6**0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, -torch.inf)
        return self.o((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(D), nn.LayerNorm(D), attention
        self.mlp = nn.Sequential(nn.Linear(D, 40), nn.GELU(), nn.Linear(40, D))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.n1(x), mask=mask)
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, D), nn.Linear(D, 3)
        self.layers = nn.ModuleList([Layer(make()) for _ in range(3)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.leave(x)


NAMED: dict[str, Any] = {
    "name": "mine", "blocks": "layers", "attention": "attention", "qkv": am.architecture.Separate("q", "k", "v"),
    "out": "attention.o", "attn_norm": "n1", "mid_norm": "n2", "mlp_out": "mlp", "n_heads": 4,
}  # fmt: skip

CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "a product": (Product, X, {}),
    "causal": (lambda: Product(causal=True), X, {}),
    "two heads of keys": (lambda: Product(kv_heads=2), X, {}),
    "with a mask": (Product, {"x": X, "mask": SHOWN}, {}),
    "with numbers added": (Product, {"x": X, "mask": noise(9, 9)}, {}),
    "a product, named": (Product, X, {"qkv": am.architecture.Fused("qkv", "qkv head d_head")}),
    "written out": (WrittenOut, X, NAMED),
    "written out, with a mask": (WrittenOut, {"x": X, "mask": SHOWN.float()}, {**NAMED, "mask": "mask"}),
}


def loaded(name: str) -> tuple[nn.Module, Any, am.HookedModel]:
    make, example, named = CASES[name]
    module = randomised(Net(make))
    architecture = am.Architecture(**{**NAMED, **named}) if named else None
    return module, example, am.load(module, example=example, architecture=architecture)


def called(module: nn.Module, example: Any) -> Tensor:
    with torch.no_grad():
        return module(**example) if isinstance(example, dict) else module(example)


@pytest.mark.parametrize("name", CASES)
def test_output_and_points(name: str) -> None:
    module, example, model = loaded(name)
    assert model.certificate.ok
    ran = model.run(example, points=["q", "k", "scores", "pattern", "z", "resid_post", "logits"])
    assert (ran.logits - called(module, example)).abs().max() < 2e-6
    q, k = (ran[each, 1].transpose(1, 2) for each in "qk")
    scores = q @ k.repeat_interleave(4 // k.shape[1], dim=1).mT / 6**0.5
    mask = example["mask"] if isinstance(example, dict) else SHOWN if name == "causal" else torch.zeros(9, 9)
    if mask.dtype == torch.bool or "written" in name:
        hidden = mask == 0 if name in ("causal", "with a mask", "written out, with a mask") else mask != 0
        expected = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    else:
        expected = (scores + mask).softmax(dim=-1)
    torch.testing.assert_close(ran["pattern", 1], expected, atol=1e-6, rtol=0)
    assert model.causal == (name in ("causal", "with a mask", "written out, with a mask"))
    assert am.decompose_scores(model, example).residual.max() < 1e-5


@pytest.mark.parametrize("name", ["a product", "written out"])
def test_edits_reach_the_output(name: str) -> None:
    module, example, model = loaded(name)
    with model.intervene(am.Intervention.zero([(2, head) for head in range(4)])):
        found = model.run(example).logits
    out = module.layers[2].attention.o
    with torch.no_grad():
        out.weight.zero_()
    assert (found - called(module, example)).abs().max() < 2e-6


def test_what_no_description_can_be_true_of() -> None:
    with pytest.raises(UnsupportedModelError, match=r"holds no nn\.MultiheadAttention, and makes no call of"):
        am.load(Net(WrittenOut).eval(), example=X)
    for wrong in ({"qkv": am.architecture.Separate("k", "q", "v")}, {"n_heads": 6}):
        with pytest.raises(UnsupportedModelError, match="softmax attention returns something else"):
            am.load(randomised(Net(WrittenOut)), example=X, architecture=am.Architecture(**{**NAMED, **wrong}))
    with pytest.raises(UnsupportedModelError, match=re.escape("names a module 'attn', which block 0 of 'layers'")):
        am.load(Net(Product).eval(), example=X, architecture=am.Architecture(**{**NAMED, "attention": "attn"}))
    other = am.Architecture(**{**NAMED, "qkv": am.architecture.Fused("qkv", "head qkv d_head")})
    with pytest.warns(UnprovenWarning, match="NOT certified"):
        model = am.load(randomised(Net(Product)), example=X, architecture=other)
    with pytest.raises(CertificateError, match="point 'q' is refused"):
        model.run(X, points=["q"])


def test_two_products_in_one_module_are_refused() -> None:
    class Two(Product):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            z = x.unflatten(-1, (4, 6)).transpose(1, 2)
            z = nn.functional.scaled_dot_product_attention(z, z, z)
            return super().forward(z.transpose(1, 2).flatten(2))

    with pytest.raises(UnsupportedModelError, match="calls scaled_dot_product_attention more than once"):
        am.load(randomised(Net(Two)), example=X)
