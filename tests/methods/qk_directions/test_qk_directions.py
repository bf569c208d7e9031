"""Query-key directions against a loop over rows, keys and singular vectors, and against the query-key term."""

import math
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import InputError
from attnmech.results import QKDirections

F64 = torch.float64


def rotation_by_hand(position: int, d_head: int, theta: float) -> np.ndarray:
    """R of a position in Llama's layout, as a matrix that acts on rows."""
    half = d_head // 2
    matrix = np.zeros((d_head, d_head))
    for i in range(half):
        angle = position * theta ** (-2 * i / d_head)
        matrix[i, i] = matrix[i + half, i + half] = math.cos(angle)
        matrix[i, i + half], matrix[i + half, i] = math.sin(angle), -math.sin(angle)
    return matrix


def by_hand(name: str, texts: list[Tensor], layer: int, head: int, distance: int) -> np.ndarray:
    """The share of each direction, cell by cell, from plain weights and the hooked model's scores."""
    model, plain = models.hooked(name, F64), models.plain(name, F64)
    block = models.blocks_of(plain)[layer]
    d_head, n_heads = model.stack().d_head, model.stack().n_heads
    own, norm = slice(head * d_head, (head + 1) * d_head), None
    if name == "gpt2":
        norm, width = block.ln_1, model.d_model
        W_Q, W_K = (block.attn.c_attn.weight[:, first:][:, own] for first in (0, width))
    else:
        norm, group = block.input_layernorm, n_heads // model.stack().n_kv_heads
        kv = slice(head // group * d_head, (head // group + 1) * d_head)
        W_Q, W_K = block.self_attn.q_proj.weight.T[:, own], block.self_attn.k_proj.weight.T[:, kv]
    gamma = norm.weight.detach().numpy()[:, None]
    W_Q, W_K = (matrix.detach().numpy() * gamma for matrix in (W_Q, W_K))
    if name == "gpt2":
        W_Q, W_K = (matrix - matrix.mean(axis=0) for matrix in (W_Q, W_K))
    theta = None if name == "gpt2" else plain.config.rope_parameters["rope_theta"]

    def turn(position: int) -> np.ndarray:
        return np.eye(d_head) if theta is None else rotation_by_hand(position, d_head, theta)

    u, singular, _ = np.linalg.svd(W_Q @ turn(distance) @ (W_K @ turn(0)).T)
    u = u[:, :d_head] * singular[:d_head] ** 0.5
    a = np.linalg.lstsq(W_Q, u, rcond=None)[0]
    c = np.linalg.inv(a).T
    above, below = np.zeros(d_head), 0.0
    for text in texts:
        run = model.run(text[None], points=["attn_in", "scores"], layers=[layer])
        read, scores = run["attn_in", layer][0].numpy(), run["scores", layer][0, head].numpy()
        x = read if norm.__class__.__name__ != "LayerNorm" else read - norm.bias.detach().numpy()
        query, key = (x / gamma.T) @ W_Q, (x / gamma.T) @ W_K
        query, key = query - query[1:].mean(axis=0), key - key[1:].mean(axis=0)
        for i in range(1, len(text)):
            mean = scores[i, : i + 1].mean()
            for j in range(i + 1):
                for r in range(d_head):
                    part = (query[i] @ a[:, r]) * (c[:, r] @ turn(i) @ (key[j] @ turn(j)))
                    above[r] += part * (scores[i, j] - mean) / d_head**0.5
                below += (scores[i, j] - mean) ** 2
    return above / below


def split_of(name: str, texts: list[Tensor], **options: Any) -> QKDirections:
    return am.qk_directions(models.hooked(name, F64), iter(texts), **options)


def texts_of(name: str, count: int = 2, length: int = 9) -> list[Tensor]:
    return list(models.token_ids(name, count, length))


@pytest.mark.core
@pytest.mark.parametrize(("name", "layer", "distance"), [("gpt2", 2, 0), ("llama", 1, 0), ("llama", 0, 3)])
def test_shares_are_those_of_singular_vectors_cell_by_cell(name: str, layer: int, distance: int) -> None:
    found = split_of(name, texts_of(name), layers=[layer], distance=distance)
    for head in (0, models.hooked(name, F64).stack().n_heads - 1):
        expected = by_hand(name, texts_of(name), layer, head, distance)
        # Llama's tables of cosines and sines are in float32.
        tolerance = 1e-9 if name == "gpt2" else 1e-7
        np.testing.assert_allclose(found.share[0, head].numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("centre", ["mean", None])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_bias", "gemma2", "gptj", "bloom", "opt", "qwen3", "deberta"])
def test_shares_add_up_to_the_share_of_the_query_key_term(name: str, centre: Any) -> None:
    texts, model = texts_of(name, 6), models.hooked(name, F64)
    options: dict[str, Any] = {"centre": centre, "first_key": False}
    found = am.qk_directions(model, iter(texts), distance=2, **options)
    whole = am.variance_shares(model, iter(texts), **options).mean("query_key")
    torch.testing.assert_close(found.query_key, whole, rtol=0, atol=1e-7)


@pytest.mark.parametrize("distance", [0, 2])
def test_vectors_multiply_to_the_weights(distance: int) -> None:
    plain = models.plain("llama", F64)
    attention, norm = plain.model.layers[1].self_attn, plain.model.layers[1].input_layernorm
    found = split_of("llama", texts_of("llama"), layers=[1], k=8, distance=distance)
    turn = torch.tensor(rotation_by_hand(distance, 8, plain.config.rope_parameters["rope_theta"]))
    for head in range(6):
        W_Q = norm.weight[:, None] * attention.q_proj.weight.T[:, 8 * head : 8 * head + 8]
        W_K = norm.weight[:, None] * attention.k_proj.weight.T[:, 8 * (head // 3) : 8 * (head // 3) + 8]
        product = found.query[0, head].double().T @ found.key[0, head].double()
        torch.testing.assert_close(product, (W_Q @ turn @ W_K.T).detach(), rtol=0, atol=1e-5)
    order = found.strength.diff(dim=-1)
    assert bool((order <= 0).all())
    torch.testing.assert_close(found.strength.sum(dim=-1), torch.ones(1, 6, dtype=F64))


def test_a_planted_head_reads_one_token_at_queries_and_one_at_keys() -> None:
    plain = models.fresh("gpt2", F64)
    attention = plain.transformer.h[0].attn.c_attn
    with torch.no_grad():
        plain.transformer.wpe.weight.zero_()
        rows = torch.nn.functional.layer_norm(plain.transformer.wte.weight, (20,))
        norm = plain.transformer.h[0].ln_1
        norm.weight.fill_(1.0)
        # Query 7 seeks key 11: head 3 reads the part of each that no other token of the texts has.
        for token, width in ((7, 0), (11, 20)):
            others = rows[[t for t in (3, 5, 7, 11, 13, 17) if t != token]]
            own = rows[token] - others.T @ torch.linalg.lstsq(others.T, rows[token, :, None]).solution[:, 0]
            attention.weight[:, width + 12 : width + 16] = 0
            attention.weight[:, width + 12] = own / own.norm()
    model = am.load(plain)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.tensor([3, 5, 7, 11, 13, 17])[torch.randint(0, 6, (12,), generator=generator)] for _ in range(8)]
    found = am.qk_directions(model, iter(texts), layers=[0])
    first = found.directions(0, 3).iloc[0]
    assert first.direction == 0
    assert found.strength[0, 3, 0] > 1 - 1e-12
    label = dict(found.texts.items())
    ends = [
        {first["query_highest"][0], first["key_highest"][0]},
        {first["query_lowest"][0], first["key_lowest"][0]},
    ]
    assert {label[7], label[11]} in ends
    torch.testing.assert_close(found.share[0, 3, 0], found.query_key[0, 3])


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
        for row in found.directions(2, head).itertuples():
            readings = singular[row.direction] ** 0.5 * (x @ u[:, row.direction]), x @ v[row.direction]
            orders = [
                [model.position_texts([ids[at] for at in r.argsort().tolist()])[n] for n in (0, -1)] for r in readings
            ]
            read = [[row.query_lowest[0], row.query_highest[0]], [row.key_lowest[0], row.key_highest[0]]]
            assert read in (orders, [side[::-1] for side in orders])


def test_batches_and_a_journal_change_nothing(tmp_path: Path) -> None:
    model, texts = models.demo(), list(documents(9))
    whole = am.qk_directions(model, iter(texts), layers=[1, 3])
    journal = tmp_path / "journal"
    again = am.qk_directions(model, iter(texts), layers=[1, 3], journal=journal)
    assert torch.equal(whole.share, again.share)
    listed = am.qk_directions(model, texts, layers=[1, 3])
    torch.testing.assert_close(listed.share, whole.share, rtol=0, atol=1e-6)
    torch.testing.assert_close(listed.low, whole.low, rtol=0, atol=1e-5)
    assert bool((whole.low <= whole.share).all() and (whole.share <= whole.high).all())
    assert bool(am.qk_directions(model, texts[:4], layers=[1]).low.isnan().all())


def test_16_bits_agree_with_float32() -> None:
    texts = texts_of("gpt2", 6)
    half, wide = (am.load(models.fresh("gpt2", torch.bfloat16).to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    one, other = (am.qk_directions(model, iter(texts)) for model in (half, wide))
    torch.testing.assert_close(one.query_key, other.query_key, rtol=0, atol=0.05)


def test_the_page_lists_the_directions_of_every_head(tmp_path: Path) -> None:
    found = am.qk_directions(models.demo(), documents(6), k=2)
    page = found.to_html()
    assert "singular direction of W_Q W_Kᵀ" in page
    assert found.lead.startswith("One direction carries ")
    frame = found.by_head()
    assert len(frame) == 32
    top = frame.loc[frame.share.idxmax()]
    assert f"L{int(top.layer)}H{int(top['head'])}" in found.lead
    assert list(found.vectors(1, 2)) == [f"{side} {n}" for n in found.kept[1, 2].tolist() for side in ("query", "key")]
    again = am.load_result(found.save(tmp_path / "directions.safetensors"))
    assert again.lead == found.lead


def test_kept_directions_split_a_score_by_source() -> None:
    model, text = models.demo(), next(iter(documents(1)))
    found = am.qk_directions(model, documents(6), layers=[1], k=2)
    vectors = found.vectors(1, 6)
    split = am.decompose_by_source(model, text, heads=[(1, 6)], directions=vectors, layers=[1])
    assert set(vectors) < set(split.sources)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance": -1}, "`distance` must be"),
        ({"distance": 10**6}, "`distance` must be below"),
        ({"k": 0}, "`k` must be"),
        ({"layers": [9]}, "layer"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        am.qk_directions(models.hooked("gpt2"), "", **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [("t5", "several stacks"), ("vit", "reads no tokens"), ("longformer", "local and a global set")],
)
def test_models_without_one_product_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        am.qk_directions(models.hooked(name), models.inputs_of(name))


def test_texts_without_ordinary_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="neither special nor the first"):
        am.qk_directions(models.hooked("gpt2"), torch.tensor([[7]]), centre=None)
