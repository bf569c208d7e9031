"""The share of each term of the scores in what distinguishes the keys of a row.

Formulas: docs/formulas.md#shares-of-variance.

share_t = Σ_rows Σ_j (t_ij − t̄_i)(s_ij − s̄_i) / Σ_rows Σ_j (s_ij − s̄_i)²

over the keys j that row i sees; rows that see one key are left out. The shares of all terms add up to 1; a single share
may be negative, or more than 1.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def row_covariances(
    terms: Mapping[str, Float[Tensor, "#batch #head #row #key"]],
    scores: Float[Tensor, "batch head row key"],
    seen: Bool[Tensor, "batch 1 row key"],
) -> tuple[dict[str, Float[Tensor, "batch head row"]], Float[Tensor, "batch head row"]]:
    """Σ_j (t_ij − t̄_i)(s_ij − s̄_i) of each term in each row, and Σ_j (s_ij − s̄_i)²; 0 if a row sees fewer than two
    keys.

    >>> scores = torch.tensor([[[[1.0, 3.0]]]])
    >>> seen = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    >>> of_terms, whole = row_covariances({"query_key": scores - 1, "key_bias": torch.ones(1, 1, 1, 1)}, scores, seen)
    >>> whole.item(), {name: value.item() for name, value in of_terms.items()}
    (2.0, {'query_key': 2.0, 'key_bias': 0.0})
    """
    of_scores = deviations_along_rows(scores, seen)
    whole = torch.linalg.vecdot(of_scores, of_scores)
    # Σ_j (s_ij − s̄_i) = 0, so a term's mean need not be subtracted.
    return {
        name: torch.linalg.vecdot(term, of_scores) if term.shape[-1] > 1 else torch.zeros_like(whole)
        for name, term in terms.items()
    }, whole


def deviations_along_rows(
    scores: Float[Tensor, "batch head row key"], seen: Bool[Tensor, "batch 1 row key"]
) -> Float[Tensor, "batch head row key"]:
    """s_ij − s̄_i; 0 at keys that a row does not see, and in rows that see fewer than two keys.

    >>> deviations_along_rows(torch.tensor([[[[1.0, 3.0, 8.0]]]]), torch.tensor([[[[True, True, False]]]])).tolist()
    [[[[-1.0, 1.0, 0.0]]]]
    """
    count = seen.sum(dim=-1, keepdim=True)
    counted = seen & (count > 1)
    kept = torch.where(counted, scores, 0.0)
    return torch.where(counted, kept - kept.sum(dim=-1, keepdim=True) / count.clamp_min(1), 0.0)
