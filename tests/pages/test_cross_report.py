"""The pages on cross-attention: figures 1 to 3 over two texts, and the report of a model with three stacks."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from browser import opening
from comparing import refuses
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from typer.testing import CliRunner

import attnmech as am
from attnmech.cli.main import app
from attnmech.draw.numbers import row_sentences
from attnmech.draw.style import marks_of
from attnmech.errors import InputError
from attnmech.pages.start import TellingRows

HOSTILE = ("<img/src=x/onerror=window.owned=1>", "</script><script>window.owned=1</script>")
WORDS = ("[PAD]", "[UNK]", "</s>", "the", "old", "sea", "is", "here", "le", "vieux", "mer", *HOSTILE)
SOURCE, TARGET = f"the old {HOSTILE[0]} sea is here old", f"le {HOSTILE[1]} vieux mer"


@cache
def t5() -> am.HookedModel:
    words = (*WORDS, *(f"w{number}" for number in range(43 - len(WORDS))))
    tokenizer = models.tokenizer(words=words)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return am.load(models.fresh("t5"), tokenizer=tokenizer)


@cache
def reported() -> am.results.Report:
    return am.report(t5(), SOURCE, target=TARGET)


def inputs() -> dict[str, Tensor]:
    """Two texts padded on both sides; the second has 4 source tokens and 3 target tokens."""
    generator = torch.Generator().manual_seed(5)
    source, target = (torch.randint(3, 43, (2, length), generator=generator) for length in (7, 5))
    masks = torch.ones_like(source), torch.ones_like(target)
    masks[0][1, 4:], masks[1][1, 3:] = 0, 0
    return {
        "input_ids": source,
        "attention_mask": masks[0],
        "decoder_input_ids": target,
        "decoder_attention_mask": masks[1],
    }


def transformer() -> am.HookedModel:
    """torch's own three stacks, with biases, so that scores have a term of the key alone."""
    torch.manual_seed(0)
    module = nn.Transformer(12, 4, 1, 2, 20, dropout=0.0, batch_first=True)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return am.load(module.eval(), example=own_example())


def own_example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 7, 12, generator=generator), torch.randn(1, 5, 12, generator=generator)


def test_in_cross_attention_every_key_that_is_a_word_counts() -> None:
    report = reported().others["cross"]
    view = report.scores.numbers(pattern=report.pattern)
    first = TellingRows(replace(view, key_special=report.key_special)).first
    words = np.array([any(map(str.isalnum, key)) for key in view.keys]) & ~np.array(report.key_special)
    assert first is not None and first[2].share == pytest.approx(view.pattern[..., words].max())
    assert f" of the {view.nouns.key_text}: " in first[2].sentence


@pytest.mark.parametrize("text", [0, 1])
def test_figures_of_cross_attention_are_of_the_run_and_of_real_tokens(text: int) -> None:
    model, given = t5(), inputs()
    split = am.decompose_scores(model, given, stack="cross")
    queries, keys = (int(given[name][text].sum()) for name in ("decoder_attention_mask", "attention_mask"))
    ran = model.run(given, points=["cross.scores", "cross.pattern"])
    view = split.numbers(text)
    assert (len(view.tokens), len(view.keys), view.crosses) == (queries, keys, True)
    for name, drawn in (("scores", view.scores), ("pattern", view.pattern)):
        for layer in range(3):
            expected = ran[f"cross.{name}", layer][text, :, :queries, :keys].numpy()
            np.testing.assert_allclose(drawn[layer], expected, rtol=1e-4, atol=1e-5)
    order = np.argsort(-view.scores, axis=-1)
    assert view.ranked_key.shape[-1] == min(10, keys)
    np.testing.assert_array_equal(view.ranked_key, order[..., : view.ranked_key.shape[-1]])
    heat, *marks = split.plot("attention_map", layer=1, head=2, text=text).data
    assert (len(heat.y), len(heat.x)) == (queries, keys)
    assert [mark.meta for mark in marks] == ["first", "last", "other"]
    top = {row: int(view.scores[1, 2, row].argmax()) for row in range(queries)}
    for mark, wanted in zip(marks, ({0}, {keys - 1}, set(range(1, keys - 1))), strict=True):
        assert {int(label.split()[0]) for label in mark.x} == {key for key in top.values() if key in wanted}
    for name in ("score_shares", "row_ledger", "key_terms", "dimensions"):
        split.plot(name, layer=1, head=2, text=text)


