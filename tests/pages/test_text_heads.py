"""A page's statements about each head, and the finding at its top, against loops over the results."""

import re

import models
import numpy as np
import pytest
import torch

import attnmech as am
from attnmech.draw.heads import HeadNumber
from attnmech.pages import limits
from attnmech.pages.heads import TextHeads, furthest, most_alike

TEXT = "When Anna and Tom came to the harbour, Tom gave a shell to"


@pytest.fixture(scope="module")
def report() -> am.results.Report:
    return am.report(models.demo(), TEXT)


@pytest.fixture(scope="module")
def facts(report: am.results.Report) -> TextHeads:
    return report._head_facts(report.scores.numbers(pattern=report.pattern))


def test_the_map_has_every_statistic_of_the_results(report: am.results.Report, facts: TextHeads) -> None:
    numbers = {number.name: number for number in facts.page.numbers}
    assert {*report.focus.quantities, "effect", "sink_mass", "query_key_share", "type_induction"} <= numbers.keys()
    for name in report.focus.quantities:
        torch.testing.assert_close(
            torch.from_numpy(numbers[name].values), report.focus[name].mean.double(), equal_nan=True, rtol=0, atol=1e-12
        )
    assert report.effects is not None
    clear = numbers["effect"].clear
    assert clear is not None and clear.tolist() == report.effects.clear.tolist()
    for row in report.scores.to_frame().itertuples():
        assert numbers["query_key_share"].values[row.layer, row.head] == pytest.approx(row.query_key_share)


def test_overlap_is_the_bhattacharyya_coefficient_over_rows_with_a_choice(facts: TextHeads) -> None:
    pattern = facts.view.pattern
    layers, heads, rows, _ = pattern.shape
    found = most_alike(pattern)
    for one in range(0, layers * heads, 7):
        for other in range(1, layers * heads, 5):
            if one == other:
                continue
            p, q = (pattern[at // heads, at % heads] for at in (one, other))
            by_row = [sum((p[row, key] * q[row, key]) ** 0.5 for key in range(row + 1)) for row in range(1, rows)]
            assert found[one, other] == pytest.approx(np.mean(by_row), abs=1e-5)
    assert np.isnan(np.diag(found)).all()
    assert np.nanmax(found) <= 1 + 1e-6
    assert np.isnan(most_alike(np.ones((1, 2, 1, 1), dtype=np.float32))).all()


def test_a_card_names_the_statistics_furthest_from_the_median() -> None:
    generator = np.random.default_rng(0)
    plain = [HeadNumber(name, f"the {name}", "", 1 + 0.1 * generator.normal(size=(3, 5))) for name in "abcd"]
    plain[1].values[2, 3] = 9
    plain[3].values[2, 3] = np.nan
    said = furthest(plain)
    assert said[2][3].split("\n")[0] == f"b: 9 (median {np.median(plain[1].values):.3g})"
    assert "the d" not in said[2][3]
    assert furthest([HeadNumber("same", "same", "", np.ones((2, 2)))]) == [["", ""], ["", ""]]


def test_the_findings_are_about_this_text_the_clearest_type_and_the_largest_effect(
    report: am.results.Report, facts: TextHeads
) -> None:
    effects = report.effects
    assert effects is not None and report.types is not None
    low, high = effects.simultaneous()
    sizes = {
        (layer, head): abs(float(effects.effect[layer, head]))
        for layer in range(4)
        for head in range(8)
        if float(low[layer, head]) * float(high[layer, head]) > 0 and not bool(effects.one_text[layer, head])
    }
    telling, typed, first = facts.headlines
    assert first.place == max(sizes, key=lambda place: sizes[place])
    layer, head = first.place
    ends = f"95 % interval, corrected for 32 heads: {float(low[layer, head]):.2f} to {float(high[layer, head]):.2f}"
    assert first.sentence.startswith(f"Zeroing L{layer}H{head} ")
    assert first.sentence.endswith(f"nats on this text and 40 built-in texts ({ends}).")
    assert typed.place == report.types.example and typed.sentence.startswith("In random repeated text, ")
    assert telling.sentence.startswith("On this text, ")
    assert f"“{report.scores.tokens[0][report._page().start[2]].strip()}”" in telling.sentence
    assert report._page().start[:2] == telling.place and report._page().headline == telling.sentence
    headlines = {(layer, head): facts.by_head[layer][head] for layer in range(4) for head in range(8)}
    assert all(f"L{layer}H{head}" in re.findall(r"L\d+H\d", sentence) for (layer, head), sentence in headlines.items())
    assert all(headlines[finding.place] == finding.sentence for finding in facts.headlines)
    with_row = {place for place in headlines if facts.rows.of_head(*place)} - {typed.place, first.place}
    assert with_row == {place for place in headlines if headlines[place].startswith("On this text, ")}


def test_a_card_has_the_types_the_effect_and_similar_heads(report: am.results.Report, facts: TextHeads) -> None:
    card = facts.page.card
    assert report.types is not None and report.effects is not None
    assert card["Type"][2][6].startswith("induction: in random repeated text, ")
    score, baseline = (
        float(of[2, 6]) for of in (report.types.scores["induction"], report.types.baselines["induction"])
    )
    assert f"{100 * score:.0f}\u00a0% of its attention to the token after an earlier copy" in card["Type"][2][6]
    assert card["Type"][2][6].endswith(f"by distance alone: {100 * baseline:.0f}\u00a0%)")
    assert "if uniform: " in card["Type"][0][0]
    assert card["Without it"][2][6].startswith(f"loss {float(report.effects.effect[2, 6]):+.3f} nats on this text and ")
    alike = most_alike(facts.view.pattern)[2 * 8 + 6]
    best = int(np.nanargmax(alike))
    assert card["Heads that attend alike"][2][6].startswith(f"L{best // 8}H{best % 8} ({alike[best]:.2f})")
    assert "[" in card["Clearest example"][2][6]


def test_a_page_without_types_or_clear_effects_has_heads_all_the_same() -> None:
    report = am.report(models.hooked("bert"), torch.arange(5, 14)[None])
    facts = report._head_facts(report.scores.numbers(pattern=report.pattern))
    assert facts.page.numbers
    assert facts.headlines[-1].sentence.startswith("On this text, ")
    assert all(number.clear is None for number in facts.page.numbers)


def test_a_page_of_many_heads_holds_those_that_matter(
    report: am.results.Report, facts: TextHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = report.pattern[0, 0].numel()
    monkeypatch.setattr(limits, "MAX_DETAILS", 12 * cells)
    page = report._page()
    assert page.detailed is not None and len(page.detailed) == 12 and list(page.detailed) == sorted(page.detailed)
    held = {divmod(place, 8) for place in page.detailed}
    assert {headline.place for headline in facts.headlines} <= held
    assert report.effects is not None
    first = {
        (layer, head)
        for layer in range(4)
        for head in range(8)
        if set(facts.types_of(layer, head)) - {"first", "self"} or report.effects.clear[layer, head]
    }
    assert len(first) > 12 and held <= first | {headline.place for headline in facts.headlines}
    assert any("the scores and terms of 12 of 32 heads" in note for note in page.view.notes)
    monkeypatch.setattr(limits, "MAX_DETAILS", 32 * cells)
    assert report._page().detailed is None
    assert report._page(2).detailed is not None  # of several texts, each has its share
