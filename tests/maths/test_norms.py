"""The formulas of norms, against torch's own norms."""

import pytest
import torch

from attnmech.maths.norms import FrozenNorm, reciprocal_rms

F64 = torch.float64


@pytest.mark.parametrize("centred", [True, False])
def test_a_frozen_norm_is_linear_and_gives_the_norm_of_the_whole(centred: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    parts = torch.randn(4, 2, 3, 7, generator=generator, dtype=F64)
    parts[:, 0, 1, 2] = 0
    gamma, shift = torch.randn(2, 7, generator=generator, dtype=F64)
    x = parts.sum(0)
    norm = torch.nn.LayerNorm(7, eps=0.1, dtype=F64) if centred else torch.nn.RMSNorm(7, eps=0.1, dtype=F64)
    with torch.no_grad():
        norm.weight.copy_(gamma)
        if centred:
            norm.bias.copy_(shift)
        out = norm(x)
    frozen = FrozenNorm.of(x, out, 3 * gamma, shift if centred else None, centred=centred)
    summed = torch.stack([frozen(part) for part in parts]).sum(0)
    torch.testing.assert_close(summed + (shift if centred else 0), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(frozen(2 * parts[0] - parts[1]), 2 * frozen(parts[0]) - frozen(parts[1]))
    nothing = FrozenNorm.of(torch.zeros_like(x), torch.zeros_like(x), gamma, None, centred=centred)
    assert bool((nothing(parts[0]) == 0).all())


@pytest.mark.parametrize("centred", [True, False])
def test_the_reciprocal_size_is_by_what_torch_multiplies(centred: bool) -> None:
    x = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(5), dtype=F64)
    norm = torch.nn.LayerNorm(7, eps=0.1, dtype=F64) if centred else torch.nn.RMSNorm(7, eps=0.1, dtype=F64)
    given = x - x.mean(dim=-1, keepdim=True) if centred else x
    torch.testing.assert_close(given * reciprocal_rms(given, 0.1)[..., None], norm(x).detach(), rtol=1e-12, atol=1e-12)