def test_figures_2_and_3_of_torchs_transformer_against_its_weights() -> None:
    """With a query bias, b_Q·(y W_K) is a term of the key alone, shown in figure 3."""
    model = transformer()
    given = own_example()
    split = am.decompose_scores(model, given, stack="cross")
    view = split.numbers()
    ran = model.run(given, points=["cross.k", "cross.q"])
    for layer in range(2):
        weights = model.weights(layer, "cross")
        for head in range(4):
            bias, key_bias = weights.b_Q[head].detach(), weights.b_K[head].detach()
            key = ran["cross.k", layer][0, :, head] - key_bias
            by_hand = (key @ bias / 3**0.5).numpy()  # 1/√d_head
            np.testing.assert_allclose(view.key_terms["key_bias"][layer, head], by_hand, rtol=1e-4, atol=1e-5)
            query = ran["cross.q", layer][0, :, head] - bias
            content = (query @ key.T / 3**0.5).numpy()
            np.testing.assert_allclose(view.terms["query_key"][layer, head], content, rtol=1e-4, atol=1e-4)
            lifted = {"query_key": content, "key_bias": np.broadcast_to(by_hand, content.shape)}
            lifted = {name: value - value.min(axis=1, keepdims=True) for name, value in lifted.items()}
            best = view.scores[layer, head].argmax(axis=1)
            of_best = {name: value[np.arange(5), best] for name, value in lifted.items()}
            share = of_best["key_bias"] / sum(of_best.values())
            np.testing.assert_allclose(view.ranked_share["key_bias"][layer, head, :, 0], share, rtol=1e-3, atol=1e-4)
    assert len(split.plot("key_terms", layer=1, head=2).data[0].x) == 7
    assert len(split.plot("score_shares", layer=1, head=2).data[-1].y) == 5
    page = am.report(model, given)
    assert {page.stack, *page.others} == {"encoder", "decoder", "cross"}
    assert page.others["cross"].pattern.shape == (2, 4, 5, 7)


def test_two_texts_that_read_alike_are_still_two() -> None:
    """The labels of a module's source and target may be the same, but no key is then the token itself."""
    model, x = transformer(), own_example()[0]
    split = am.decompose_scores(model, (x, x), stack="cross")
    view = split.numbers()
    assert view.crosses and len(view.tokens) == len(view.keys) == 7
    assert [trace.meta for trace in split.plot("attention_map").data[1:]] == ["first", "last", "other"]
    assert not am.decompose_scores(model, (x, x), stack="decoder").numbers().crosses


def test_marks_of_keys_that_are_another_texts() -> None:
    assert marks_of(np.array([[-1, 0, 1, 4, 2]]), crossing=5).tolist() == [[-1, 0, 2, 1, 2]]
    assert marks_of(np.array([0]), crossing=1).tolist() == [0]


def test_a_report_has_every_stack_with_its_own_tokens() -> None:
    report = reported()
    model = t5()
    batch = model.encode(SOURCE, target=TARGET)
    assert batch.target is not None
    assert (report.stack, *report.others) == ("encoder", "decoder", "cross")
    lengths = {"encoder": (7, 7), "decoder": (5, 5), "cross": (5, 7)}
    for name, each in {report.stack: report, **report.others}.items():
        assert each.pattern.shape[-2:] == lengths[name]
        ran = model.run(batch, points=[f"{name}.pattern"])
        for layer, pattern in enumerate(each.pattern):
            torch.testing.assert_close(pattern, ran[f"{name}.pattern", layer][0])
        page = each._page()
        assert (len(page.view.tokens), len(page.view.key_tokens)) == lengths[name]
    assert batch.target.tokens[0] == ("[PAD]", *TARGET.split())
    assert batch.target.ids[0, 0] == model.config.decoder_start_token_id


