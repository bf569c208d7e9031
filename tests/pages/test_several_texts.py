"""A report of several texts: each as its own report says, ablations on all of them, and one page with a choice."""

from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from browser import opening
from typer.testing import CliRunner

import attnmech as am
from attnmech.cli.main import app
from attnmech.errors import InputError
from attnmech.pages import limits

TEXTS = ["Anna gave an old anchor to Tom.", "The keys to the cabinet are here. Tom lost the keys again.", "Anna sang."]


@cache
def reported() -> am.results.Report:
    return am.report(models.demo(), TEXTS)


def test_each_text_is_as_in_its_own_report(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = reported().texts
    monkeypatch.setattr(limits, "OTHER_TEXTS", 0)
    for text, report in zip(TEXTS, reports, strict=True):
        alone = am.report(models.demo(), text)
        assert report.scores.tokens == alone.scores.tokens
        torch.testing.assert_close(report.pattern, alone.pattern, rtol=0, atol=1e-6)
        torch.testing.assert_close(report.focus.first_mass, alone.focus.first_mass, rtol=0, atol=1e-6)
        assert report.types is not None and alone.types is not None
        assert torch.equal(report.types.scores["induction"], alone.types.scores["induction"])


def test_ablations_are_those_of_all_texts() -> None:
    space: dict[str, Any] = {}
    second = reported().texts[1]
    exec(second.calls["setup"], space)
    assert space["text"] == TEXTS[1] and space["texts"][:3] == TEXTS
    effects = am.ablate_heads(space["model"], space["texts"])
    assert second.effects is not None and len(second.effects.before) == len(TEXTS) + limits.OTHER_TEXTS
    torch.testing.assert_close(second.effects.effect, effects.effect, rtol=0, atol=1e-6)
    assert f"the 3 texts of this page and {limits.OTHER_TEXTS} built-in texts" in reported().to_html()


def test_the_table_numbers_the_texts() -> None:
    frame = reported().to_frame()
    assert frame.text.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    expected = reported().texts[1].to_frame()
    assert frame[frame.text == 1].drop(columns="text").reset_index(drop=True).equals(expected)


def test_padding_belongs_to_no_text() -> None:
    model = models.demo()
    batch = model.encode(TEXTS)
    assert batch.padded
    for number, text in enumerate(TEXTS):
        own, alone = model.encode(text), batch.alone(number)
        assert torch.equal(alone.ids, own.ids) and alone.tokens == own.tokens and not alone.padded


def test_a_file_of_texts_makes_one_page(tmp_path: Path) -> None:
    file, page = tmp_path / "texts.txt", tmp_path / "page.html"
    file.write_text("\n".join(TEXTS))
    assert CliRunner().invoke(app, ["report", "--file", str(file), "--out", str(page)]).exit_code == 0
    assert [f'data-text="{number}"' in page.read_text() for number in range(4)] == [True, True, True, False]
    file.write_text("Anna sang.\n" * 13)
    refused = CliRunner().invoke(app, ["report", "--file", str(file), "--out", str(tmp_path / "other.html")])
    assert refused.exit_code and isinstance(refused.exception, InputError)
    assert "at most 12 texts" in str(refused.exception) and not (tmp_path / "other.html").exists()


@pytest.mark.browser
def test_another_text_keeps_the_head_and_the_tab(chromium: Any, tmp_path: Path) -> None:
    with opening(chromium, reported().to_html(), tmp_path / "page.html", ready="html[data-ready]") as page:
        page.click("#tab-write")
        page.click(".heads-cell >> nth=9")
        with page.expect_navigation():
            page.select_option("#text", "1")
        page.wait_for_selector("html[data-ready]")
        assert page.text_content("#head-name") == "L1H1"
        assert page.get_attribute("#tab-write", "aria-selected") == "true"
        assert page.text_content("#unknown") == ""
        chips = page.eval_on_selector_all("#tokens .token", "chips => chips.map(chip => chip.textContent)")
        assert len(chips) == len(reported().texts[1].scores.tokens[0])
        with page.expect_navigation():
            page.go_back()
        page.wait_for_selector("html[data-ready]")
        assert (page.input_value("#text"), page.text_content("#head-name")) == ("0", "L1H1")


@pytest.mark.browser
def test_an_address_with_a_text_that_the_page_lacks_says_so(chromium: Any, tmp_path: Path) -> None:
    html, ready = reported().to_html(), "html[data-ready]"
    with opening(chromium, html, tmp_path / "page.html", ready=ready, address="#text=3&layer=2") as page:
        assert page.text_content("#unknown") == "This page has no text 3; it shows the next best."
        assert page.input_value("#text") == "0"
