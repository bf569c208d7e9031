"""query_key over pairs of writers, against a loop over cells and pairs."""

import pytest
import torch

from attnmech.methods.scores.sources import pair_terms


def test_pair_terms_are_means_over_cells() -> None:
    generator = torch.Generator().manual_seed(6)
    query, key = torch.randn(3, 4, 5, generator=generator), torch.randn(3, 2, 5, generator=generator)
    found = pair_terms(query, key, 0.5)
    for s in range(4):
        for t in range(2):
            mean = sum(0.5 * float(query[cell, s] @ key[cell, t]) for cell in range(3)) / 3
            assert float(found[s, t]) == pytest.approx(mean, abs=1e-6)
    assert bool(pair_terms(query[:0], key[:0], 0.5).isnan().all())