def test_what_has_no_meaning_in_cross_attention_is_absent() -> None:
    cross = reported().others["cross"]
    sections = {section.heading for section in cross._page().sections}
    assert "Figure 1. Attention map" in sections
    assert any(heading.endswith("How often heads attend most to the first key token") for heading in sections)
    assert not any("the token itself" in heading for heading in sections)
    place = {"layer": 1, "head": 2, "query": 3, "rank": 1, "weight": 0}
    texts = [text for each in cross._page().sections for text in (each.finding, each.reading, each.caveat)]
    told = [text if isinstance(text, str) else str(text.at(place)) for text in texts]
    said = " ".join([*cross.findings.values(), *told])
    assert not re.search(r"itself|the one before|previous|distance|\bnan\b|figure 4", said), said
    assert "updates" not in cross.findings and cross.types is None and cross.updates is None
    refuses("no key of cross-attention is the token itself", cross.focus.plot, "self_focus")
    refuses("no distance between queries and keys", cross.scores.position_kernel)


def test_focus_of_cross_attention_says_what_its_rows_say() -> None:
    cross = reported().others["cross"]
    rows = cross.pattern[:, :, 1:]  # the first row is left out
    torch.testing.assert_close(cross.focus.first_top, (rows.argmax(dim=-1) == 0).double().mean(dim=-1))
    entropy = -(rows * rows.log()).sum(dim=-1).double().mean(dim=-1) / np.log(7)
    torch.testing.assert_close(cross.focus.normalised_entropy, entropy, rtol=1e-4, atol=1e-4)
    assert f"mean over heads is {float(entropy.mean()):.2f}" in cross.focus.lead


def test_sentences_name_keys_by_the_source_and_queries_by_the_target() -> None:
    cross = reported().others["cross"]
    view = cross._page().view
    said = row_sentences(view).at({"weight": 0, "layer": 1, "head": 2, "query": 3})
    best = int(cross.pattern[1, 2, 3].argmax())
    assert str(said).startswith("Attention of query 3 “vieux”: ")
    assert f"to {best} “{view.keys[best]}”" in str(said)


def test_without_a_target_the_models_own_words_are_shown() -> None:
    report = am.report(t5(), "the old sea is here")
    said = t5().generate("the old sea is here", 48)
    assert said.target is not None
    assert report.others["cross"].scores.tokens == said.target.tokens
    assert "The model generated the decoder's text" in report.notes[0]
    assert "model.generate('the old sea is here', 48)" in report.calls["setup"]


def test_the_calls_of_the_page_make_its_numbers() -> None:
    cross = reported().others["cross"]
    space: dict[str, Any] = {"model": t5()}
    exec(cross.calls["setup"].replace("model = model", ""), space)
    again = eval(cross.calls["scores"], space)
    torch.testing.assert_close(again.terms["query_key"], cross.scores.terms["query_key"])
    torch.testing.assert_close(eval(cross.calls["focus"], space).entropy, cross.focus.entropy)
    view = cross.calls["view"].format(layer=1, head=2, figure="sentence", weight="None")
    assert len(eval(view, space).data["keys"]) == 7


def test_targets_must_fit() -> None:
    refuses("one text for each of the 2 texts; got 1", t5().encode, ["the sea", "the old sea"], target="le mer")
    with pytest.raises(InputError, match="`target` is the decoder's text in an encoder-decoder; "):
        am.report(models.demo(), "The keys are here.", target="no")
    batch = t5().encode(["the sea", "the old sea"], target=["le mer", "le"])
    assert batch.target is not None and batch.target.mask.tolist() == [[True, True, True], [True, True, False]]


def test_texts_for_the_decoder_are_paired_with_theirs() -> None:
    model, texts, targets = t5(), ["the old sea is here", "the sea"], ["le mer", "le"]
    report = am.report(model, texts, target=targets)
    for number, each in enumerate(report.texts):
        alone = am.report(model, texts[number], target=targets[number])
        torch.testing.assert_close(each.others["cross"].pattern, alone.others["cross"].pattern, rtol=0, atol=1e-6)
        assert f"target={targets[number]!r}" in each.calls["setup"]
    html = report.to_html()
    assert all(f'data-text="{text}" data-stack="{stack}"' in html for text in (0, 1) for stack in ("encoder", "cross"))


