"""γ, ε and multipliers read from norm modules, against what the modules compute."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from attnmech.model.parts.norms import NormKind, epsilon_of, frozen_norm, gamma_of, is_centred, kind_of, norm_scale

D = 7
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(D, eps=0.1),
    "LayerNorm without weights": lambda: nn.LayerNorm(D, eps=0.1, elementwise_affine=False),
    "LayerNorm without shift": lambda: nn.LayerNorm(D, eps=0.1, bias=False),
    "Llama": lambda: LlamaRMSNorm(D, eps=0.1),
    "Gemma 2": lambda: Gemma2RMSNorm(D, eps=0.1),
    "Nemotron": lambda: NemotronLayerNorm1P(D, eps=0.1),
}
RMS = ("Llama", "Gemma 2")
ADDS_ONE = ("Gemma 2", "Nemotron")
"""Families whose norms multiply by weight + 1."""


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_of(kind: str) -> nn.Module:
    norm = MAKERS[kind]()
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(normal(D, seed=seed))
    return norm.requires_grad_(False)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_frozen_norm_makes_of_parts_adds_up_to_the_norm_of_their_sum(kind: str) -> None:
    norm, parts = norm_of(kind), normal(4, 2, 3, D).double()
    norm.to(torch.float64)
    frozen = frozen_norm(norm, parts.sum(dim=0), torch.float64)
    shift = frozen.shift
    assert (shift is None) == (kind not in ("LayerNorm", "Nemotron"))
    total = torch.stack([frozen(part) for part in parts]).sum(dim=0) + (0 if shift is None else shift)
    # transformers' RMSNorms compute in float32.
    tolerance = 1e-6 if kind in RMS else 1e-12
    torch.testing.assert_close(total, norm(parts.sum(dim=0)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", MAKERS)
def test_gamma_is_the_weight_with_what_the_family_adds(kind: str) -> None:
    norm, x = norm_of(kind), normal(2, 3, D)
    weight = norm.weight if isinstance(norm.weight, Tensor) else torch.ones(D)
    expected = weight + (1 if kind in ADDS_ONE else 0)
    torch.testing.assert_close(gamma_of(norm, x), expected)
    assert is_centred(norm, x) == (kind not in RMS)
    made = norm(x)
    assert kind_of(norm, x) == NormKind(kind not in RMS, 1.0 if kind in ADDS_ONE else 0.0)
    assert kind_of(nn.Linear(D, D), x) is None and made.shape == x.shape
    assert epsilon_of(norm) == 0.1


class Other(nn.Module):
    """No norm that is known: an RMSNorm with a part of an offset or of a mean, or with a bent output."""

    def __init__(self, offset: float = 0.0, mean: float = 0.0, bend: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.added = nn.Parameter(1 + 0.3 * normal(D)), 0.1, (offset, mean, bend)

    def forward(self, x: Tensor) -> Tensor:
        offset, mean, bend = self.added
        x = x - mean * x.mean(dim=-1, keepdim=True)
        x = (self.weight + offset) * x * (x.pow(2).mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return x + bend * x.tanh()


def test_what_is_no_known_norm_has_no_kind() -> None:
    x = normal(2, 3, D) + 0.7
    with torch.no_grad():
        assert kind_of(Other(mean=1.0), x) == NormKind(centred=True, offset=0.0)
        for other in (Other(offset=0.5), Other(mean=0.5), Other(bend=0.01), nn.Identity()):
            assert kind_of(other, x) is None


@pytest.mark.parametrize("kind", RMS)
@pytest.mark.parametrize("size", [3.0, 40.0])
def test_what_a_family_adds_to_large_weights_is_found_in_bfloat16(kind: str, size: float) -> None:
    """Gemma 3's final norm has weights around 20, so an offset of 1 is within the rounding of a bfloat16 pass."""
    norm = norm_of(kind).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(size * (2 + normal(D).abs()))  # type: ignore[operator]
    assert kind_of(norm, normal(2, 3, D).bfloat16()) == NormKind(False, 1.0 if kind == "Gemma 2" else 0.0)


def test_where_an_entry_is_zero_its_multiplier_is_that_of_the_formula() -> None:
    norm, x = norm_of("Llama"), normal(2, 3, 4, D)
    x[0, 1, 2, 5] = 0
    x[1, 2, 3] = 0
    found = frozen_norm(norm, x, torch.float32, norm(x)).multiplier
    torch.testing.assert_close(found, norm.weight * (x.pow(2).mean(dim=-1, keepdim=True) + 0.1) ** -0.5)
    torch.testing.assert_close(found * x, norm(x))


def test_reading_a_norm_sets_off_no_hook() -> None:
    norm, x = norm_of("Llama"), normal(2, 3, D)
    normed = norm(x)

    def fail(*_: object) -> None:
        raise AssertionError("a hook was set off")

    norm.register_forward_pre_hook(fail)
    frozen_norm(norm, x, torch.float32)
    norm_scale(norm, x, normed, torch.float32)
