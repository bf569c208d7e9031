"""The query_key term of a score as an exact sum over pairs of sources (cf. Elhage et al. 2021).

Formulas: docs/formulas.md#writers-of-a-score.

The stream x_i is the sum of the vectors that its writers add, x_i = Σ_s w_s(i). With its multipliers m frozen at their
values, a norm is linear: N(x) = Σ_s F(w_s) + β, with F(w) = m ⊙ (w − mean w) (LayerNorm) or m ⊙ w (RMSNorm). Queries
and keys are therefore also sums, and

query_key_ij = Σ_s Σ_t scale · q_s(i)·k_t(j),

where q_s and k_t are the query of F(w_s) and the key of F(w_t); β also counts as a writer. The same holds for any other
sum x_i = Σ_s w_s(i), such as one over directions (`attnmech.methods.scores.directions`).
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor


def pair_terms(
    query: Float[Tensor, "cell source_q d_head"], key: Float[Tensor, "cell source_k d_head"], scale: float
) -> Float[Tensor, "source_q source_k"]:
    """Returns scale · q_s·k_t for every pair of sources, averaged over cells; NaN if there are no cells.

    >>> pair_terms(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]), 0.5)
    tensor([[1.5000],
            [4.0000]])
    """
    total = einsum(query, key, "cell source_q d_head, cell source_k d_head -> source_q source_k")
    return total * (scale / len(query)) if len(query) else torch.full_like(total, torch.nan)
