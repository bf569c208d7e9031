"""Norms and products computed in d_head dimensions, against the updates themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmech.maths.updates import Writer, cosine


@given(
    st.integers(1, 3), st.integers(0, 6), st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(0, 99)
)
def test_norms_and_products_are_those_of_the_updates(
    batch: int, length: int, heads: int, d_head: int, d_model: int, seed: int
) -> None:
    """Includes heads wider than the stream, and fewer tokens than d_head, for which no triangle is used."""
    generator = torch.Generator().manual_seed(seed)
    z, W_O, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((batch, length, heads, d_head), (heads, d_head, d_model), (batch, length, d_model))
    )
    writer = Writer(W_O)
    ((norm, product),) = writer.against(x, z)
    assert torch.equal(writer.norm(z), norm)
    assert norm.shape == product.shape == (batch, heads, length)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                u = z[b, i, h] @ W_O[h]
                assert float(norm[b, h, i]) == pytest.approx(math.sqrt(float(u @ u)), rel=1e-12, abs=1e-13)
                assert float(product[b, h, i]) == pytest.approx(float(u @ x[b, i]), rel=1e-9, abs=1e-12)


def test_a_matrix_of_low_rank_and_one_of_zeros() -> None:
    W_O = torch.zeros(2, 3, 5, dtype=torch.float64)
    W_O[0, 1, 4] = -2
    for tokens in (1, 4):
        z = torch.tensor([[[[7.0, 3, 1], [4, 4, 4]]]], dtype=torch.float64).expand(-1, tokens, -1, -1)
        ((norm, product),) = Writer(W_O).against(torch.ones(1, tokens, 5, dtype=torch.float64), z)
        assert norm[0].tolist() == [pytest.approx([6] * tokens), pytest.approx([0] * tokens)]
        assert product[0].tolist() == [pytest.approx([-6] * tokens), pytest.approx([0] * tokens)]


def test_small_updates_keep_their_digits_in_single_precision() -> None:
    """Computing ‖z W‖² as z (W Wᵀ) zᵀ would lose a direction that W shrinks by 1e5."""
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q for n in (3, 6))
    W = left @ torch.diag(torch.tensor([1.0, 1.0, 1e-5], dtype=torch.float64)) @ right[:3]
    for tokens in (1, 4):
        norm = Writer(W.float()[None]).norm(left[:, 2].float().expand(1, tokens, 1, -1))
        assert norm.flatten().tolist() == pytest.approx([1e-5] * tokens, rel=0.1)


def test_cosines() -> None:
    u, x = torch.tensor([3.0, 4]), torch.tensor([[3.0, 4], [-6, -8], [4, -3], [0, 0]])
    assert cosine(x @ u, u.norm().expand(4), x.norm(dim=-1)).tolist() == pytest.approx([1, -1, 0, 0])
    assert cosine(torch.tensor([2.0, -2]), torch.ones(2), torch.ones(2)).tolist() == [1, -1]
    assert cosine(torch.ones(2, 3, 4), torch.full((2, 3, 4), 2.0), torch.full((2, 1, 4), 2.0)).unique().tolist() == [
        0.25
    ]
