"""CircuitsVis's views: the props equal the arrays, and in a real browser text stays text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import opening

from attnmech.draw.circuitsvis import (
    attention_heads,
    attention_pattern,
    colored_tokens,
    colored_tokens_multi,
    text_neuron_activations,
    token_log_probs,
)
from attnmech.draw.embed import View
from attnmech.draw.text import LONGEST_LABEL, shorten, visible_token
from attnmech.errors import InputError

from .conftest import TOKENS
from .token_pages import COUNT, HEADS, causal


def props(view: View) -> dict[str, Any]:
    return json.loads(view.json)["props"]


def test_heads_have_their_numbers_and_those_of_a_decoder_a_mask() -> None:
    pattern = causal()[0]
    view = attention_heads(torch.from_numpy(pattern), TOKENS, heads=["a", "b", "<c>"])
    assert view.data["element"] == "AttentionHeads"
    np.testing.assert_allclose(props(view)["attention"], pattern, rtol=5e-4)
    assert props(view)["maskUpperTri"] is True
    assert props(view)["maxValue"] == -props(view)["minValue"] == pytest.approx(pattern.max())
    assert props(view)["attentionHeadNames"] == ["a", "b", "<\u2060c>"]
    listed = attention_heads([torch.from_numpy(head) for head in pattern], TOKENS)
    assert props(listed)["attention"] == props(view)["attention"]
    assert props(attention_heads(np.full((2, 3, 3), 1 / 3), ["a", "b", "c"]))["maskUpperTri"] is False


def test_raw_scores_reach_as_far_as_the_largest_and_hidden_ones_are_no_numbers() -> None:
    scores = np.array([[-7.0, -3e38], [2.0, 31.5]])
    view = attention_pattern(scores, ["a", "b"], hidden=np.array([[False, True], [False, False]]))
    assert props(view)["attention"] == [[-7, None], [2, 31.5]]
    assert (props(view)["minValue"], props(view)["maxValue"]) == (-31.5, 31.5)
    assert props(view)["maskUpperTri"] is True
    window = np.array([[False, True, True], [False, False, True], [True, False, False]])
    assert props(attention_pattern(np.ones((3, 3)), ["a", "b", "c"], hidden=window))["attention"][2] == [None, 1, 1]


@pytest.mark.parametrize("kind", ["one head", "all heads"])
def test_a_map_says_what_its_deepest_colour_stands_for(kind: str) -> None:
    scores = np.array([[[0.5, 9.0], [-2.25, 1.0]]])
    hidden = np.array([[[False, True], [False, False]]])
    if kind == "one head":
        view = attention_pattern(scores[0], ["a", "b"], hidden=hidden[0])
    else:
        view = attention_heads(scores, ["a", "b"], hidden=hidden)
    assert view.finding == "The deepest colour is an absolute value of 2.25; white is 0."


def test_numbers_are_rounded_and_words_isolated_visible_and_text() -> None:
    values = np.array([0.123456789, 1.23456789e-7, 0, -98765.4321])
    shown = props(colored_tokens(values, ["שלום", "سلام", "a", "b"]))
    assert shown["values"] == [0.1235, 1.235e-7, 0, -98770]
    assert shown["tokens"] == ["\u2068שלום\u2069", "\u2068سلام\u2069", "a", "b"]
    series = props(colored_tokens_multi(np.arange(14.0).reshape(COUNT, 2) / 7, TOKENS, labels=["x", "y"]))
    np.testing.assert_allclose(series["values"], np.arange(14.0).reshape(COUNT, 2) / 7, rtol=5e-4)
    assert series["labels"] == ["x", "y"]
    found = props(colored_tokens(np.arange(7.0), TOKENS))["tokens"]
    assert found[5] == "·&\u2060amp;"
    assert found[4] == "⏎$x$"
    assert found[0].startswith("<\u2060/script")
    assert [text.replace("\u2060", "") for text in found] == [shorten(visible_token(token)) for token in TOKENS]


def test_a_long_token_is_shortened_in_every_view() -> None:
    tokens, kept = ["a", "x" * 120], "x" * (LONGEST_LABEL - 1) + "…"
    square = np.tril(np.full((2, 2), 0.5))
    options: dict[str, Any] = {"names": ("layer", "head"), "labels": (["0"], ["0"])}
    views = [
        attention_heads(square[None], tokens),
        attention_pattern(square, tokens),
        colored_tokens(np.ones(2), tokens),
        colored_tokens_multi(np.ones((2, 1)), tokens, labels=["y"]),
        text_neuron_activations([np.ones((2, 1, 1))], [tokens], **options),
    ]
    for view in views:
        assert props(view)["tokens"] in (["a", kept], [["a", kept]])
    expected = props(token_log_probs(np.ones((2, 2)), [0, 1], tokens, text_of=tokens.__getitem__, top=2))
    assert expected["prompt"] == ["a", kept]
    assert expected["topKTokens"] == [["a", kept]]


@pytest.mark.parametrize("spread", [3.0, 0.3])
def test_log_probs_ranks_and_continuations_are_a_naive_loops(spread: float) -> None:
    """Holds also if several tokens are equally likely, and if some are impossible."""
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(COUNT, 11)).astype(np.float32) * spread
    ids = generator.integers(0, 11, COUNT).tolist()
    if spread < 1:
        logits = logits.round(1)
        logits[1::3, 2:10] = -np.inf
        ids = [10 if np.isneginf(logits[place - 1, token]) else token for place, token in enumerate(ids)]
    view = token_log_probs(torch.from_numpy(logits), ids, TOKENS, text_of=lambda token: f" <{token}", top=4)
    found, nats = props(view), 0.0
    for position in range(COUNT - 1):
        row = logits[position].astype(float)
        log_probs = row - np.log(sum(np.exp(value) for value in row))
        own = log_probs[ids[position + 1]]
        order = sorted(range(11), key=lambda token, at=log_probs: -at[token])
        assert found["correctTokenLogProb"][position] == pytest.approx(own, rel=1e-3)
        assert found["correctTokenRank"][position] == sum(value > own for value in log_probs)
        assert found["topKTokens"][position] == [f"·<\u2060{token}" for token in order[:4]]
        told = [-np.inf if value is None else value for value in found["topKLogProbs"][position]]
        assert told == pytest.approx(log_probs[order[:4]], rel=1e-3)
        nats -= own / (COUNT - 1)
    assert f"loss on this text is {nats:.2f} nats per token (perplexity {np.exp(nats):.1f})" in view.finding


def test_activations_of_texts_of_different_lengths() -> None:
    values = [np.random.default_rng(n).normal(size=(n, 2, 3)) for n in (4, 2)]
    view = text_neuron_activations(
        values, [list("abcd"), list("ab")], names=("layer", "head"), labels=(["0", "5"], ["0", "1", "2"])
    )
    for found, given in zip(props(view)["activations"], values, strict=True):
        np.testing.assert_allclose(found, given, rtol=5e-4)
    assert props(view)["firstDimensionLabels"] == ["0", "5"]


AB, ABC, ONES = ["a", "b"], ["a", "b", "c"], np.ones
NAMES: dict[str, Any] = {"names": ("a", "b")}
REFUSED: list[tuple[Callable[[], View], str]] = [
    (lambda: attention_heads(ONES((2, 3, 3)), AB), "one query and one key for each of the 2 tokens; got 3 × 3"),
    (lambda: attention_heads(ONES((3, 3)), ABC), r"the axes \[head query key\]; got the shape \(3, 3\)"),
    (lambda: attention_heads(ONES((0, 2, 2)), AB), "the selection is empty"),
    (lambda: attention_heads(ONES((2, 2, 2)), AB, heads=["x"]), "name each of the 2 heads; got 1"),
    (lambda: attention_pattern(ONES((3, 2)), ABC), "for cross-attention use"),
    (lambda: attention_heads(ONES((16, 512, 512)), ["a"] * 512), "4,194,304 numbers exceed the 200,000"),
    (lambda: colored_tokens(ONES(3), ["a"]), "one entry for each of the 1 tokens; got 3"),
    (lambda: colored_tokens_multi(ONES((2, 3)), AB, labels=["x"]), "name each of the 3 series; got 1"),
    (lambda: token_log_probs(ONES((2, 3)), [1], AB, text_of=str), "one id for each of the 2 tokens; got 1"),
    (lambda: token_log_probs(ONES((1, 3)), [1], ["a"], text_of=str), "nothing to predict"),
    (lambda: token_log_probs(ONES((2, 3)), [1, 2], AB, text_of=str), "`top` must be a whole number, 1 to 3"),
    (lambda: token_log_probs(ONES((2, 3)), [1, 3], AB, text_of=str), r"`ids` must be from 0 to 2 .*; got 3"),
    (lambda: colored_tokens(np.full(2, np.nan), AB), "at least one finite number; got none"),
    (lambda: attention_pattern(ONES((2, 2)), AB, hidden=np.zeros((1, 2), dtype=bool)),
     r"`hidden` must be a boolean array with the shape \(2, 2\) of `values`; got \(1, 2\)"),
    (lambda: colored_tokens([1.0, [2.0]], AB), "a list of equal-length rows of real numbers; got"),
    (lambda: text_neuron_activations([], [], **NAMES, labels=([], [])), "texts, at least one; got 0 and 0"),
    (lambda: text_neuron_activations([ONES((1, 2, 3))], [["a"]], **NAMES, labels=(["x"], ["y"])),
     "name each of the 2 × 3 entries; got 1 × 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call: Callable[[], View], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def everything() -> list[View]:
    pattern = causal()[0]
    numbers = np.random.default_rng(5).normal(size=(COUNT, 2, 3))
    return [
        attention_heads(pattern, TOKENS, heads=[f"<img src=x onerror=window.owned=1> {head}" for head in range(HEADS)]),
        attention_pattern(pattern[1], TOKENS),
        colored_tokens(pattern[1, 6], TOKENS),
        colored_tokens_multi(numbers[:, 0], TOKENS, labels=["<img src=x onerror=window.owned=1>", "y", "z"]),
        token_log_probs(
            np.random.default_rng(6).normal(size=(COUNT, 9)),
            list(range(COUNT)),
            TOKENS,
            text_of=lambda token: TOKENS[token % COUNT],
            top=9,
        ),
        text_neuron_activations(
            [numbers], [TOKENS], names=("layer", "head"), labels=(["0", "1"], ["<b>", "</script>", "2"])
        ),
    ]


@pytest.mark.browser
@pytest.mark.parametrize("view", everything(), ids=lambda view: view.data["element"])
def test_hostile_text_is_text_in_every_view(chromium: Any, tmp_path: Path, view: View) -> None:
    path = view.write_html(tmp_path / "view.html")
    with opening(chromium, path.read_text("utf-8"), path, ready=".attnmech-paper > *") as page:
        shown = page.inner_text(".attnmech-paper").replace("\u2060", "")
        if view.data["element"] in ("ColoredTokens", "TextNeuronActivations", "TokenLogProbs", "ColoredTokensMulti"):
            assert shorten(visible_token(TOKENS[1])) in shown
            page.hover(f".attnmech-paper span:text-is('{visible_token(TOKENS[3])}') >> nth=0")
            page.wait_for_timeout(100)
        assert page.locator(".attnmech img, .attnmech script, .attnmech a").count() == 0
        assert page.evaluate("window.owned") is None


@pytest.mark.browser
def test_another_head_is_drawn_when_it_is_pointed_at(chromium: Any, tmp_path: Path) -> None:
    path = everything()[0].write_html(tmp_path / "view.html")
    with opening(chromium, path.read_text("utf-8"), path, ready=".attnmech-paper canvas") as page:
        page.wait_for_timeout(300)
        read = "all => all.at(-1).toDataURL()"
        before = page.eval_on_selector_all(".attnmech-paper canvas", read)
        page.hover(".attnmech-paper h4 >> nth=2")
        page.wait_for_timeout(300)
        assert page.eval_on_selector_all(".attnmech-paper canvas", read) != before
