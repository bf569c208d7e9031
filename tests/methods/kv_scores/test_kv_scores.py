"""Scores of kv heads: loops over patterns, plain transformers with a mask made by hand, and the parsers of other tools.

The environment variable ATTNMECH_KVPRESS names the Python of an environment with kvpress 0.5.5.
"""

import json
import os
import subprocess
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import transformers
from comparing import refuses
from streaming import FIRST, LAST, by_hand, kept
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.runs.haystacks import Haystacks

CONTEXT = 60
KVPRESS = os.environ.get("ATTNMECH_KVPRESS", "")


def model_of(name: str) -> am.HookedModel:
    if name != "gpt2":
        return models.hooked(name)
    config = transformers.GPT2Config(n_embd=20, n_layer=2, n_head=5, vocab_size=53, n_positions=70)
    return am.load(models.randomised(transformers.GPT2LMHeadModel(config)))


def by_kv_head(values: Tensor, model: am.HookedModel) -> Tensor:
    """The largest of each group of query heads, by a loop."""
    group = model.output_stack.n_heads // model.output_stack.n_kv_heads
    return torch.stack([values[:, start : start + group].amax(dim=1) for start in range(0, values.shape[1], group)], 1)


def losses(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(dim=1).double()


@pytest.mark.core
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bloom"])
def test_scores_are_those_of_loops_and_of_hand_masked_transformers(name: str) -> None:
    model, ids = model_of(name), torch.randint(3, 40, (5, 12), generator=torch.Generator().manual_seed(5))
    scores = am.kv_scores(model, ids, first=FIRST, last=LAST, context=CONTEXT, steps=3, random=2)
    layers, heads = range(len(model.output_stack.layers)), model.output_stack.n_heads
    parts = torch.zeros(3, len(layers), heads, dtype=torch.float64)
    acts = model.run(ids, points=["pattern", "logits"])
    for layer in layers:
        for row in range(FIRST + LAST, 12):
            for key in range(row + 1):
                part = 0 if key < FIRST else 1 if row - key < LAST else 2
                parts[part, layer] += acts["pattern", layer][:, :, row, key].double().sum(dim=0) / (5 * 8)
    for part, statistic in enumerate((scores.sink, scores.recency, scores.between)):
        torch.testing.assert_close(statistic, by_kv_head(parts[part], model), rtol=0, atol=1e-6)

    haystacks = Haystacks.of(model, CONTEXT, seed=0)
    retrieved, repeats = torch.zeros(2, len(layers), heads, dtype=torch.float64)
    for text, keys in zip(haystacks, haystacks.keys.tolist(), strict=True):
        run = model.run(text, points=["pattern", "logits"])
        for row, key in zip(haystacks.rows, keys, strict=True):
            for layer in layers:
                pattern = run["pattern", layer][0, :, row].double()
                found = run.logits[0, row].argmax() == text[0, row + 1]
                retrieved[layer] += (found & (pattern.argmax(dim=-1) == key)) / (24 * 8)
                repeats[layer] += pattern[:, key] / (24 * 8)
    torch.testing.assert_close(scores.retrieval, by_kv_head(retrieved, model), rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.repeats, by_kv_head(repeats, model), rtol=0, atol=1e-6)

    group, keeps = heads // model.output_stack.n_kv_heads, kept(12)

    def renormalised(pattern: Tensor) -> Tensor:
        chosen = pattern.clone()
        chosen[:, group : 2 * group] *= keeps
        return chosen / chosen.sum(dim=-1, keepdim=True)

    with model.hooks({("pattern", 1): renormalised}):
        cost = losses(model.run(ids).logits, ids) - losses(acts.logits, ids)
    torch.testing.assert_close(scores.cost[1, 1], cost.mean(), rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.after[0, -1], losses(by_hand(name, ids, model), ids), rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.after[1:, -1], scores.after[:1, -1].expand(2, -1))  # all heads are one set
    assert scores.keep.flatten()[scores.keep.flatten().argsort()].tolist() == sorted(scores.keep.flatten().tolist())
    assert len(scores.streaming(0.5)) == len(layers) * heads // 2


@pytest.fixture(scope="module")
def of_demo() -> am.results.KVScores:
    return am.kv_scores(models.demo(), documents(12), first=2, last=16, context=96, steps=2, random=4)


def test_half_of_the_cache_keeps_the_needles_with_the_chosen_heads_and_not_with_random_ones(
    of_demo: am.results.KVScores,
) -> None:
    half, whole = of_demo.curve.iloc[0], float(of_demo.produced.mean())
    assert half.streaming == 16 and half.needles > 0.95 * whole > 0.6 and half.needles_random < 0.75 * whole
    assert half.loss_low < 0.01 and of_demo.curve.needles.iloc[1] < 0.1
    assert set(of_demo.order[-4:]) == {(2, 4), (2, 5), (2, 6), (2, 7)}
    haystacks = Haystacks.of(models.demo(), 96, seed=0)
    with models.demo().intervene(am.Intervention.stream_only(of_demo.streaming(0.5), first=2, last=16)):
        torch.testing.assert_close(haystacks.produced(models.demo()).mean(dim=1), of_demo.produced_after[0, 0])
    assert of_demo.lead.startswith("If 16 of 32 kv heads see the first 2 and the last 16 keys alone, the loss changes")


def test_tools_read_the_files(of_demo: am.results.KVScores, tmp_path: Path) -> None:
    assert of_demo.write(tmp_path / "kv") == tmp_path / "kv" / "index.html"
    matrix = np.loadtxt(tmp_path / "kv" / "full_attention_heads.tsv", dtype=float, delimiter="\t")  # as DuoAttention
    assert np.abs(matrix - of_demo.keep.numpy()).max() < 1e-6 and len(np.unique(matrix[matrix < 0.1])) == 28
    lines = (tmp_path / "kv" / "head_scores.json").read_text().splitlines()
    scores = {name: np.mean(needles) for name, needles in json.loads(lines[0]).items()}  # as both tools read it
    retrieved = of_demo.retrieved.mean(dim=-1)
    np.testing.assert_allclose(np.array(list(scores.values())).reshape(4, 8), retrieved)
    assert scores["2-6"] == pytest.approx(float(retrieved[2, 6])) and len(lines) == 1


PARSED = """
import json, sys
from pathlib import Path
from types import SimpleNamespace as Some
import torch
from kvpress.presses import duo_attention_press as duo
duo.PATTERNS_DICT["demo"] = "demo"
def get(url):
    text = (Path(sys.argv[1]) / url.rpartition("/")[2]).read_text()
    return Some(text=text, json=lambda: json.loads(text))
duo.requests = Some(get=get)
press = duo.DuoAttentionPress(head_compression_ratio=0.5)
press.post_init_from_model(Some(config=Some(name_or_path="demo"), device=torch.device("cpu")))
print(json.dumps([press.sink_size, press.recent_size, press.streaming_mask.nonzero().tolist()]))
"""


@pytest.mark.skipif(not KVPRESS, reason="ATTNMECH_KVPRESS names no Python with kvpress")
def test_kvpress_chooses_the_same_heads(of_demo: am.results.KVScores, tmp_path: Path) -> None:
    of_demo.write(tmp_path)
    printed = subprocess.run([KVPRESS, "-c", PARSED, tmp_path], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed.splitlines()[-1]) == [2, 16, [list(head) for head in of_demo.streaming(0.5)]]


def test_refusals(of_demo: am.results.KVScores) -> None:
    refuses("no text has more than 260 tokens", am.kv_scores, models.demo(), documents(5), context=64)
    refuses("`share` must be from 0 to 1; got 2", of_demo.streaming, 2)
    refuses("needs a decoder alone", am.kv_scores, models.hooked("t5"), models.token_ids("t5"))
