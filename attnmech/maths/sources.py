"""The query_key term of a score as an exact sum over pairs of writers (formulas §1; cf. Elhage et al. 2021).

The stream x_i is a sum of what was written into it, x_i = Σ_s w_s(i). With its multipliers m frozen at their values, a
norm is linear: N(x) = Σ_s F(w_s) + β, with F(w) = m ⊙ (w − mean w) (a LayerNorm) or m ⊙ w (an RMSNorm). So the queries
and keys that are made of it are sums as well, and

query_key_ij = Σ_s Σ_t scale · q_s(i)·k_t(j),

where q_s and k_t are made of F(w_s) and F(w_t); β counts as a writer, too.
"""

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from .norms import norm_multiplier


@dataclass(frozen=True)
class FrozenNorm:
    """A norm whose multipliers are kept at the values that they had for one stream: F, a linear map.

    >>> x, out = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.6, 0.8]]])
    >>> norm = FrozenNorm.of(x, out, torch.ones(2), None, centred=False)
    >>> norm(torch.tensor([[[1.0, 10.0]]]))
    tensor([[[0.2000, 2.0000]]])
    """

    multiplier: Float[Tensor, "batch position d_model"]
    centred: bool
    """Whether the norm takes the mean away first."""

    def __call__(self, part: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position d_model"]:
        """What the norm makes of one part of the stream; its shift is not included."""
        return self.multiplier * (part - part.mean(dim=-1, keepdim=True) if self.centred else part)

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "batch position d_model"],
        out: Float[Tensor, "batch position d_model"],
        gamma: Float[Tensor, " d_model"],
        shift: Float[Tensor, " d_model"] | None,
        *,
        centred: bool,
    ) -> "FrozenNorm":
        """Read off what a norm with the weight `gamma`, known up to a factor, made of the stream x.

        The multiplier is r γ, with one number r a token. Where `out` is a product of x and nothing else, it is
        `out` / x, entry by entry: an RMSNorm takes that product in float32 whatever the model's precision, and so its
        rounding is part of the multiplier.
        """
        multiplier = gamma * norm_multiplier(x, out, gamma, shift, centred=centred)[..., None]
        if shift is None and not centred:
            multiplier = torch.where(x == 0, multiplier, out / x)
        return cls(multiplier, centred)


def pair_terms(
    query: Float[Tensor, "cell source_q d_head"], key: Float[Tensor, "cell source_k d_head"], scale: float
) -> Float[Tensor, "source_q source_k"]:
    """scale · q_s·k_t of every pair of writers, the mean over cells; NaN where there is no cell.

    >>> pair_terms(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]), 0.5)
    tensor([[1.5000],
            [4.0000]])
    """
    total = einsum(query, key, "cell source_q d_head, cell source_k d_head -> source_q source_k")
    return total * (scale / len(query)) if len(query) else torch.full_like(total, torch.nan)
