"""The report's section about a token has the methods' numbers, and says what is left out."""

import importlib
import re
from html import unescape
from typing import Any

import models
import numpy as np
import pytest
import torch

import attnmech as am
from attnmech.draw.chart import ByChoice, Chart
from attnmech.draw.section import Section
from attnmech.pages import limits
from attnmech.pages.tokens import TokenPaths

TEXT = "Anna gave an old anchor to Tom. Tom lost the old anchor. The sea was cold."
module = importlib.import_module("attnmech.pages.tokens")


@pytest.fixture(scope="module")
def demo() -> am.HookedModel:
    return am.load()


@pytest.fixture(scope="module")
def sections(demo: am.HookedModel) -> dict[str, Section]:
    notes: list[str] = []
    wanted = TokenPaths.reducers(demo, demo.encode(TEXT), notes)
    paths = TokenPaths(**dict(zip(wanted, am.stream(demo, TEXT, list(wanted.values())), strict=True)))
    assert notes == []
    return {each.anchor: each for each in paths.sections("(model, text)", demo.encode(TEXT).tokens[0], [0, 3])}


def value(section: Section, figure: str, path: str, **chosen: int) -> Any:
    chart = section.figures[figure]
    assert isinstance(chart, Chart)
    (slot,) = (slot for slot in chart.slots if slot.path == path)
    return np.array(slot.value(chosen), dtype=float)


def test_drift_on_the_page_is_that_of_the_method(demo: am.HookedModel, sections: dict[str, Section]) -> None:
    drift, section = am.residual_drift(demo, TEXT), sections["token-drift"]
    for token in (0, 4, 9):
        for name, offset in (("cosine", 0), ("rank", 1), ("churn", 0)):
            expected = drift.by_token(name)[:, 0, token].numpy() + offset
            np.testing.assert_allclose(value(section, f"token-{name}", "data.0.y", query=token), expected, 1e-6)
        nearest = drift.nearest(0, token, 4)
        chart = section.figures["token-nearest"]
        assert isinstance(chart, Chart)
        cells = chart.figure(query=token, layer=0).data[0].cells["values"]
        plain = [[unescape(re.sub("</?b>", "", each)).lstrip("·") for each in column] for column in cells[2:]]
        assert plain == [[each.strip() for each in nearest[str(place)]] for place in (1, 2, 3, 4)]
        assert list(cells[1]) == [f"{rank:,.0f}" for rank in nearest["rank"]]


def test_inflows_on_the_page_and_in_python_are_those_of_a_loop(
    demo: am.HookedModel, sections: dict[str, Section]
) -> None:
    flow = am.attention_flow(demo, TEXT, "norm_residual")
    for token in (0, 1, 9):
        frame = flow.sources_of(token, count=2)
        drawn = value(sections["token-flow"], "token-inflow", "data.0.z", query=token, layer=0)
        for layer in range(4):
            row = [float(each) for each in flow.maps[layer, token]]
            expected = [each / sum(row) for each in row]
            np.testing.assert_allclose(np.nan_to_num(drawn[layer]), expected, rtol=1e-5, atol=1e-8)
            others = sorted(((share, -key) for key, share in enumerate(expected) if key != token and share > 0))[::-1]
            for place in range(2):
                share, key = others[place] if place < len(others) else (0.0, 1)
                assert frame[f"source_{place + 1}"][layer] == -key
                assert frame[f"share_{place + 1}"][layer] == pytest.approx(share)
            assert frame["itself"][layer] == pytest.approx(expected[token])


def test_sentences_on_the_page_are_those_of_the_method(demo: am.HookedModel, sections: dict[str, Section]) -> None:
    found, section = am.segment_attention(demo, TEXT), sections["token-segments"]
    drawn = value(section, "segment-mass", "data.0.z", layer=1, head=5, query=9)
    np.testing.assert_allclose(drawn, found.mass()[3, 5].numpy())
    drawn = value(section, "segment-excess", "data.0.z", layer=1, head=5, query=9)
    np.testing.assert_allclose(drawn, (found.mass() - found.expected())[3, 5].numpy(), atol=1e-6)
    starts = found.starts[0]
    for token in range(starts[-1]):
        own = max(place for place, start in enumerate(starts) if start <= token)
        assert value(section, "segment-mass", "layout.shapes.0.y0", query=token, layer=0, head=0) == own - 0.5
        assert isinstance(section.finding, ByChoice)
        assert f"tokens of sentence {own}, " in str(section.finding.at({"layer": 0, "head": 0, "query": token}))


def test_what_is_left_out_is_said(demo: am.HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def left_out(model: am.HookedModel, given: Any) -> tuple[list[str], list[str]]:
        notes: list[str] = []
        return list(TokenPaths.reducers(model, model.encode(given), notes)), notes

    assert left_out(demo, "Anna sang.") == (["drift", "flow"], [])
    ids = models.token_ids("llama", 1)
    assert left_out(models.hooked("llama"), ids)[0][:2] == ["drift", "flow"]
    names, (note,) = left_out(models.hooked("t5"), {"input_ids": ids, "decoder_input_ids": ids})
    assert names == [] and note.startswith("The path of each token through the layers is omitted")
    monkeypatch.setattr(module, "MAX_SCAN", 100)
    names, (note,) = left_out(demo, TEXT)
    assert names == ["flow", "segments"] and note.endswith("run attnmech drift.")


def test_the_report_has_the_sections_and_they_follow_the_query(demo: am.HookedModel) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "OTHER_TEXTS", 0)
        report = am.report(demo, TEXT)
    page = report.to_html()
    for name in ("token-drift", "token-flow", "token-segments"):
        assert f'id="{name}-section"' in page
    assert "am.attention_flow(model, text, method=&#34;norm_residual&#34;).sources_of({query})" in page
    assert len(page) < 8e6
    flow = am.attention_flow(demo, TEXT, "norm")
    assert report.value_norms is not None and flow.head_maps is not None
    carried = report.pattern * report.value_norms[..., None, :]
    torch.testing.assert_close(carried, flow.head_maps, rtol=1e-4, atol=1e-6)
