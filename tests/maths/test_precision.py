"""Bounds on rounding, against float64: errors never exceed them, and they are not much too wide."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attnmech.maths.precision import least_rounding, product_rounding, steps_rounding, sum_rounding
from attnmech.maths.scores import Rounded, product_error, score_rounding

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
KINDS = ("normal", "one sign", "constant", "outlier")


def drawn(kind: str, *shape: int, seed: int = 0) -> Tensor:
    """Numbers in float32; the last axis is the one that is summed over."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    if kind == "one sign":
        values = values.abs()
    if kind == "constant":
        values = 1 + 0.01 * values
    if kind == "outlier":
        values[..., 3] *= 30_000
    return values.float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("terms", [8, 64, 576, 4096])
def test_products_stay_within_their_bound(terms: int, kind: str) -> None:
    x, W = drawn(kind, 40, terms), drawn(kind if kind != "outlier" else "normal", 100, terms, seed=1)
    exact = x.double() @ W.double().T
    allowed = product_rounding(F32, terms) * x.double().norm(dim=-1)[:, None] * W.double().norm(dim=-1)
    one_by_one = torch.stack([(row[None] @ W.T)[0] for row in x])
    for found in (x @ W.T, one_by_one, torch.einsum("bm,nm->bn", x, W)):
        assert float(((found - exact).abs() / allowed).max()) <= 1
    # An entry that is off by ten times the bound exceeds it, wherever within the bound rounding had left it.
    assert float(((x @ W.T + 10 * allowed.float() - exact).abs() / allowed).min()) > 8


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
def test_sums_of_three_stay_within_their_bound(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b, c = ((size * torch.randn(4000, generator=generator, dtype=F64)).to(dtype) for size in (5_000.0, 1.0, 200.0))
    size = sum(each.double().abs() for each in (a, b, c))
    wide = torch.promote_types(dtype, F32)
    for one, other in pairwise([(a + b) + c, (c + b) + a, (a.to(wide) + b.to(wide) + c.to(wide)).to(dtype)]):
        assert bool(((one.double() - other.double()).abs() <= sum_rounding(dtype) * size).all())


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_a_few_steps_in_a_models_precision_stay_within_their_bound(dtype: torch.dtype) -> None:
    """Rounding by a projection, a bias and a rotation, against the exact pair, whose length the rotation preserves."""
    generator = torch.Generator().manual_seed(3)
    for size in (1.0, 1e-5, 300.0):
        x, y = (size * torch.randn(2, 5000, generator=generator, dtype=F64)).unbind()
        angle = torch.rand(5000, generator=generator, dtype=F64)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        found = x.to(dtype) * cos - y.to(dtype) * sin
        exact = x * cos.double() - y * sin.double()
        allowed = steps_rounding(dtype) * torch.hypot(x, y) + least_rounding(dtype)
        assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("size", [1e-4, 1.0, 50.0])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_scores_stay_within_their_bound(dtype: torch.dtype, size: float) -> None:
    """Queries and keys made of 48 inputs in float32, rounded to a precision; scores in float32."""
    d_model, d_head, rows = 48, 16, 60
    # float16 ends at 65504.
    x = (drawn("outlier", 1, rows, d_model) / (1000 if dtype == F16 else 1)).to(dtype)
    W_Q, W_K = (size * drawn("normal", d_head, d_model, seed=seed).T.to(dtype) for seed in (4, 5))

    def rounded(W: Tensor) -> tuple[Tensor, Tensor, Rounded]:
        exact, made = x.double() @ W.double(), (x.float() @ W.float()).to(dtype)
        summed = x.float().norm(dim=-1) * W.float().norm(dim=0).amax()
        error = product_rounding(dtype, d_model) * summed + steps_rounding(dtype) * exact.abs().amax(dim=-1).float()
        return exact, made, Rounded(exact.norm(dim=-1).float()[:, None], (error + least_rounding(dtype))[:, None])

    query, made_query, of_query = rounded(W_Q)
    key, made_key, of_key = rounded(W_K)
    score = 0.25 * (made_query.float() @ made_key.float().mT)[:, None]
    exact = 0.25 * (query @ key.mT)[:, None]
    allowed = score_rounding(of_query, of_key, 0.25, d_head=d_head, score=score)
    assert float(((score - exact).abs() / allowed).max()) <= 1
    alone = product_error(of_query, of_key, 0.25, d_head)
    assert torch.all(alone[0, 0] <= allowed[0, 0].diagonal())
    # A head that is a thousand times smaller gets a millionth of the tolerance.
    weak = [Rounded(each.norm / 1000, each.error / 1000) for each in (of_query, of_key)]
    assert torch.allclose(product_error(*weak, 0.25, d_head) * 1e6, alone)
