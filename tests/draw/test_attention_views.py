"""`draw.attention` shows the patterns of a TransformerLens cache, a mapping or a run in the same way."""

import functools
import json
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from comparing import refuses
from transformer_lens import ActivationCache
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import attnmech as am
from attnmech.draw import model_view, sentence_view, token_graph
from attnmech.draw.embed import View
from attnmech.draw.patterns import checked_pattern


@functools.cache
def runs_of(name: str) -> tuple[Any, am.results.Activations]:
    model, ids = models.fresh(name), models.token_ids(name)
    model.set_attn_implementation("eager")
    bridge: Any = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)
    if name == "gpt_neox":
        bridge.enable_compatibility_mode(disable_warnings=True)
    with torch.no_grad():
        _, cached = bridge.run_with_cache(ids)
    return cached, am.load(bridge).run(ids, points=["pattern"])


def data(view: View) -> Any:
    return json.loads(view.json)


@pytest.mark.parametrize("name", ["gpt2", "llama_bias", "gpt_neox", "bert"])
@pytest.mark.parametrize(
    "selection", [{"layer": 1}, {"layer": 1, "head": 2}, {}, {"layer": 0, "head": 1, "view": "sentence"}], ids=str
)
def test_a_bridge_s_cache_is_shown_as_a_run(name: str, selection: dict[str, Any]) -> None:
    cached, acts = runs_of(name)
    tokens = list(acts.tokens[1])
    theirs = am.draw.attention(cached, tokens, text=1, **selection)
    for ours in (acts.show("pattern", text=1, **selection), am.draw.attention(acts, text=1, **selection)):
        assert (theirs.kind, theirs.title) == (ours.kind, ours.title)
        assert data(theirs).keys() == data(ours).keys()
    if "view" not in selection and "layer" in selection:
        shown = data(theirs)["props"]
        assert len(shown["tokens"]) == len(tokens)
        drawn = np.array(shown["attention"], dtype=float)
        expected = acts["pattern", 1][1].numpy()[selection.get("head", slice(None))]
        seen = np.isfinite(drawn)
        np.testing.assert_allclose(drawn[seen], expected[seen], atol=1e-4)
        assert np.all(expected[~seen] == 0)


def test_mappings_of_arrays_with_and_without_a_batch() -> None:
    pattern = np.tril(np.random.default_rng(0).random((2, 3, 4, 4))).astype(np.float32)
    pattern /= pattern.sum(-1, keepdims=True)
    tokens = ["a", "b", "c", "d"]
    named = {"blocks.10.attn.hook_pattern": pattern, "blocks.9.attn.hook_pattern": pattern[::-1], "ln.hook_scale": 1}
    view = am.draw.attention(named, tokens, text=1)
    assert view.kind == "model" and view.data["layers"] == [9, 10]
    alone = {"blocks.10.attn.hook_pattern": torch.tensor(pattern[1])}
    for cache in (alone, ActivationCache(alone, None, has_batch_dim=False)):
        one = am.draw.attention(cache, tokens, layer=10, head=2)
        assert data(one) == data(am.draw.attention(named, tokens, layer=10, head=2, text=1))
    row = am.draw.attention(alone, tokens, layer=10, head=2, query=2)
    np.testing.assert_allclose(data(row)["props"]["values"], pattern[1, 2, 2], atol=1e-4)


def test_patterns_by_layer_are_shown_as_a_cache() -> None:
    """The tuple that transformers returns, and a mapping from layers, such as one of values that nnsight saved."""
    model = models.plain("gpt2")
    model.set_attn_implementation("eager")
    ids = models.token_ids("gpt2")
    with torch.no_grad():
        patterns = model(ids, output_attentions=True).attentions
    tokens = [f"t{place}" for place in range(ids.shape[1])]
    cache = {f"blocks.{layer}.attn.hook_pattern": pattern for layer, pattern in enumerate(patterns)}
    whole = am.draw.attention(cache, tokens)
    assert am.draw.attention(patterns, tokens).data == am.draw.attention(list(patterns), tokens).data == whole.data
    one = data(am.draw.attention(cache, tokens, layer=2, head=1))
    assert data(am.draw.attention(patterns, tokens, layer=2, head=1)) == one
    assert data(am.draw.attention({2: patterns[2]}, tokens, head=1, layer=2)) == one