@pytest.mark.browser
def test_a_reader_chooses_a_stack(chromium: Any, tmp_path: Path) -> None:
    cross = reported().others["cross"]
    with opening(
        chromium, reported().to_html(), tmp_path / "page.html", ready="html[data-ready]", address="#stack=decoder"
    ) as page:
        shown = page.locator("#tokens .token")
        assert shown.all_inner_texts() == ["[PAD]", *TARGET.split()]
        assert page.locator("#key-tokens").count() == 0
        page.select_option("#stack", "cross")
        page.wait_for_selector("#key-tokens .token")
        page.wait_for_selector("html[data-ready]", state="attached")
        assert shown.all_inner_texts() == ["[PAD]", *TARGET.split()]
        assert page.locator("#key-tokens .token").all_inner_texts() == SOURCE.split()
        page.select_option("#layer", "2")
        page.select_option("#head", "1")
        shown.nth(3).click()
        expected = cross.pattern[2, 1, 3].sqrt()
        for key, chip in enumerate(page.locator("#key-tokens .token").all()):
            depth = float(chip.evaluate("chip => chip.style.getPropertyValue('--depth')"))
            assert depth == pytest.approx(float(expected[key]), abs=1e-3)
        page.locator("#attention-map").scroll_into_view_if_needed()
        page.wait_for_selector("#attention-map .main-svg")
        z = page.evaluate("document.getElementById('attention-map').data[0].z")
        np.testing.assert_allclose(np.array(z), cross.scores.numbers().scores[2, 1], rtol=1e-3, atol=1e-3)
        assert page.evaluate("window.owned") is None
        assert page.url.split("#")[1].startswith("stack=cross&layer=2&head=1")
        page.go_back()
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        assert page.input_value("#stack") == "cross"


def test_a_head_of_cross_attention_is_ablated_by_a_template() -> None:
    """Effects against plain transformers without the rows of W_O that read the head."""
    model, given = t5(), inputs()
    template = am.Intervention.zero("all", stack="cross")

    def likelihood(logits: Tensor, batch: Any) -> Tensor:
        chosen = logits.log_softmax(dim=-1)[:, :-1].gather(-1, batch.ids[:, 1:, None])[..., 0]
        real = batch.mask[:, 1:]
        return (chosen * real).sum(dim=1).double() / real.sum(dim=1)

    found = am.ablate_heads(model, given, method=template, metric=likelihood)
    together = am.ablate_set(model, given, [(1, 2), (2, 0)], method=template, metric=likelihood)
    target = model.encode(given).target
    for heads, effect in (([(1, 2)], found.effect[1, 2]), ([(1, 2), (2, 0)], together.effect[0])):
        plain, without = models.fresh("t5").eval(), models.fresh("t5").eval()
        with torch.no_grad():
            for layer, head in heads:
                without.decoder.block[layer].layer[1].EncDecAttention.o.weight[:, 5 * head : 5 * head + 5] = 0
            before, after = (likelihood(each(**given).logits, target) for each in (plain, without))
        assert float(effect) == pytest.approx(float((after - before).mean()), abs=1e-5)
        assert abs(float(effect)) > 1e-4
    with pytest.raises(InputError, match="or in its cross-attention; got z of encoder all heads becomes 0"):
        am.ablate_heads(model, given, method=am.Intervention.zero("all", stack="encoder"), metric=likelihood)


def test_the_command_line_takes_two_texts(tmp_path: Path) -> None:
    folder, page = tmp_path / "model", tmp_path / "page.html"
    models.fresh("t5").save_pretrained(folder)
    t5().tokenizer.save_pretrained(folder)
    command = ["report", "--model", str(folder), "--text", SOURCE, "--target-text", TARGET, "--out", str(page)]
    assert CliRunner().invoke(app, command).exit_code == 0
    html = page.read_text("utf-8")
    assert [f'data-stack="{name}"' in html for name in ("encoder", "decoder", "cross")] == [True] * 3
    assert all(each not in html for each in HOSTILE)
