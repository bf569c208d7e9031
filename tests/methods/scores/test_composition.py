"""Composition of heads against whole matrices, planted heads, and random rotations."""

from functools import partial

import models
import pytest
import torch

import attnmech as am
from attnmech.methods.scores.composition import Factors
from attnmech.model.parts.weights import AttentionWeights


@pytest.mark.core
@pytest.mark.parametrize("name", ["gpt2", "bloom", "bert"])
@pytest.mark.parametrize("fold_norm", [True, False])
def test_scores_are_those_of_whole_matrices(name: str, fold_norm: bool) -> None:
    model = models.hooked(name, torch.float64)
    found = am.composition(model, fold_norm=fold_norm)
    norms = [torch.ones(model.d_model, dtype=torch.float64)] * model.n_layers
    path = model.architecture.attn_norm
    if fold_norm and path is not None:
        norms = [model.stack().module(layer, path).weight.detach() for layer in range(model.n_layers)]
    one, other = (model.weights(layer) for layer in (0, 1))
    for first, second in [(0, 1), (2, 0)]:
        A = norms[0][:, None] * one.W_V[first] @ one.W_O[first]
        Q, K, V = (norms[1][:, None] * each[second] for each in (other.W_Q, other.W_K, other.W_V))
        for kind, B in {"q": Q @ K.T, "k": K @ Q.T, "v": V @ other.W_O[second]}.items():
            expected = ((A @ B).norm() / (A.norm() * B.norm())).detach()
            assert float(getattr(found, kind)[0, first, 1, second]) == pytest.approx(float(expected), rel=1e-9)
    assert bool(found.v[1, :, 0].isnan().all()) and bool(found.v[0, :, 0].isnan().all())


def test_rotary_models_have_v_alone() -> None:
    found = am.composition(models.hooked("llama"))
    assert bool(found.q.isnan().all()) and bool(found.k.isnan().all())
    assert not bool(found.v[0, :, 1].isnan().any())
    assert set(found.to_frame()["kind"]) == {"v"}


def test_the_baseline_is_the_mean_square_over_rotations() -> None:
    generator, d = torch.Generator().manual_seed(0), 12
    drawn = partial(torch.randn, generator=generator, dtype=torch.float64)
    W_V, W_O, W_Q, W_K = drawn(1, d, 3), drawn(1, 3, d), drawn(1, d, 2), drawn(1, d, 2)
    one = torch.ones(d, dtype=torch.float64)
    written = Factors(AttentionWeights(W_Q, W_K, W_V, W_O, None, None, None, None), one).written()
    squares = []
    for _ in range(3000):
        rotated = torch.linalg.qr(drawn(d, d)).Q @ W_Q
        later = Factors(AttentionWeights(rotated, W_K, W_V, W_O, None, None, None, None), one)
        squares.append(float(later.composed("q", written)) ** 2)
    assert sum(squares) / len(squares) == pytest.approx(1 / d, rel=0.05)


def test_a_planted_reader_stands_out() -> None:
    raw = models.fresh("gpt2", torch.float64)
    blocks = models.blocks_of(raw)
    width, d_head, hidden = 20, 4, 20
    with torch.no_grad():
        out = blocks[0].attn.c_proj.weight[2 * d_head : 3 * d_head]  # what L0H2 writes
        blocks[1].attn.c_attn.weight[:, hidden + d_head : hidden + 2 * d_head] = out.T  # the keys of L1H1
        blocks[1].ln_1.weight.fill_(1.0)
    found = am.composition(am.load(raw))
    assert tuple(found.to_frame().iloc[0][["kind", "layer", "head", "later_layer", "later_head"]]) == ("k", 0, 2, 1, 1)
    assert found.baseline == pytest.approx(width**-0.5)
