"""Drift against loops over whole vocabularies on raw models, on planted streams, and for every way of running texts."""

import itertools
import math
import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from html import unescape
from itertools import permutations
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from comparing import refuses
from matrix import masked
from models import tokenizer
from scipy.stats import spearmanr
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.draw import lines_by_layer
from attnmech.errors import InputError, MissingPointError
from attnmech.methods.drift import sums as drift_sums
from attnmech.methods.drift.formulas import Scan, directions
from attnmech.methods.drift.sums import STATISTICS
from attnmech.methods.drift.verdicts import rank_agreement
from attnmech.methods.drift.word_types import WORD_TYPES, word_types

K = 7
FACTORISED = ("albert", "electra", "rembert", "roformer")
"""Families with a factorised embedding, normed before projection."""


@cache
def raw(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if name == "opt_narrow":
        return models.randomised(models.opt(word_embed_proj_dim=10), dtype=dtype)
    return masked(name).to(dtype) if name in FACTORISED else models.fresh(name, dtype)


@cache
def hooked(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    return am.load(raw(name, dtype))


def texts(count: int = 3, length: int = 9) -> list[Tensor]:
    return models.texts_of(count, length)


# -- loops over the vocabulary ---------------------------------------------------------------------------------


@cache
def rows_of(name: str, dtype: torch.dtype, position: bool, normed: bool = True) -> np.ndarray:
    """The vocabulary's rows as they enter the first block, `[position vocab d_model]`: from texts of one token."""
    model = deepcopy(raw(name, dtype))
    for path, module in list(model.named_modules()):
        if not position and re.search(r"(wpe|position_embeddings|embed_positions|token_type_embeddings)$", path):
            module.weight.data.zero_()
        if not normed and re.search(r"(embeddings\.LayerNorm|word_embeddings_layernorm)$", path):
            model.set_submodule(path, torch.nn.Identity())
    ids = torch.arange(model.config.vocab_size)[:, None].expand(-1, 9)
    entered: list[Tensor] = []
    handle = models.blocks_of(model)[0].register_forward_pre_hook(
        lambda module, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad(), handle:
        model(inputs_embeds=model.get_input_embeddings()(ids))
    return entered[0].double().transpose(0, 1).numpy()


def similar(y: np.ndarray, rows: np.ndarray, similarity: str, ybar: np.ndarray) -> np.ndarray:
    """The similarity of a stream to each row of the vocabulary."""
    if similarity == "centred cosine":
        y, rows = y - ybar, rows - rows.mean(axis=0)
    return rows @ y if similarity == "dot" else rows @ y / np.linalg.norm(y) / np.linalg.norm(rows, axis=1)


def by_hand(
    name: str, ids: Tensor, dtype: torch.dtype = torch.float32, *, at: str = "resid_mid", similarity: str = "cosine",
    position: bool = False, embed_norm: bool | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """cosine, centred cosine, dot, rank and churn of every layer and token."""
    rows, model = rows_of(name, dtype, position, embed_norm is not False), hooked(name, dtype)
    # Of parallel blocks, the stream after attention is the sum.
    points = [at] if model.points[at].absent is None else ["resid_pre", "attn_out"]
    acts = model.run(ids, points=points)
    own = np.arange(ids.shape[1]), ids[0].numpy()
    found: dict[str, list[Any]] = {each: [] for each in ("cosine", "centred_cosine", "dot", "rank", "churn")}
    before: list[set[int]] = []
    for layer in model.stack().layers:
        y = sum(acts[point, layer][0].double() for point in points).numpy()
        # The first token of a text is not ordinary.
        tables = {
            each: np.stack([similar(y[place], rows[place], each, y[1:].mean(axis=0)) for place in own[0]])
            for each in ("cosine", "centred cosine", "dot")
        }
        for each, table in tables.items():
            found[each.replace(" ", "_")].append(table[own])
        chosen = tables[similarity]
        found["rank"].append((chosen > chosen[own][:, None]).sum(axis=1))
        now = [set(row[:K].tolist()) for row in np.argsort(-chosen, axis=1, kind="stable")]
        found["churn"].append([1 - len(a & b) / K for a, b in zip(now, before, strict=False)] or [math.nan] * len(now))
        before = now
    return {each: np.array(values) for each, values in found.items()}


CASES = [
    ("gpt2", {}), ("gpt2", {"position": True}), ("gpt2", {"at": "resid_post", "similarity": "dot"}),
    ("gpt2", {"similarity": "centred cosine", "position": True}),
    ("llama", {}), ("llama", {"similarity": "dot"}), ("llama", {"at": "resid_post", "similarity": "centred cosine"}),
    ("bert", {}), ("bert", {"position": True}), ("bert", {"embed_norm": False}), ("bert", {"similarity": "dot"}),
    ("bert", {"position": True, "similarity": "centred cosine"}), ("bert", {"at": "resid_post"}),
    ("bert", {"position": True, "embed_norm": False, "similarity": "dot"}), ("bert_headless", {}),
    ("roberta", {"position": True}),
    ("bloom", {}), ("bloom", {"embed_norm": False}), ("bloom", {"embed_norm": True, "similarity": "centred cosine"}),
    ("opt", {"position": True}), ("opt_narrow", {}), ("opt_narrow", {"position": True}),
    ("gpt_neox", {}), ("gpt_neox", {"at": "resid_post"}), ("gemma2", {"similarity": "dot"}),
    ("albert", {}), ("albert", {"position": True, "at": "resid_post"}),
    ("albert", {"embed_norm": False, "similarity": "dot"}),
    ("electra", {"similarity": "centred cosine"}), ("electra", {"position": True, "embed_norm": False}),
    ("roformer", {}),
]  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [*((*case, torch.float32) for case in CASES), *((name, {}, torch.float64) for name in ("gpt2", "bert", "albert"))],
)
def test_numbers_are_those_of_a_loop_over_the_vocabulary(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    drift = am.residual_drift(hooked(name, dtype), texts(2), k=K, **options)
    close = 2e-5 if dtype == torch.float32 else 1e-7
    for row, ids in enumerate(texts(2)):
        for statistic, values in by_hand(name, ids, dtype, **options).items():
            found = drift.by_token(statistic)[:, row, : ids.shape[1]].numpy()
            if statistic in ("rank", "churn"):
                assert np.array_equal(found, values, equal_nan=True), statistic
            else:
                assert np.allclose(found, values, rtol=close, atol=close * np.abs(values).max()), statistic
    assert bool(drift.by_token("cosine")[:, 1, -1].isnan().all())  # padding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_streams_are_compared_in_float32(dtype: torch.dtype) -> None:
    model, ids = hooked("gpt2", dtype), texts(1)[0]
    drift = am.residual_drift(model, ids, k=K)
    stream = model.run(ids, points=["resid_mid"])["resid_mid", 1][0, 4].double()
    row = model.embedding.detach()[ids[0, 4]].double()
    expected = float(torch.nn.functional.cosine_similarity(stream, row, dim=0))
    assert float(drift.by_token("cosine")[1, 0, 4]) == pytest.approx(expected, abs=1e-6)


# -- what else is measured -------------------------------------------------------------------------------------


def test_baselines_are_those_of_loops() -> None:
    model, given = hooked("gpt2", torch.float64), texts(3)
    drift = am.residual_drift(model, given, k=K)
    runs = [model.run(ids, points=["resid_mid"]) for ids in given]
    rows = torch.nn.functional.normalize(model.embedding.detach().double(), dim=-1)
    for layer in range(model.n_layers):
        units = [torch.nn.functional.normalize(run["resid_mid", layer][0, 1:].double(), dim=-1) for run in runs]
        pairs = [float(a @ b) for unit in units for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]
        assert float(drift.anisotropy[layer]) == pytest.approx(np.mean(pairs), abs=1e-9)
        both = [(one, other) for one, other in permutations(units, 2)]
        across = [float(a @ b) for one, other in both for a in one for b in other]
        assert float(drift.anisotropy_across[layer]) == pytest.approx(np.mean(across), abs=1e-9)
        to_all = [float(unit[2] @ row) for row in rows for unit in units[:1]]
        assert float(drift.by_token("vocabulary_cosine")[layer, 0, 3]) == pytest.approx(np.mean(to_all), abs=1e-7)
    between = [float(a @ b) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
    assert drift.vocabulary_anisotropy == pytest.approx(np.mean(between), abs=1e-7)
    alone = am.residual_drift(model, given[0], k=K)
    assert bool(alone.anisotropy_across.isnan().all()) and not bool(alone.anisotropy.isnan().any())


def test_means_are_those_over_ordinary_tokens() -> None:
    model, given = hooked("gpt2"), texts(7, length=12)
    drift = am.residual_drift(model, given, k=K)
    for statistic in ("cosine", "log_rank", "churn", "rank_step", "cosine_step"):
        layer = 1
        by_text = [drift.by_token(statistic)[layer, row, 1 : ids.shape[1]].numpy() for row, ids in enumerate(given)]
        sums, counts = [each.sum() for each in by_text], [len(each) for each in by_text]
        assert float(drift[statistic].mean[layer]) == pytest.approx(sum(sums) / sum(counts), abs=1e-9)
    steps = drift.by_token("cosine").diff(dim=0).abs()
    assert torch.allclose(steps, drift.by_token("cosine_step")[1:], atol=1e-12, equal_nan=True)
    ranks = (1 + drift.by_token("rank")).log10().diff(dim=0).abs()
    assert torch.allclose(ranks, drift.by_token("rank_step")[1:], atol=1e-12, equal_nan=True)


def test_means_by_type_and_with_words_of_ones_own() -> None:
    model = models.demo()
    texts = ["Anna gave an old anchor to Tom.", "The keys, said Tom, are here."]
    drift = am.residual_drift(model, texts, k=K)
    batch = model.encode(texts)
    names = [[WORD_TYPES[each] for each in row] for row in word_types(batch).tolist()]
    assert names[0][:5] == ["first token", "content word", "content word", "function word", "content word"]
    assert names[1][1:5] == ["function word", "content word", "comma", "content word"]
    values = drift.by_token("cosine")[2]
    for name in ("function word", "comma", "first token"):
        chosen = torch.tensor([[each == name for each in row] for row in names]) & batch.mask
        assert float(drift.of_types(name)["cosine"].mean[2]) == pytest.approx(float(values[chosen].mean()), abs=1e-12)
    table = drift.by_type("cosine")
    row = table[(table.layer == 2) & (table.type == "function word")].iloc[0]
    assert row.cosine == pytest.approx(float(drift.of_types("function word")["cosine"].mean[2]))
    own = am.residual_drift(model, texts, k=K, function_words=["OLD"])
    assert int(own.by_type("cosine").query("type == 'function word' and layer == 0").tokens.iloc[0]) == 1
    both = drift.of_types(["comma", "sentence end"])["cosine"].mean[2]
    chosen = torch.tensor([[each in ("comma", "sentence end") for each in row] for row in names]) & batch.mask
    assert float(both) == pytest.approx(float(values[chosen].mean()), abs=1e-12)


def types_of(tokens: Sequence[str]) -> list[str]:
    ids = torch.arange(len(tokens))[None]
    batch = am.reducers.Batch(ids, torch.ones_like(ids, dtype=torch.bool), (tuple(tokens),), None)
    return [WORD_TYPES[each] for each in word_types(batch)[0].tolist()]


def test_parts_of_words_are_no_function_words() -> None:
    assert types_of(["x", " in", " the", " in", "sane", " then"])[1:] == [
        "function word", "function word", "content word", "content word", "function word"
    ]  # fmt: skip
    assert types_of(["x", "in", "##sane", "in", "the"])[1:] == [
        "content word", "content word", "function word", "function word"
    ]  # fmt: skip
    assert types_of(["x", " it", "'s", " IT"])[1::2] == ["function word", "function word"]


def test_two_occurrences_of_a_token() -> None:
    words = [f"w{number}" for number in range(40)]
    model = am.load(raw("gpt2"), tokenizer=tokenizer(words=("[PAD]", "[UNK]", "[BOS]", *words)))
    text = "w2 w9 w8 w4 w9 w1"
    drift, run = am.residual_drift(model, text, k=K), model.run(text, points=["resid_mid"])
    pair, cosine = drift.pair(1, 4), torch.nn.functional.cosine_similarity
    for layer in range(model.n_layers):
        y = run["resid_mid", layer][0].double()
        centred = y - y[1:].mean(dim=0)
        assert pair.cosine[layer] == pytest.approx(float(cosine(y[1], y[4], dim=0)), abs=1e-9)
        assert pair.centred_cosine[layer] == pytest.approx(float(cosine(centred[1], centred[4], dim=0)), abs=1e-9)
        order = cosine(y[[1, 4], None], model.embedding.detach().double(), dim=-1).argsort(dim=-1, descending=True)
        assert pair.shared[layer] == pytest.approx(len({*order[0, :K].tolist()} & {*order[1, :K].tolist()}) / K)
        assert pair.rank_other[layer] == float(drift.by_token("rank")[layer, 0, 4])
        known = [model.encode(torch.tensor([[token]])).tokens[0][0] for token in order[1, :4].tolist()]
        table = drift.nearest(0, 4, count=4)
        assert table.loc[layer, ["1", "2", "3", "4"]].tolist() == known
    assert list(table.columns) == ["layer", "rank", "1", "2", "3", "4"]
    assert torch.allclose(torch.tensor(pair.anisotropy), drift.anisotropy)


# -- verdicts --------------------------------------------------------------------------------------------------


def test_verdicts_are_those_of_their_equation() -> None:
    model, given = models.demo(), documents(9)
    drift = am.residual_drift(model, given)
    verdicts = drift.verdicts(am.residual_drift(am.untrained(model), given))
    steps = drift.to_frame().set_index("layer").loc[1:]
    for metric, statistic in (("cosine", "cosine_step"), ("rank", "rank_step"), ("churn", "churn")):
        story = verdicts.stories.set_index("metric").loc[metric]
        m = steps[statistic].to_numpy()
        w = np.linspace(0, 1, len(m))
        assert story.depth == pytest.approx(float((w * m).sum() / m.sum()))
        assert story.from_middle == pytest.approx(float((abs(2 * w - 1) * m).sum() / m.sum()))
        assert story.largest_step == steps.index[int(m.argmax())]
        assert story.depth_low < story.depth < story.depth_high
        expected = "early" if story.depth_high < 0.5 else "late" if story.depth_low > 0.5 else None
        assert expected is None or story.story == expected
    assert len(verdicts.agreement) == 4 and verdicts.agreement.rho.between(-1, 1).all()
    assert {"depth_untrained", "largest_step_untrained"} <= set(verdicts.stories)
    few = am.residual_drift(model, given[:2]).verdicts()
    assert set(few.stories.story) == {"undecided"} and "do not support a verdict" in few.lead
    assert am.residual_drift(model, given, layers=[1, 3]).verdicts().stories.story.tolist() == ["unknown"] * 3
    quiet: dict[Any, Any] = {"attn_out": torch.zeros_like, "mlp_out": torch.zeros_like}
    with model.hooks(quiet):
        still = am.residual_drift(model, given[0]).verdicts()
    assert set(still.stories.story) == {"no movement"} and "by rank no movement" in still.lead


def test_a_planted_late_jump_is_late_by_every_metric() -> None:
    """Blocks 1 to 3 write nothing, except what the last one is made to write."""
    model, given = models.demo(), documents(9)
    quiet: dict[Any, Any] = {("attn_out", layer): torch.zeros_like for layer in (1, 2)}
    quiet |= {("mlp_out", layer): torch.zeros_like for layer in (0, 1, 2)}
    with model.hooks(quiet | {("attn_out", 3): lambda value: 50 * value.roll(7, dims=-1)}):
        verdicts = am.residual_drift(model, given).verdicts()
    assert verdicts.stories.story.tolist() == ["late"] * 3
    assert verdicts.stories.depth.tolist() == pytest.approx([1.0] * 3)
    assert verdicts.stories.largest_step.tolist() == [3, 3, 3]


def test_an_untrained_model_has_the_same_shape_and_other_weights() -> None:
    model = models.demo()
    before = torch.get_rng_state()
    one, again, other = am.untrained(model), am.untrained(model), am.untrained(model, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert one.weights_hash == again.weights_hash != other.weights_hash
    assert one.embedding.shape == model.embedding.shape and one.weights_hash != model.weights_hash
    assert one.encode("Anna sang.").tokens == model.encode("Anna sang.").tokens
    assert one.dtype == model.dtype and one.name == "demo (random weights, seed 0)"


# -- any way of running ----------------------------------------------------------------------------------------


def test_a_corpus_keeps_no_tokens() -> None:
    with pytest.raises(MissingPointError, match="not for an iterator"):
        am.residual_drift(hooked("gpt2"), iter(texts(2)), k=K).by_token("cosine")


@pytest.mark.parametrize("at_once", [1, 20])
def test_how_many_streams_are_compared_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    model, given = hooked("gpt2"), texts(3)
    whole = am.residual_drift(model, given, k=K, similarity="centred cosine")
    monkeypatch.setattr(drift_sums, "_STREAMS_AT_ONCE", at_once)
    monkeypatch.setattr(drift_sums, "_ROWS_AT_ONCE", 10)
    other = am.residual_drift(model, given, k=K, similarity="centred cosine")
    for statistic in STATISTICS:
        one, two = whole.by_token(statistic), other.by_token(statistic)
        assert torch.allclose(one, two, atol=1e-6, equal_nan=True)
    assert torch.equal(whole.state["nearest"], other.state["nearest"])


def test_layers_of_ones_choice() -> None:
    """Hybrids count their layers without attention too."""
    hybrid = am.residual_drift(hooked("jamba"), texts(1)[0], k=K).cosine
    assert hybrid.isnan().tolist() == [True, False, True, False]
    model, given = hooked("gpt2"), texts(2)
    whole = am.residual_drift(model, given, k=K)
    some = am.residual_drift(model, given, k=K, layers=[2, 0])
    assert some.cosine.shape == (3,) and math.isnan(float(some.cosine[1]))
    assert torch.allclose(some.by_token("rank"), whole.by_token("rank")[[2, 0]], equal_nan=True)
    assert bool(some.by_token("churn").isnan().all())
    follow = am.residual_drift(model, given, k=K, layers=[2, 1])
    assert torch.equal(follow.by_token("churn")[0, 0], whole.by_token("churn")[2, 0])


def test_figures_show_what_was_measured() -> None:
    model = models.demo()
    drift = am.residual_drift(model, "Anna gave <b>$x$ an old anchor.")
    figure = drift.plot("cosine", query=1)
    assert np.allclose(figure.data[0].y, drift.by_token("cosine")[:, 0, 1])
    assert {trace.name for trace in figure.data[1:]} == {"two tokens of a text", "any row of the vocabulary"}
    assert np.allclose(figure.data[1].y, drift.anisotropy)
    ranks = drift.plot("rank", query=2)
    assert np.allclose(ranks.data[0].y, drift.by_token("rank")[:, 0, 2] + 1)
    assert ranks.layout.yaxis.type == "log"
    whole = drift.plot("churn")
    assert len(whole.data) == len(drift.tokens[0])
    assert not any("<b>" in trace.name for trace in whole.data)
    assert len(drift.tokens_frame()) == int(drift.state["valid"][0].sum())
    assert "Rank of the token&#39;s own embedding" in drift.to_html()
    corpus = am.residual_drift(model, iter(documents(6)))
    by_type = {trace.name: trace for trace in corpus.plot("cosine").data}
    assert np.allclose(by_type["content word"].y, corpus.of_types("content word")["cosine"].mean)
    _, high = corpus.of_types("content word")["cosine"].interval()
    assert np.allclose(by_type["content word"].error_y.array, high - corpus.of_types("content word")["cosine"].mean)
    geometric = {trace.name: trace for trace in corpus.plot("rank").data}
    assert np.allclose(geometric["content word"].y, 10 ** corpus.of_types("content word")["log_rank"].mean)
    pictures = [name for section in corpus._sections() for name in section.figures]
    assert pictures == ["drift-cosine", "drift-rank", "drift-churn"]
    values = np.linspace(0, 1, 60)[:, None] * np.array([[0.0, 1.0]])
    figure = lines_by_layer(values, [0, 1], [f"{number} t" for number in range(60)], label="cosine")
    assert [trace.name for trace in figure.data if trace.showlegend] == [f"{number} t" for number in range(54, 60)]
    refuses(r"`values` must be \[60 lines, 3 layers\]", lines_by_layer, values, [0, 1, 2], [""] * 60, label="cosine")


# -- refused measurements --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("vit", {}, "has no embedding of tokens: it reads images"),
        ("gpt2", {"k": 54}, "`k` must be at most 53, the number of rows of this vocabulary; got 54."),
        ("gpt2", {"k": 0}, "`k` must be a whole number, 1 or more; got 0."),
        ("gpt2", {"at": "attn_out"}, "`at` must be one of resid_mid, resid_post; got 'attn_out'."),
        ("gpt2", {"similarity": "euclid"}, "`similarity` must be one of cosine, centred cosine, dot; got 'euclid'."),
        ("gpt2", {"embed_norm": True}, "`embed_norm=True` needs a norm after the embedding"),
        ("gpt2", {"embed_norm": "yes"}, "`embed_norm` must be True, False or None"),
        ("llama", {"position": True, "k": 3}, "has none: its positions act inside attention. Leave it out."),
        ("bloom", {"position": True, "k": 3}, "Leave it out."),
        ("gpt2", {"position": 1, "k": 3}, "`position` must be True or False"),
        ("t5", {"stack": "cross", "k": 3}, "cross-attention writes into the decoder's stream"),
        ("t5", {"k": 3}, "`stack` must be one of"),
        ("gpt2", {"function_words": "the", "k": 3}, "`function_words` must be a list of strings"),
    ],
)
def test_what_cannot_be_measured_is_said(name: str, options: dict[str, Any], said: str, unchecked: None) -> None:
    with pytest.raises(InputError) as caught:
        am.residual_drift(am.load(models.fresh(name)), torch.tensor([[5, 7, 9]]), **options)
    assert said in str(caught.value)


def test_places_that_are_not_there() -> None:
    drift = am.residual_drift(hooked("gpt2"), texts(2), k=K)
    for call, said in (
        (lambda: drift.nearest(2, 0), "`text`"),
        (lambda: drift.nearest(0, 9), "`position`"),
        (lambda: drift.nearest(1, 8), "the text has 8 tokens"),
        (lambda: drift.nearest(0, 1, count=11), "`count`"),
        (lambda: drift["cosines"].mean, "`statistic`"),
        (lambda: drift.of_types("verbs")["cosine"].mean, "`types`"),
        (lambda: drift.plot("dot"), "`figure`"),
        (lambda: drift.verdicts(am.residual_drift(hooked("gpt2"), texts(1), k=K, similarity="dot")), "same layers"),
        (lambda: drift - drift, "cannot be subtracted"),
    ):
        with pytest.raises(am.AttnmechError, match=said):
            call()


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["t5", "mbart"])
def test_encoder_and_decoder(name: str, stack: str) -> None:
    model = hooked(name)
    inputs = models.inputs_of(name)
    drift = am.residual_drift(model, inputs, k=K, stack=stack)
    batch = model.encode(inputs).queries(stack)
    y = model.run(inputs, points=[f"{stack}.resid_mid"])[f"{stack}.resid_mid", 1][0, 2].double()
    side = getattr(models.plain(name).base_model, stack)
    with torch.no_grad():
        rows = side.embed_tokens(torch.arange(43))
        rows = (side.layernorm_embedding(rows) if hasattr(side, "layernorm_embedding") else rows).double()
    cosines = torch.nn.functional.cosine_similarity(y[None], rows)
    own = int(batch.ids[0, 2])
    assert float(drift.by_token("cosine")[1, 0, 2]) == pytest.approx(float(cosines[own]), abs=1e-6)
    assert int(drift.by_token("rank")[1, 0, 2]) == int((cosines > cosines[own]).sum())


def test_the_page_has_a_table_of_the_rows_nearest_to_the_first_ordinary_token(tmp_path: Path) -> None:
    drift = am.residual_drift(models.demo(), "Anna<b> gave an old anchor to Tom.")
    for token, figure in ((1, drift.plot("nearest")), (6, drift.plot("nearest", query=6))):
        nearest = drift.nearest(0, token, 4)
        cells = figure.data[0].cells["values"]
        assert list(cells[0]) == nearest.layer.tolist()
        assert list(cells[1]) == [f"{rank:,.0f}" for rank in nearest["rank"]]
        for place, column in enumerate(cells[2:], start=1):
            for said, name in zip(column, nearest[str(place)], strict=True):
                bold = name == drift.tokens[0][token]
                assert (
                    unescape(said.removeprefix("<b>").removesuffix("</b>") if bold else said).strip("·") == name.strip()
                )
                assert said.startswith("<b>") == bold
    page = drift.write_html(tmp_path / "page.html").read_text()
    assert "Vocabulary rows nearest to token 1" in page and "drift.plot(&#34;nearest&#34;, query=1)" in page
    assert "<b>" not in page.split("</head>")[1].split("<script")[0]
    corpus = am.residual_drift(models.demo(), iter(["Anna sang."]))
    assert "rows nearest to token" not in corpus.write_html(tmp_path / "corpus.html").read_text()
    refuses("single tokens are stored", corpus.plot, "nearest", error=MissingPointError)


# -- ranks, nearest rows and verdicts --------------------------------------------------------------------------


BLOCKS = [7, 64, 1000]


def scanned(streams: Tensor, rows: Tensor, own: Tensor, k: int, similarity: str = "cosine", block: int = 64) -> "Scan":
    """A scan as in a run: products in the precision of the streams, everything else in float64."""
    mean = rows.double().mean(dim=0)
    precise = directions(streams.double(), similarity, streams.double().mean(dim=0))

    def rows_of(ids: Tensor) -> Tensor:
        return directions(rows.double()[ids], similarity, mean)

    scan = Scan(precise.to(streams.dtype), precise, own, k, rows_of)
    for start in range(0, len(rows), block):
        scan.add(start, directions(rows[start : start + block], similarity, mean.to(rows)))
    return scan


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**32])
def test_the_own_row_at_any_positive_scale_has_rank_0(block: int, scale: float) -> None:
    """Also if other rows are exact copies of it, or differ by a single rounding in float32."""
    rows = torch.randn(300, 33, generator=torch.Generator().manual_seed(0)) + 2
    rows[[5, 120, 299]] = rows[40].clone()
    rows[77] = rows[40] * (1 + 1e-6)
    own = torch.tensor([40, 5, 7, 299])
    rank, nearest = scanned(rows[own] * scale, rows, own, 6, block=block).finish()
    assert rank.tolist() == [0, 0, 0, 0]
    # Among equally similar rows, the lower id comes first for any blocks.
    exact = [int(each) for each in nearest[0] if int(each) != 77]
    assert exact[:4] == [5, 40, 120, 299]


def test_what_float32_cannot_tell_apart_is_decided_in_float64() -> None:
    """A row that is more similar by 1e-9 counts; a row that is less similar by 1e-9 does not."""
    own_row = torch.tensor([1.0, 0.0, 0.0])
    closer, farther = torch.tensor([1.0, 1.0e-4, 0.0]), torch.tensor([1.0, -1.0e-4, 0.0])
    rows = torch.stack((own_row, closer, farther, torch.tensor([0.0, 0.0, 1.0])))
    stream = torch.tensor([[1.0, 5.01e-5, 0.0], [1.0, 4.99e-5, 0.0]])
    exact = (directions(stream.double(), "cosine") @ directions(rows.double(), "cosine").T)[:, 1:2]
    rank, nearest = scanned(stream, rows, torch.zeros(2, dtype=torch.long), 1).finish()
    assert rank.tolist() == [1, 0]
    assert nearest.tolist() == [[1], [0]]
    assert float((exact[0] - exact[1]).abs()) < 1e-8


def test_a_vocabulary_smaller_than_k_and_spare_rows() -> None:
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    _, nearest = scanned(rows[:3], rows, torch.arange(3), 12, block=5).finish()
    assert [sorted(each) for each in nearest.tolist()] == [list(range(12))] * 3


@pytest.mark.parametrize("count", [4, 6, 9])
def test_rank_agreement_is_spearmans_with_the_share_of_orders(count: int) -> None:
    generator = np.random.Generator(np.random.PCG64(count))
    one, other = generator.normal(size=count), generator.normal(size=count)
    other[1] = other[0]
    rho, p = rank_agreement(one, other)
    assert rho == pytest.approx(float(spearmanr(one, other).statistic), abs=1e-12)
    if count <= 6:
        all_of_them = [abs(spearmanr(order, other).statistic) for order in itertools.permutations(one)]
        assert p == pytest.approx(np.mean(np.array(all_of_them) >= abs(rho) - 1e-12))
    else:
        assert 0.0001 <= p <= 1


def test_rank_agreement_of_a_constant_or_unknown_series_is_nan() -> None:
    line = np.array([1.0, 2.0, 3.0, 5.0])
    assert all(math.isnan(each) for each in rank_agreement(line, np.ones(4)))
    assert all(math.isnan(each) for each in rank_agreement(line, np.array([1.0, np.nan, 3.0, 4.0])))
    assert all(math.isnan(each) for each in rank_agreement(line[:2], line[:2]))
    assert rank_agreement(line, line)[0] == pytest.approx(1.0)
