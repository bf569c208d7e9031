"""Query-key directions against a loop over rows, keys and singular vectors, and against the query-key term."""

from typing import Any

import models
import numpy as np
import pytest
import reference
import torch
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import InputError

F64 = torch.float64


def by_hand(name: str, texts: list[Tensor], layer: int, head: int, distance: int) -> np.ndarray:
    """The share of each direction, cell by cell, from plain weights and the hooked model's scores."""
    model, plain = models.hooked(name, F64), models.plain(name, F64)
    weights = reference.layer_weights(plain, layer)
    d_head, group = weights.d_head, len(weights.W_Q) // len(weights.W_K)
    assert weights.gamma is not None
    gamma, beta = weights.gamma.numpy()[:, None], 0.0 if weights.beta is None else weights.beta.numpy()
    W_Q, W_K = (matrix.numpy() * gamma for matrix in (weights.W_Q[head], weights.W_K[head // group]))
    if name == "gpt2":
        W_Q, W_K = (matrix - matrix.mean(axis=0) for matrix in (W_Q, W_K))
    turns = reference.turns(plain, 9 + distance, F64)

    def turn(position: int) -> np.ndarray:
        return np.eye(d_head) if turns is None else turns[position].numpy()

    u, singular, _ = np.linalg.svd(W_Q @ turn(distance) @ (W_K @ turn(0)).T)
    u = u[:, :d_head] * singular[:d_head] ** 0.5
    a = np.linalg.lstsq(W_Q, u, rcond=None)[0]
    c = np.linalg.inv(a).T
    above, below = np.zeros(d_head), 0.0
    for text in texts:
        run = model.run(text[None], points=["attn_in", "scores"], layers=[layer])
        read, scores = run["attn_in", layer][0].numpy(), run["scores", layer][0, head].numpy()
        query, key = ((read - beta) / gamma.T @ matrix for matrix in (W_Q, W_K))
        query, key = query - query[1:].mean(axis=0), key - key[1:].mean(axis=0)
        for i in range(1, len(text)):
            mean = scores[i, : i + 1].mean()
            for j in range(i + 1):
                for r in range(d_head):
                    part = (query[i] @ a[:, r]) * (c[:, r] @ turn(i) @ (key[j] @ turn(j)))
                    above[r] += part * (scores[i, j] - mean) / d_head**0.5
                below += (scores[i, j] - mean) ** 2
    return above / below


def texts_of(name: str, count: int = 2, length: int = 9) -> list[Tensor]:
    return list(models.token_ids(name, count, length))


@pytest.mark.core
@pytest.mark.parametrize(("name", "layer", "distance"), [("gpt2", 2, 0), ("llama", 1, 0), ("llama", 0, 3)])
def test_shares_are_those_of_singular_vectors_cell_by_cell(name: str, layer: int, distance: int) -> None:
    found = am.qk_directions(models.hooked(name, F64), iter(texts_of(name)), layers=[layer], distance=distance)
    for head in (0, models.hooked(name, F64).stack().n_heads - 1):
        expected = by_hand(name, texts_of(name), layer, head, distance)
        # Llama's tables of cosines and sines are in float32.
        tolerance = 1e-9 if name == "gpt2" else 1e-7
        np.testing.assert_allclose(found.share[0, head].numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "centre"),
    [
        *((name, "mean") for name in ("gpt2", "llama_bias", "gemma2", "gptj", "bloom", "opt", "qwen3", "deberta")),
        ("llama_bias", None), ("bloom", None), ("deberta", None),
    ],
)  # fmt: skip
def test_shares_add_up_to_the_share_of_the_query_key_term(name: str, centre: Any) -> None:
    texts, model = texts_of(name, 6), models.hooked(name, F64)
    options: dict[str, Any] = {"centre": centre, "first_key": False}
    found = am.qk_directions(model, iter(texts), distance=2, **options)
    whole = am.variance_shares(model, iter(texts), **options)["query_key"].mean
    torch.testing.assert_close(found.query_key, whole, rtol=0, atol=1e-7)


@pytest.mark.parametrize("distance", [0, 2])
def test_vectors_multiply_to_the_weights(distance: int) -> None:
    plain = models.plain("llama", F64)
    texts, weights = iter(texts_of("llama")), reference.layer_weights(plain, 1)
    found = am.qk_directions(models.hooked("llama", F64), texts, layers=[1], k=8, distance=distance)
    turn = reference.turns(plain, 3, F64)[distance]  # type: ignore[index]
    for head in range(6):
        W_Q, W_K = (weights.gamma[:, None] * W for W in (weights.W_Q[head], weights.W_K[head // 3]))  # type: ignore[index]
        product = found.query[0, head].double().T @ found.key[0, head].double()
        torch.testing.assert_close(product, W_Q @ turn @ W_K.T, rtol=0, atol=1e-5)
    assert bool((found.strength.diff(dim=-1) <= 0).all())
    torch.testing.assert_close(found.strength.sum(dim=-1), torch.ones(1, 6, dtype=F64))


def test_tokens_are_those_with_the_extreme_readings() -> None:
    model = models.demo()
    found = am.qk_directions(model, documents(6), layers=[2], k=3)
    norm = model.base.h[2].input_layernorm
    weights = model.weights(2)
    ids = sorted({int(token) for text in documents(6) for token in model.encode(text).ids[0, 1:]})
    embedded = model.base.word_embeddings_layernorm(model.base.word_embeddings.weight[ids])
    x = torch.nn.functional.layer_norm(embedded, (model.d_model,), None, None, norm.eps).double()
    gamma = norm.weight.double()[:, None]
    for head in (0, 5):
        W_Q, W_K = (gamma * matrix[head].double() for matrix in (weights.W_Q, weights.W_K))
        u, singular, v = torch.linalg.svd((W_Q - W_Q.mean(dim=0)) @ (W_K - W_K.mean(dim=0)).T)
        for row in found.of_head(2, head).itertuples():
            readings = singular[row.direction] ** 0.5 * (x @ u[:, row.direction]), x @ v[row.direction]
            orders = [
                [model.position_texts([ids[at] for at in r.argsort().tolist()])[n] for n in (0, -1)] for r in readings
            ]
            read = [[row.query_lowest[0], row.query_highest[0]], [row.key_lowest[0], row.key_highest[0]]]
            assert read in (orders, [side[::-1] for side in orders])


def test_shares_lie_in_their_intervals_which_few_texts_do_not_have() -> None:
    model, texts = models.demo(), list(documents(9))
    whole = am.qk_directions(model, iter(texts), layers=[1, 3])
    assert bool((whole.low <= whole.share).all() and (whole.share <= whole.high).all())
    assert bool(am.qk_directions(model, texts[:4], layers=[1]).low.isnan().all())


def test_16_bits_agree_with_float32() -> None:
    texts = texts_of("gpt2", 6)
    half, wide = (am.load(models.fresh("gpt2", torch.bfloat16).to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    one, other = (am.qk_directions(model, iter(texts)) for model in (half, wide))
    torch.testing.assert_close(one.query_key, other.query_key, rtol=0, atol=0.05)


def test_the_page_lists_the_directions_of_every_head() -> None:
    found = am.qk_directions(models.demo(), documents(6), k=2)
    page = found.to_html()
    assert "singular direction of W_Q W_Kᵀ" in page
    assert found.lead.startswith("One direction carries ")
    frame = found.by_head()
    assert len(frame) == 32
    top = frame.loc[frame.share.idxmax()]
    assert f"L{int(top.layer)}H{int(top['head'])}" in found.lead
    assert list(found.vectors(1, 2)) == [f"{side} {n}" for n in found.kept[1, 2].tolist() for side in ("query", "key")]
    options = {"heads": [(1, 6)], "directions": found.vectors(1, 6), "layers": [1]}
    split = am.decompose_by_source(models.demo(), next(iter(documents(1))), **options)
    assert set(found.vectors(1, 6)) < set(split.sources)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"distance": -1}, "`distance` must be"),
        ("gpt2", {"distance": 10**6}, "`distance` must be below"),
        ("gpt2", {"k": 0}, "`k` must be"),
        ("gpt2", {"layers": [9]}, "layer"),
        ("t5", {}, "several stacks"),
        ("vit", {}, "reads no tokens"),
        ("longformer", {}, "local and a global set"),
        ("gpt2", {"inputs": torch.tensor([[7]]), "centre": None}, "neither special nor the first"),
    ],
)
def test_bad_input(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        am.qk_directions(models.hooked(name), **{"inputs": models.inputs_of(name), **options})
