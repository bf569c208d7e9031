"""Estimates, exact effects and faithfulness equal those of TransformerLens, summed over positions."""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from by_hand import pair
from torch import Tensor
from transformer_lens.patching import get_act_patch_direct_path_all_sources
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    attribution_patch,
    faithfulness,
)

import attnmech as am

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from attribution import apart, edge_of, name_of, numbers_of, summed

ANSWER, AGAINST = 5, 7
F32, F64 = torch.float32, torch.float64
WITHIN = {F32: 1e-4, F64: 1e-9}
"""Of the largest value."""

by_dtype = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])


def judged(pairs: int) -> dict[str, Any]:
    return {"answers": torch.full((pairs,), ANSWER), "against": torch.full((pairs,), AGAINST)}


def metric(logits: Tensor) -> Tensor:
    """The logit difference of one prompt, as the peer takes it."""
    return logits[0, -1, ANSWER] - logits[0, -1, AGAINST]


@by_dtype
def test_estimates_are_those_of_the_peer(dtype: torch.dtype) -> None:
    """Both average over pairs. The peer's embedding has no positions, which cancel in the difference of the runs."""
    model, (clean, corrupted) = models.hooked("gpt2", dtype), pair("gpt2", 3)
    ours = am.attribute(model, clean, corrupted, nodes="heads+mlps", **judged(3))
    theirs = summed(attribution_patch(model.bridge, clean, corrupted, metric).node_scores, name_of)
    theirs.pop("embedding")
    assert len(theirs) == 3 * (5 + 1)
    assert apart(numbers_of(ours), theirs) < WITHIN[dtype]

    ours = am.attribute(model, clean, corrupted, nodes="heads+mlps", edges=True, **judged(3))
    scores = attribution_patch(model.bridge, clean, corrupted, metric, EdgeAttributionConfig("edge")).edge_scores
    assert apart(numbers_of(ours), summed(scores, edge_of)) < WITHIN[dtype]


def test_exact_effects_of_edges_between_heads_are_those_of_the_peer() -> None:
    """The peer patches the q, k or v of one later head with what one head writes in the clean run."""
    model, (clean, corrupted) = models.hooked("gpt2", F64), pair("gpt2", 1)
    ours = am.attribute(model, clean, corrupted, nodes="heads+mlps", edges=True, confirm=200, controls=0, **judged(1))
    assert isinstance(ours, am.results.EdgeAttribution) and ours.exact is not None
    exact = {
        edge: effect for edge, effect in zip(ours.names, ours.exact[:, 0].tolist(), strict=True) if effect == effect
    }
    with torch.no_grad():
        before = metric(model.bridge(corrupted))
        caches = [model.bridge.run_with_cache(ids)[1] for ids in (clean, corrupted)]
    of_peer: dict[tuple[str, str], float] = {}
    for at in ("q", "k", "v"):
        with torch.no_grad():
            effects = get_act_patch_direct_path_all_sources(
                model.bridge, corrupted, *caches, lambda logits: metric(logits) - before, component=at, verbose=False
            )
        for layer, head, above, reader in product(range(3), range(5), range(3), range(5)):
            of_peer[f"L{layer}H{head}", f"L{above}H{reader} {at}"] = float(effects[layer, head, above, reader])
    both = exact.keys() & of_peer.keys()
    assert len(exact) == 200 and len(both) >= 40
    # The peer returns float32.
    assert apart({edge: exact[edge] for edge in both}, {edge: of_peer[edge] for edge in both}) < 1e-6


@by_dtype
def test_faithfulness_is_what_the_peer_recovers(dtype: torch.dtype) -> None:
    """The peer keeps the edges of a circuit at each position; nothing else differs."""
    model, (clean, corrupted) = models.hooked("gpt2", dtype), pair("gpt2", 1)
    edges = am.attribute(model, clean, corrupted, nodes="heads+mlps", edges=True, **judged(1))
    assert isinstance(edges, am.results.EdgeAttribution)
    circuit = edges.circuit(60)
    assert circuit.edges is not None and len(circuit) == 60
    ours = am.faithfulness(model, circuit, clean, corrupted, **judged(1))
    by_position = attribution_patch(model.bridge, clean, corrupted, metric, EdgeAttributionConfig("edge")).edge_scores
    kept = [edge for edge in by_position if edge_of(edge) in set(circuit.edges)]
    theirs = faithfulness(model.bridge, clean, corrupted, metric, kept)
    assert (len(kept), theirs.total_edges) == (7 * 60, 7 * ours.n_edges)
    assert abs(theirs.recovered - 1) > 0.01 and abs(theirs.recovered) > 0.01
    assert apart({circuit: float(ours.faithfulness[0])}, {circuit: theirs.recovered}) < WITHIN[dtype]
