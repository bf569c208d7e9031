"""Joint embeddings against loops over pairs, on transformers of several families."""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from comparing import refuses
from models import hooked
from scipy.stats import pearsonr, spearmanr
from sklearn.manifold import TSNE, trustworthiness
from torch import Tensor
from unpacking import unpacked

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import UnsupportedModelError
from attnmech.methods.joint_embedding import projections, token_pairs
from attnmech.methods.joint_embedding import result as module
from attnmech.runs.progress import watched

BIDIRECTIONAL = ("bert", "vit")


def texts(count: int = 4, length: int = 15) -> list[Tensor]:
    return models.texts_of(count, length, step=2)


def q_and_k(model: am.HookedModel, given: Any, layer: int, head: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The queries and keys that enter the scores, with each text run alone."""
    names = ["q_rot", "k_rot"] if model.points["q_rot"].absent is None else ["q", "k"]
    found = []
    for each in given:
        acts = model.run(each, points=names)
        q, k = (acts[name, layer][0].double().numpy() for name in names)
        found.append((q[:, head], k[:, head * k.shape[1] // q.shape[1]]))
    return found


def weighted(distances: list[float], products: list[float]) -> float:
    """The correlation of the fifth of all pairs that are nearest, weighted by how much nearer they are."""
    tau = np.percentile(distances, 20)
    near = [(d, p, (tau - d) ** 2) for d, p in zip(distances, products, strict=True) if d < tau]
    cov = np.cov([d for d, _, _ in near], [p for _, p, _ in near], aweights=[w for _, _, w in near])
    return float(cov[0, 1] / math.sqrt(cov[0, 0] * cov[1, 1]))


def by_hand(
    vectors: Sequence[tuple[np.ndarray, np.ndarray]], c: float, *, shift: bool, causal: bool
) -> tuple[float, float, float]:
    """The weighted correlation, Spearman's and Pearson's, pair by pair."""
    mean_q = np.mean(np.concatenate([q * c for q, _ in vectors]), axis=0)
    mean_k = np.mean(np.concatenate([k / c for _, k in vectors]), axis=0)
    distances, products = [], []
    for q, k in vectors:
        for i in range(len(q)):
            for j in range(i + 1 if causal else len(q)):
                key = k[j] / c - mean_k + mean_q if shift else k[j] / c
                distances.append(math.dist(q[i] * c, key))
                products.append(float(q[i] @ k[j]))
    return weighted(distances, products), *(
        float(measure(distances, products).statistic) for measure in (spearmanr, pearsonr)
    )


FAMILIES = ("bloom", "gpt2", "llama", "bert", "qwen3", "gpt_neox", "falcon_multi_query", "gemma2_open")


def model_of(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    if name == "gemma2_open":
        return _gemma2(dtype)
    return hooked(name, dtype)


@cache
def _gemma2(dtype: torch.dtype) -> am.HookedModel:
    """A model without a window, so that the loop covers the same pairs."""
    return am.load(models.randomised(models.gemma2(sliding_window=64), dtype=dtype))


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "shift", "dtype"),
    [
        *zip(FAMILIES, itertools.cycle([True, False]), itertools.repeat(torch.float32)),
        ("llama", False, torch.float32), ("bert", True, torch.float32), ("llama", True, torch.float64),
    ],
)  # fmt: skip
def test_correlations_are_those_of_a_loop_over_pairs(name: str, shift: bool, dtype: torch.dtype) -> None:
    model, given, close = model_of(name, dtype), texts(), 2e-4 if dtype == torch.float32 else 1e-9
    found = am.joint_embedding(model, given, shift=shift)
    for layer, head in [(0, 0), (found.n_layers - 1, found.correlation.shape[1] - 1)]:
        c = float(found.scale[layer, head])
        vectors = q_and_k(model, given, layer, head)
        near, ranks, plain = by_hand(vectors, c, shift=shift, causal=name not in BIDIRECTIONAL)
        assert float(found.correlation[layer, head]) == pytest.approx(near, abs=close)
        assert float(found.spearman[layer, head]) == pytest.approx(ranks, abs=close)
        assert float(found.plain_correlation[layer, head]) == pytest.approx(plain, abs=close)


def test_c_is_the_best_of_the_grid() -> None:
    model, given = hooked("gpt2", torch.float64), texts()
    found = am.joint_embedding(model, given)
    vectors = q_and_k(model, given, 2, 3)
    place = found.heads.index((2, 3))
    curve = [by_hand(vectors, c, shift=True, causal=True)[0] for c in found.grid[place].tolist()]
    assert found.curve[place].numpy() == pytest.approx(np.array(curve), abs=1e-8)
    assert float(found.scale[2, 3]) == found.grid[place][int(np.argmin(curve))]
    assert (found.flags[place] == "edge") == (int(np.argmin(curve)) in (0, len(curve) - 1))
    middle = math.sqrt(
        np.median(np.linalg.norm(np.concatenate([k for _, k in vectors]), axis=1))
        / np.median(np.linalg.norm(np.concatenate([q for q, _ in vectors]), axis=1))
    )
    assert found.grid[place].numpy() == pytest.approx(middle * 2.0 ** (np.arange(25) / 4 - 3))
    assert found.plot("criterion", layer=2, head=3).data[1].x[0] == float(found.scale[2, 3])
    norm = am.joint_embedding(model, given, scale="norm")
    assert float(norm.scale[2, 3]) == pytest.approx(middle)
    refuses('scale="auto"', norm.plot, "criterion")
    assert float(am.joint_embedding(model, given, scale=0.3).scale[2, 3]) == 0.3


def test_points_are_scaled_then_shifted_queries_and_keys() -> None:
    model, given = hooked("llama"), texts()
    found = am.joint_embedding(model, given)
    vectors = q_and_k(model, given, 1, 4)
    queries, keys = (each.double().numpy() for each in found.embedded(1, 4))
    c = float(found.scale[1, 4])
    q, k = (np.concatenate([each[kind] for each in vectors]) for kind in (0, 1))
    assert queries == pytest.approx(q * c, abs=1e-4)
    assert keys == pytest.approx(k / c - (k / c).mean(0) + (q * c).mean(0), abs=1e-4)
    assert keys.mean(0) == pytest.approx(queries.mean(0), abs=1e-4)
    place = found.heads.index((1, 4))
    assert found.norms[place].numpy() == pytest.approx(np.linalg.norm(np.concatenate((q, k)), axis=1), rel=1e-4)
    assert float(found.query_norm[1, 4]) == pytest.approx(np.median(np.linalg.norm(q, axis=1)), rel=1e-4)
    assert float(found.key_norm[1, 4]) == pytest.approx(np.median(np.linalg.norm(k, axis=1)), rel=1e-4)
    assert found.to_frame().set_index(["layer", "head"]).disparity[1, 4] == pytest.approx(
        np.median(np.linalg.norm(k, axis=1)) / np.median(np.linalg.norm(q, axis=1)), rel=1e-4
    )
    apart = np.linalg.norm((q * c).mean(0) - (k / c).mean(0))
    assert float(found.centroid_distance[1, 4]) == pytest.approx(apart, rel=1e-4)
    spread = np.mean([((x - x.mean(0)) ** 2).sum(1).mean() for x in (q * c, k / c)]) ** 0.5
    assert float(found.separation[1, 4]) == pytest.approx(apart / spread, rel=1e-4)


def test_shift_share_row_by_row() -> None:
    model, given = hooked("gpt2"), texts()
    found = am.joint_embedding(model, given)
    vectors = q_and_k(model, given, 1, 2)
    mean_q = np.concatenate([q for q, _ in vectors]).mean(0)
    above = below = 0.0
    for q, k in vectors:
        for i in range(1, len(q)):
            s, t = k[: i + 1] @ q[i], k[: i + 1] @ mean_q
            above += float(((t - t.mean()) * (s - s.mean())).sum())
            below += float(((s - s.mean()) ** 2).sum())
    assert float(found.shift_share[1, 2]) == pytest.approx(above / below, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, False) for name in ("bloom", "gpt2", "bert", "falcon_alibi_serial", "mpt3")),
        ("gemma2_open", True), ("gpt_oss", True),
    ],
)  # fmt: skip
def test_scale_and_shift_leave_attention_as_it_was(name: str, changes: bool) -> None:
    """But under a soft cap and beside a sink the shift changes it."""
    for shift in (True, False):
        found = am.joint_embedding(model_of(name), texts(), shift=shift)
        assert (float(found.attention_change.max()) > 1e-3) is (changes and shift)
        assert float(found.attention_change.max()) < 1e-5 or (changes and shift)
        assert any("changes attention prob" in note for note in found.notes) is (changes and shift)


def test_the_change_under_a_soft_cap_is_that_of_a_loop() -> None:
    model, ids = _gemma2(torch.float64), texts(1)[0]
    found = am.joint_embedding(model, ids)
    q, k = q_and_k(model, [ids], 1, 3)[0]
    c, place = float(found.scale[1, 3]), found.heads.index((1, 3))
    moved = k / c + found.offsets[place].numpy()
    scale, largest = 11**-0.5, 0.0
    for i in range(len(q)):
        rows = [np.exp(1.5 * np.tanh(s * scale / 1.5)) for s in (k[: i + 1] @ q[i], moved[: i + 1] @ (q[i] * c))]
        largest = max(largest, float(np.abs(rows[0] / rows[0].sum() - rows[1] / rows[1].sum()).max()))
    assert float(found.attention_change[1, 3]) == pytest.approx(largest, abs=1e-9)


# -- exact geometry -------------------------------------------------------------------------------------------

EXACT = ("bloom", "bloom12", "mpt3", "mpt4", "falcon_alibi_serial", "llama", "bert", "gemma2", "gpt_oss", "vit")


@pytest.mark.parametrize("name", EXACT)
def test_exact_distances_rank_keys_as_the_scores_do(name: str) -> None:
    model = hooked(name)
    given = models.inputs_of("vit") if name == "vit" else texts()
    found = am.joint_embedding(model, given, geometry="exact")
    measured = found.row_spearman
    assert not bool(measured.isnan().any())
    assert float(measured.max()) < -1 + 1e-9
    assert float(found.attention_change.max()) < 1e-9
    assert found.vectors.dtype == torch.float64 and bool(found.scale.isnan().all())
    refuses("longest key", found.place, *found.heads[0], queries=torch.zeros(1, 4))
    # Independently of the result: against the scores that the model used.
    alone = [given] if name == "vit" else given
    for number, each in enumerate(alone):
        acts = model.run(each, points=["scores"])
        rows = range(3) if name == "vit" else [0]
        for row in rows:
            text = row if name == "vit" else number
            here = found.text == text
            for layer, head in (found.heads[0], found.heads[-1]):
                queries, keys = (x[here].numpy() for x in found.embedded(layer, head))
                scores = acts["scores", layer][row, head].double().numpy()
                for i in range(2, len(queries)):
                    seen = scores[i] > -1e30
                    # Scores in float32 have ties and near ties.
                    distance = np.linalg.norm(queries[i] - keys[seen], axis=1) ** 2
                    assert (
                        pearsonr(distance, scores[i][seen]).statistic == pytest.approx(-1, abs=1e-5) or name == "gemma2"
                    )
                    if seen.sum() > 2:
                        assert spearmanr(distance, scores[i][seen]).statistic < -0.99


def test_t5s_buckets_do_not_fit() -> None:
    given = models.inputs_of("t5")
    with pytest.raises(UnsupportedModelError, match="T5's buckets"):
        am.joint_embedding(hooked("t5"), given, geometry="exact", stack="encoder")
    found = am.joint_embedding(hooked("t5"), given, stack="encoder")
    assert not bool(found.correlation.isnan().any())
    assert float(found.attention_change.max()) < 1e-5
    assert am.joint_embedding(hooked("t5"), given, stack="decoder").lengths.tolist() == [5, 5, 5]


# -- tokens, padding, corpora ---------------------------------------------------------------------------------


def test_images_have_patches_as_tokens() -> None:
    found = am.joint_embedding(hooked("vit"), models.inputs_of("vit"), dims=3)
    assert found.labels[:3] == ("[CLS]", "0,0", "0,1")
    assert found.lead.startswith("21 tokens of 3 images: ")
    assert "image 1, token 2" in found.plot().data[0].text[9]
    assert found.points["pca"].shape == (6, 2 * 3 * 7, 3)
    assert not bool(found.correlation.isnan().any())
    pixels = models.inputs_of("vit")["pixel_values"]
    streamed = am.joint_embedding(hooked("vit"), iter(pixels), dims=3)
    assert streamed.correlation.numpy() == pytest.approx(found.correlation.numpy(), abs=1e-3)
    # A patch has the mean colour of its pixels.
    images, place = found.images, 7 + list(found.labels[7:14]).index("1,2")
    assert images is not None and images.grid == (2, 3)
    grey = (pixels[1, 0] - pixels[1, 0].min()) / (pixels[1, 0].max() - pixels[1, 0].min()) * 255
    cells = unpacked(found._page_sections()[0].figures["embedding"].data["images"]["place"], (21, 2))
    assert cells[place].tolist() == [1, 2] and np.isnan(cells[0]).all()
    assert images.colours[place].numpy() == pytest.approx(np.full(3, float(grey[4:, 8:].mean())), rel=1e-4)
    assert images.pictures["1"].startswith("data:image/png;base64,")


def test_of_a_large_corpus_whole_texts_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS", 40)
    given = texts(count=5, length=15) * 3
    found = am.joint_embedding(hooked("gpt2"), iter(given), sample=10)
    assert found.texts_seen == 15 and 1 < len(found.documents) < 5
    assert int(found.lengths.sum()) <= 40
    assert found.lengths.tolist() == [given[number].shape[1] for number in found.documents]
    assert any("texts were sampled" in note for note in found.notes)
    assert am.joint_embedding(hooked("gpt2"), iter(given), sample=10).documents == found.documents
    assert am.joint_embedding(hooked("gpt2"), iter(given), sample=10, seed=7).documents != found.documents
    chosen = am.joint_embedding(hooked("gpt2"), [given[number] for number in found.documents], sample=1000)
    assert found.correlation.numpy() == pytest.approx(chosen.correlation.numpy(), abs=1e-4)


def test_the_sample_limits_points_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = hooked("llama"), texts()
    whole, some = (am.joint_embedding(model, given, sample=count) for count in (1000, 9))
    assert len(some.labels) == 9 and some.points["pca"].shape[1] == 18
    assert torch.equal(whole.correlation, some.correlation)
    for name in ("scale", "shift_share", "attention_change", "first_attention"):
        assert torch.equal(getattr(whole, name), getattr(some, name))
    cells = list(zip(whole.text.tolist(), whole.position.tolist(), strict=True))
    places = [cells.index(each) for each in zip(some.text.tolist(), some.position.tolist(), strict=True)]
    both = [*places, *(len(cells) + place for place in places)]
    assert torch.equal(whole.vectors[:, both], some.vectors)
    assert any("of 48 tokens" in note for note in some.notes)
    assert am.joint_embedding(model, given, sample=9, seed=1).position.tolist() != some.position.tolist()
    streamed = am.joint_embedding(model, iter(given))
    assert torch.equal(whole.correlation, streamed.correlation)
    assert torch.equal(whole.points["pca"], streamed.points["pca"])
    monkeypatch.setattr(module, "KEPT_BYTES", 10_000)
    refuses(r"sample=\d+ or less, or fewer `heads`", am.joint_embedding, model, given)


def test_of_very_many_pairs_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = hooked("gpt2"), texts()
    whole = am.joint_embedding(model, given, scale=1.0)
    monkeypatch.setattr(token_pairs, "CELLS", 400)
    some = am.joint_embedding(model, given, scale=1.0)
    assert whole.all_pairs and not some.all_pairs
    assert 60 < some.pairs[0] < whole.pairs[0] == sum(n * (n + 1) // 2 for n in (15, 13, 11, 9))
    assert (whole.spearman - some.spearman).abs().max() < 0.4
    assert any("randomly sampled" in note for note in some.notes)


def test_the_most_attended_keys() -> None:
    model, given = hooked("gpt2"), texts()
    found = am.joint_embedding(model, given, sample=20)
    cells = list(zip(found.text.tolist(), found.position.tolist(), strict=True))
    patterns = [model.run(ids, points=["pattern"])["pattern", 1][0, 3] for ids in given]
    place = found.heads.index((1, 3))
    for number, (text, position) in enumerate(cells):
        row = patterns[text][position]
        best = row.argsort(descending=True)[: min(2, position + 1)].tolist()
        expected = [cells.index((text, key)) if (text, key) in cells else -1 for key in best]
        assert found.highest[place, number].tolist() == expected + [-1] * (2 - len(best))
        assert found.weights[place, number, : len(best)].numpy() == pytest.approx(row[best].numpy(), abs=1e-6)
    first = np.mean([float(row[0]) for pattern in patterns for row in pattern[1:]])
    assert float(found.first_attention[1, 3]) == pytest.approx(first, abs=1e-6)
    assert found.patterns["2"][place].float().numpy() == pytest.approx(patterns[2].numpy(), abs=1e-3)


# -- projections ----------------------------------------------------------------------------------------------


def test_what_is_left_in_the_picture_pair_by_pair() -> None:
    model, given = hooked("gpt2"), texts()
    found = am.joint_embedding(model, given)
    vectors, place, start = q_and_k(model, given, 2, 1), found.heads.index((2, 1)), 0
    points, tokens = found.points["pca"][place].double().numpy(), len(found.labels)
    # PCA rotates the points: their extents are the largest singular values.
    whole = found.vectors[place].double().numpy()
    largest = np.linalg.svd(whole - whole.mean(0), compute_uv=False)[:2]
    assert np.linalg.norm(points, axis=0) == pytest.approx(largest, rel=1e-4)
    distances, products = [], []
    for q, k in vectors:
        for i in range(len(q)):
            for j in range(i + 1):
                distances.append(math.dist(points[start + i], points[tokens + start + j]))
                products.append(float(q[i] @ k[j]))
        start += len(q)
    assert float(found.after["pca"]["spearman"][place]) == pytest.approx(
        spearmanr(distances, products).statistic, abs=1e-3
    )
    assert float(found.after["pca"]["correlation"][place]) == pytest.approx(weighted(distances, products), abs=2e-3)
    assert float(found.trustworthiness["pca"][2, 1]) == pytest.approx(
        trustworthiness(found.vectors[place].numpy(), points, n_neighbors=5), abs=1e-3
    )


def test_further_points_are_placed_by_pca_with_scale_and_shift() -> None:
    model, given = hooked("llama"), texts()
    found = am.joint_embedding(model, given)
    q, k = q_and_k(model, given, 1, 3)[1]
    placed = found.place(1, 3, queries=torch.from_numpy(q), keys=torch.from_numpy(k))
    here = found.points["pca"][found.heads.index((1, 3))]
    own = torch.cat((here[:48][found.text == 1], here[48:][found.text == 1]))
    assert placed.numpy() == pytest.approx(own.numpy(), abs=1e-3)
    assert found.place(1, 3, keys=torch.from_numpy(k)).shape == (13, 2)
    refuses("`queries`, `keys` or both", found.place, 1, 3)
    again = found.place_texts(model, given[1])
    assert again.points["pca"][found.heads.index((1, 3))].numpy() == pytest.approx(own.numpy(), abs=1e-3)
    assert torch.equal(again.scale, found.scale)
    refuses("the weights of the model passed differ", found.place_texts, hooked("gpt2"), given[1])


@pytest.mark.parametrize(
    "name", ["tsne", *(pytest.param(name, marks=pytest.mark.slow) for name in ("umap", "pacmap", "opentsne"))]
)
def test_projections_have_seeds_and_two_of_them_place_near(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"umap": "umap", "pacmap": "pacmap", "opentsne": "openTSNE"}.get(name, "sklearn"))
    model, given = hooked("gpt2"), texts()
    options: dict[str, Any] = {"projection": ["pca", name], "perplexity": 5.0, "heads": [(1, 2)]}
    found, again = (am.joint_embedding(model, given, **options) for _ in range(2))
    here = found.points[name][0]
    assert here.shape == (96, 2) and not bool(here.isnan().any())
    assert torch.equal(found.points[name], again.points[name])
    assert float(found.trustworthiness[name][1, 2]) > float(found.trustworthiness["pca"][1, 2]) - 0.05
    if name in ("tsne", "pacmap"):
        alone = am.joint_embedding(model, given, **options | {"projection": name})
        refuses(f'projection="{name}" cannot place further points', alone.place, 1, 2, queries=torch.zeros(1, 4))
        refuses("cannot place", alone.place_texts, model, given[0])
    else:
        placed = found.place_texts(model, given[0]).points[name][0]
        own = torch.cat((here[:48][found.text == 0], here[48:][found.text == 0]))
        assert float((placed - own).norm(dim=1).median()) < 0.3 * float(torch.pdist(here).median())
    # Beyond the limit, a sample is projected and the other points are placed.
    monkeypatch.setattr(projections, "FITTED", 60)
    if name == "umap":
        many = am.joint_embedding(model, given, projection="umap", heads=[(1, 2)])
        assert many.points["umap"].shape == (1, 96, 2) and not bool(many.points["umap"].isnan().any())
    elif name == "tsne":
        refuses("sample=30 or less", am.joint_embedding, model, given, **options)


@pytest.mark.parametrize("name", ["tsne", "opentsne"])
def test_progress_of_projections(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "opentsne":
        pytest.importorskip("openTSNE")
    model, options = hooked("gpt2"), {"projection": name, "perplexity": 5.0, "heads": [(0, 1), (1, 2)]}
    seen: list[int] = []

    def watch(kind: str, done: int, total: int | None) -> None:
        assert kind == f"projecting by {name}" and total == 2
        print("[mine]")
        seen.append(done)

    outputs: list[Any] = []
    fit = TSNE.fit_transform
    monkeypatch.setattr(TSNE, "fit_transform", lambda *given: (outputs.append(sys.stdout), fit(*given))[1])
    with watched(watch):
        found = am.joint_embedding(model, texts(), **options)
    assert all(output is sys.stdout for output in outputs)  # other threads print there
    assert capsys.readouterr().out == "[mine]\n" * len(seen)
    if name == "opentsne":
        assert seen == sorted(seen) and seen.count(0) > 5 and seen.count(1) > 5 and seen[-1] == 2
    else:  # scikit-learn has no callback
        assert sorted({*seen, 0, 1, 2}) == [0, 1, 2] and seen[-1] == 2
        plain = TSNE(metric="cosine", perplexity=5.0, init="pca", random_state=found.seed)
        wanted = plain.fit_transform(found.vectors[1].double().numpy())
        assert np.array_equal(found.points[name][1].numpy(), wanted.astype(np.float32))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with watched(stop), pytest.raises(KeyboardInterrupt):
        am.joint_embedding(model, texts(), **options)
    print("heard")
    assert capsys.readouterr().out == "heard\n"


# -- search, anomalies, tables, files -------------------------------------------------------------------------


def test_search_against_a_loop() -> None:
    found = am.joint_embedding(models.demo(), documents(4), layers=[1, 2])
    assert found.special.tolist() == [label == found.labels[0] for label in found.labels] and bool(found.special[0])
    table = found.search("THE")
    hits = [place for place, label in enumerate(found.labels) if "the" in label.lower()]
    row = table[(table.layer == 2) & (table["head"] == 5)].iloc[0]
    queries, keys = (each.double().numpy() for each in found.embedded(2, 5))

    def mean_distance(points: np.ndarray) -> float:
        return float(np.mean([math.dist(a, b) for n, a in enumerate(points) for b in points[:n]]))

    assert row.hits == len(hits) > 5
    assert row.queries == pytest.approx(mean_distance(queries[hits]) / mean_distance(queries), rel=1e-5)
    assert row["keys"] == pytest.approx(mean_distance(keys[hits]) / mean_distance(keys), rel=1e-5)
    assert list(table.ratio) == sorted(table.ratio)
    assert len(found.search("the", projection="pca")) == 16
    bytewise = replace(
        found, labels=("😀[1/4]", "😀[2/4]", "1", "[1/4]", r"\xf0", "xf0", "\u00e9", "e\u0301", *found.labels[8:])
    )
    assert bytewise.search("\u00e9").hits.iloc[0] == bytewise.search("E\u0301").hits.iloc[0] == 2
    assert bytewise.search("1").hits.iloc[0] == 2 and bytewise.search("😀").hits.iloc[0] == 2
    refuses("0 do", found.search, "xylophone")
    refuses("0 do", found.search, "")


def test_anomalies_are_ranked() -> None:
    found = am.joint_embedding(models.demo(), documents(4))
    strengths = []
    for each in found.anomalies:
        values = {
            "norm disparity": found.key_norm / found.query_norm, "separated clusters": found.separation,
            "attends to first": found.first_attention,
        }  # fmt: skip
        assert each.number == pytest.approx(float(values[each.what][each.layer, each.head]))
        limit = {"norm disparity": 1.0, "separated clusters": 2.0, "attends to first": 0.5}[each.what]
        size = abs(math.log2(each.number)) if each.what == "norm disparity" else each.number
        assert size >= limit
        strengths.append(size / limit)
    assert strengths == sorted(strengths, reverse=True) and len(strengths) > 3
    assert {each.what for each in found.anomalies} >= {"separated clusters", "attends to first"}


def test_a_planted_norm_disparity_is_found() -> None:
    model = am.load(models.fresh("gpt2"))
    with model.hooks({("q", 1): lambda q: q / torch.tensor([1.0, 1.0, 40.0, 1.0, 1.0])[:, None]}):
        found = am.joint_embedding(model, texts())
    assert found.anomalies[0][:3] == (1, 2, "norm disparity")
    before = am.joint_embedding(model, texts())
    assert found.anomalies[0].number == pytest.approx(
        40 * float(before.key_norm[1, 2] / before.query_norm[1, 2]), rel=1e-4
    )
    # The grid follows the norms, so the points are the same up to scale.
    assert float(found.correlation[1, 2]) == pytest.approx(float(before.correlation[1, 2]), abs=1e-3)


def test_the_table_and_a_file(tmp_path: Path) -> None:
    found = am.joint_embedding(hooked("llama"), texts(), heads=[(1, 4), (0, 1)])
    frame = found.to_frame()
    assert float(frame.correlation[1]) == float(found.correlation[1, 4]) and "trustworthiness_pca" in frame
    whole = am.joint_embedding(hooked("llama"), texts())
    assert found.heads == ((0, 1), (1, 4)) and found.correlation.shape == whole.correlation.shape == (2, 6)
    assert (~found.correlation.isnan()).nonzero().tolist() == [[0, 1], [1, 4]]
    assert float(found.correlation[1, 4]) == pytest.approx(float(whole.correlation[1, 4]), abs=1e-9)
    read = am.load_result(found.save(tmp_path / "joint.safetensors"))
    _, k = q_and_k(hooked("llama"), texts(), 1, 4)[0]
    assert torch.equal(read.place(1, 4, keys=torch.from_numpy(k)), found.place(1, 4, keys=torch.from_numpy(k)))
    assert read.search("1").equals(found.search("1")) and "Joint embedding" in found.to_html()
    assert [trace.name for trace in found.plot(layer=1, head=4).data] == ["queries", "keys"]
    refuses("both", found.plot, layer=1)
    refuses("was not embedded", found.plot, layer=1, head=1)
    few = am.joint_embedding(hooked("llama"), torch.tensor([[5, 6]]))
    assert bool(few.correlation.isnan().all()) and "too few" in few.lead
    refuses("cannot be subtracted", lambda: found - found)


# -- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "package"), [("umap", "umap"), ("pacmap", "pacmap"), ("opentsne", "openTSNE")])
def test_a_missing_library_is_named_with_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refuses(rf'pip install "attnmech\[{name}\]"', am.joint_embedding, hooked("gpt2"), texts(), projection=name)


def test_constant_queries_have_no_c() -> None:
    model = hooked("gpt2")
    with model.hooks({("q", 1): lambda value: torch.ones_like(value)}):
        found = am.joint_embedding(model, texts())
    assert found.flags[found.heads.index((1, 2))] == "flat"
    assert float(found.scale[1, 2]) == pytest.approx(float(found.key_norm[1, 2] / found.query_norm[1, 2]) ** 0.5)
    assert any("undetermined" in note for note in found.notes)
    with model.hooks({("q", 1): lambda value: torch.zeros_like(value)}):
        zero = am.joint_embedding(model, texts())
    assert float(zero.scale[1, 2]) == 1.0 and bool(zero.correlation[1].isnan().all())
    assert math.isinf(next(each.number for each in zero.anomalies if each.what == "norm disparity"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": "som"}, "`projection` must be one of pca, tsne"),
        ({"projection": []}, "`projection` must be one of pca, tsne"),
        ({"projection": 3}, "`projection` must be one of pca, tsne"),
        ({"dims": 4}, "`dims` must be one of"),
        ({"scale": "best"}, "`scale` must be one of auto, norm"),
        ({"scale": 0.0}, "`scale` must be a finite number above 0"),
        ({"geometry": "flat"}, "`geometry` must be one of scaled, exact"),
        ({"sample": 1}, "`sample` must be a whole number, 2 or more"),
        ({"shift": 1}, "`shift` must be True or False"),
        ({"perplexity": -1.0}, "`perplexity` must be"),
        ({"seed": -1}, "`seed` must be"),
        ({"heads": [(0, 9)]}, "`head` must be"),
        ({"truncate": True}, "`truncate` needs an iterator of texts"),
        ({"inputs": texts(1), "projection": "tsne"}, "of 50 needs 152 points; 15 tokens give 30.*perplexity=9 or less"),
        ({"inputs": torch.tensor([[5]])}, "at least two tokens"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str, unchecked: None) -> None:
    refuses(message, am.joint_embedding, hooked("gpt2"), **{"inputs": texts(), **options})