@pytest.mark.parametrize(
    ("cache", "tokens", "options", "message"),
    [
        ((), ["a"], {}, "it holds nothing"),
        ((None, np.ones((1, 1, 1))), ["a"], {}, "layer 0 has no pattern: its attention does not return one. Load the"),
        ({True: np.ones((1, 1, 1))}, ["a"], {}, "it holds True"),
        ([np.ones((1, 1, 1))], ["a"], {"layer": 3}, "`layer` must be one of those in the cache (0); got 3"),
        (np.zeros((2, 2)), ["a"], {}, "`cache` must be a TransformerLens ActivationCache, a mapping"),
        ({}, ["a"], {}, "such as 'blocks.0.attn.hook_pattern'; it holds nothing"),
        ({"hook_embed": 1}, ["a"], {}, "it holds hook_embed"),
        ({"blocks.1.attn.hook_pattern": np.ones((1, 1, 1))}, None, {}, "such as bridge.to_str_tokens"),
        (
            {"blocks.1.attn.hook_pattern": np.ones((1, 1, 1))},
            ["a"],
            {"layer": 0},
            "`layer` must be one of those in the cache (1)",
        ),
        ({"blocks.1.attn.hook_pattern": np.ones((1, 1, 1))}, ["a", "b"], {}, "got 2 tokens and a pattern of 1 queries"),
        ({"blocks.1.attn.hook_pattern": np.ones((1, 1))}, ["a"], {}, "the pattern of layer 1 must have the axes"),
        (np.ones((1, 1, 1, 1)), ["a"], {}, "a list with a tensor for each layer ([pattern] for one)"),
        ({"blocks.1.attn.hook_pattern": np.ones((1, 1, 1))}, ["a"], {"text": 1}, "to have a text besides the first"),
        ({"blocks.1.attn.hook_pattern": np.ones((1, 1, 1, 1))}, ["a"], {"text": 1}, "`text` must be from 0 to 0"),
        ({"blocks.1.attn.hook_pattern": np.ones((1, 1, 1))}, ["a"], {"view": "lines"}, "`view` must be one of model"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_drawn(cache: Any, tokens: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(am.errors.InputError) as raised:
        am.draw.attention(cache, tokens, **options)
    assert message in str(raised.value)


def test_a_run_brings_its_tokens() -> None:
    acts = models.hooked("gpt2").run(models.token_ids("gpt2"), points=["pattern"])
    refuses("omit `tokens`", am.draw.attention, acts, ["a"], error=am.errors.InputError)


TOKENS = ["a", "b", "c"]
GOOD = np.tril(np.ones((2, 4, 3, 3))) / np.array([1, 2, 3])[:, None]


def check(pattern: np.ndarray, whole: bool = True) -> None:
    checked_pattern(pattern, TOKENS, None, axes="layer head query key", sums_to_one=whole)


def with_a_row(factor: float) -> np.ndarray:
    pattern = GOOD.copy()
    pattern[1, 2, 1] *= factor
    return pattern


def test_probabilities_of_any_precision_pass() -> None:
    check(GOOD)
    check(torch.from_numpy(GOOD).bfloat16().float().numpy())
    found = checked_pattern(torch.from_numpy(GOOD).half(), TOKENS, None, axes="layer head query key", sums_to_one=True)
    assert found.dtype == np.float32


def test_a_sink_takes_the_rest_of_a_row_and_adds_nothing() -> None:
    check(GOOD * 0.7, whole=False)
    refuses(r"layer 1, head 2, query 1 sums to 1\.02\.$", check, with_a_row(1.02), whole=False)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (GOOD[0], r"must have the axes \[layer head query key\]; got the shape \(4, 3, 3\)"),
        (GOOD[:0], r"the selection is empty: `pattern` has the shape \(0, 4, 3, 3\)"),
        (GOOD[:, :, :2], "must have one query for each of the 3 tokens; got 2. Pass the tokens of the text"),
        (GOOD[:, :, :, :2], "must have one key for each of the 3 tokens; got 2"),
        (GOOD - 1, r"finite numbers from 0 to 1, after the softmax. Got -1.0; are these scores\?"),
        (np.where(GOOD == 0, -np.inf, GOOD), "Got -inf; are these scores"),
        (GOOD * np.nan, "Got nan"),
        (with_a_row(1.02), r"to 1 over the keys; layer 1, head 2, query 1 sums to 1\.02\.$"),
        (with_a_row(0.7), r"query 1 sums to 0\.7\. If a sink takes the rest .* pass sums_to_one=False"),
    ],
)
def test_what_is_no_pattern_of_these_tokens(pattern: np.ndarray, message: str) -> None:
    refuses(message, check, pattern)


@pytest.mark.parametrize("view", [model_view, sentence_view, token_graph])
def test_every_view_checks_its_pattern_its_layers_and_its_head(view: Callable[..., View]) -> None:
    large = np.broadcast_to(np.float32(0.001), (5, 10, 1000, 1000))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"head": 4}, "`head` must be from 0 to 3; got 4"),
        ({"layers": [2]}, "`layers` must have one number for each of the 2 layers; got 1"),
        ({"keys": list("wxyz")}, "one key for each of the 4 tokens; got 3"),
        ({"tokens": TOKENS[:2]}, "one query for each of the 2 tokens; got 3"),
        ({"pattern": GOOD / 2}, "must sum to 1"),
        ({"pattern": GOOD[0]}, r"must have the axes \[layer head query key\]"),
        (
            {"pattern": large, "tokens": ["a"] * 1000, "layers": range(5)},
            r"up to 40 million .* \(5, 10, 1000, 1000\) has 50 million",
        ),
    ]
    given = {"pattern": GOOD, "tokens": TOKENS, "layers": [0, 1]}
    for changes, message in wrong:
        refuses(message, view, **given | changes)
    assert view(**(given | {"pattern": GOOD / 2}), sums_to_one=False).data["heads"] == 4
