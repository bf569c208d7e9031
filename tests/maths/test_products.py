"""Products by a weight, whichever routine makes them, against the same in float64."""

import pytest
import torch
from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.pytorch_utils import Conv1D

from attnmech.maths import products
from attnmech.maths.products import product, product_by_head
from attnmech.model.copies import use_faster_routines


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"], autouse=True)
def routine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_faster", lambda: request.param)
    return bool(request.param)


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 5), (2, 3, 4), (0,)])
def test_product(rows: tuple[int, ...], with_bias: bool) -> None:
    x, weight, bias = noise(*rows, 210), noise(190, 210, seed=4), noise(190, seed=5) if with_bias else None
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    with torch.no_grad():
        for same in (weight, weight.T.contiguous().T):
            found = product(x, same, bias)
            assert found.shape == wanted.shape
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-5)
        torch.testing.assert_close(product(x.double(), weight.double()), x.double() @ weight.double().T)


def test_rows_that_do_not_lie_side_by_side() -> None:
    x, weight = noise(5, 2, 210).transpose(0, 1), noise(190, 210)
    with torch.no_grad():
        torch.testing.assert_close(product(x, weight), product(x.contiguous(), weight))


def test_by_head() -> None:
    x, W = noise(2, 3, 96), noise(5, 96, 72, seed=4)
    with torch.no_grad():
        found = product_by_head(x, W)
    wanted = torch.stack([x.double() @ each.double() for each in W], dim=1)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-5)


def test_gradients_are_torch_s() -> None:
    x, weight = noise(3, 210).requires_grad_(), noise(190, 210)
    product(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(dim=0).expand(3, -1))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_user_who_allows_less_exact_products_gets_torch_s(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(products.torch.ops.mkldnn, "_linear_pointwise", None)
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.no_grad():
            assert product(noise(3, 210), noise(190, 210)).shape == (3, 190)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", [BloomGelu, NewGELUActivation, FastGELUActivation])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [320, 301])
def test_gelus(kind: type[nn.Module], dtype: torch.dtype, width: int) -> None:
    """In float64, in 16 bits and of odd widths as transformers has it; in float32 as near to float64 as that."""
    x, own, ours = 3 * noise(7, width).to(dtype), kind(), kind()
    use_faster_routines(ours)
    with torch.no_grad():
        wanted = own(x)
        if dtype == torch.float32 and width == 320:
            assert torch.equal(ours(x)[3], ours(x[3]))
            exact = own(x.double())
            assert (ours(x) - exact).abs().max() <= max(2e-7, 1.1 * float((wanted - exact).abs().max()))
        else:
            assert torch.equal(ours(x), wanted)


def test_only_linear_layers_as_torch_and_transformers_have_them() -> None:
    """A layer with a `forward` of its own, or of a class of its own, keeps it."""

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    own = nn.Linear(4, 3)
    own.forward = lambda input: input  # type: ignore[method-assign]
    model = nn.Sequential(Doubled(4, 4), own, nn.Linear(4, 4), Conv1D(6, 4))
    x = noise(2, 4)
    with torch.no_grad():
        wanted = model(x)
        use_faster_routines(model)
        assert torch.equal(model(x), wanted)
