"""The page of an image or a recording shows the input itself with the attention of a row, in the right words."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import pytest
import senses
import torch
from browser import WHOLE, opening
from torch import nn

import attnmech as am
from attnmech.basics.nouns import HEARD, IMAGE, INPUT, SOUND, TEXT, Nouns
from attnmech.draw.chart import ByChoice, Chart
from attnmech.draw.page import Page
from attnmech.errors import InputError
from attnmech.pages.report import sense_section


@cache
def page(name: str) -> str:
    return am.report(senses.hooked(name), senses.inputs_of(name, 1)).to_html()


def prose(html: str) -> str:
    """The readable text of a page, without scripts, code, and the tables of checks."""
    html = re.sub(r"<(script|style|pre|table)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", html)


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "wav2vec2", "ast"])
def test_nothing_is_called_text_or_token(name: str) -> None:
    said = prose(page(name))
    assert not re.findall(r"[^.]{0,40}\b(?:texts?|tokens?)\b[^.]{0,40}", said)
    wanted = ("image", "patch") if name in senses.IMAGES else ("recording", "frame")
    assert all(word in said for word in wanted)


@pytest.mark.browser
def test_what_views_say_is_said_of_patches(chromium: Any, tmp_path: Path) -> None:
    with opening(chromium, page("vit"), tmp_path / "vit.html", **WHOLE) as opened:
        said = " ".join(opened.locator("section:not(.table)").all_inner_texts())
    assert not re.findall(r"[^.]{0,40}\btokens?\b[^.]{0,40}", said)
    assert "hide the first position" in said and "query patches attend" in said


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "wav2vec2", "ast", "whisper_encoder"])
def test_the_figure_shows_the_row_that_is_chosen(name: str) -> None:
    model, given = senses.hooked(name), senses.inputs_of(name, 1)
    acts = model.run(given, points=["pattern"])
    pattern = torch.stack([acts["pattern", layer][0] for layer in range(2)]).numpy()
    section = sense_section(model, acts.batch, pattern, "call")
    assert section is not None
    figure = next(iter(section.figures.values())).figure(layer=1, head=2, query=3)
    shown = [place for place, label in enumerate(acts.batch.tokens[0]) if "," in label or label.endswith(" s")]
    values = figure.data[0].z if name in senses.IMAGES else figure.data[0].y
    assert np.allclose(np.array(values, dtype=float), pattern[1, 2, 3, shown])
    labels = [acts.batch.tokens[0][place] for place in shown]
    if name in senses.IMAGES:
        places = zip(figure.data[0].y, figure.data[0].x, strict=True)
        assert [f"{row - 0.5:.0f},{column - 0.5:.0f}" for row, column in places] == labels
    else:
        assert [float(label.split(" s")[0]) for label in labels] == list(figure.data[0].x)
        assert figure.data[1].type == "heatmap"
    json.dumps(figure.to_plotly_json(), default=str)


def pages_of(report: am.results.Report, monkeypatch: pytest.MonkeyPatch) -> dict[str, Page]:
    """The text on the pages of a report's stacks, before conversion to HTML."""
    pages: dict[str, Page] = {}
    monkeypatch.setattr("attnmech.pages.result.render_page", lambda page, **_: pages.update({report.stack: page}) or "")
    monkeypatch.setattr(
        "attnmech.pages.result.render_parts",
        lambda parts, texts, stacks, **_: pages.update({stack: page for (_, stack), page in parts.items()}) or "",
    )
    report.to_html()
    return pages


def shown_words(part: Any, name: str = "") -> Iterator[str]:
    """The titles, legends and hover boxes of a figure, without the labels of positions."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from shown_words(value, key)
    elif isinstance(part, str) and name in ("text", "name", "hovertemplate", "title"):
        yield part.replace("%{text}", "")


def written_on(page: Page, leaving_out: str = "") -> str:
    """The sentences, headings and figures' words of a page, except those of one section."""
    words: list[Any] = [
        page.headline,
        *page.more,
        *(number.label for number in page.heads.numbers),
        *page.brief.values(),
        *(row.label for row in page.facts),
    ]
    for section in (section for section in page.sections if section.anchor != leaving_out):
        words += [section.heading, section.contents, section.reading, section.finding, section.caveat]
        words += [word for choice in section.choices for word in (choice.label, *choice.words)]
        for figure in section.figures.values():
            drawn = figure.template if isinstance(figure, Chart) else figure
            if isinstance(drawn, go.Figure):
                drawn = drawn.to_plotly_json()
                drawn["layout"].pop("template")
                words += shown_words(drawn)
    texts = (word.values.flat if isinstance(word, ByChoice) else [word] for word in words)
    return "\n".join(str(text) for several in texts for text in several)


@pytest.mark.parametrize("name", ["vit", "dinov3", "wav2vec2", "ast", "own"])
def test_no_sentence_or_figure_speaks_of_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "own":
        torch.manual_seed(0)
        module = nn.Transformer(12, 4, 1, 2, 20, dropout=0.0, batch_first=True).eval()
        example = (torch.randn(1, 7, 12), torch.randn(1, 5, 12))
        report = am.report(am.load(module, example=example), example)
    else:
        report = am.report(senses.hooked(name), senses.inputs_of(name, 1))
    for page in pages_of(report, monkeypatch).values():
        assert not re.findall(r".{0,40}\b(?:text|token)s?\b.{0,40}", written_on(page))


@pytest.mark.parametrize("name", ["vit", "dinov3", "wav2vec2"])
def test_all_nouns_come_from_one_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = am.report(senses.hooked(name), senses.inputs_of(name, 1))
    made_up = replace(report, nouns=Nouns("zork", "blip", "blips", "spot"))
    (page,) = pages_of(made_up, monkeypatch).values()
    words = written_on(page, leaving_out="picture" if name in senses.IMAGES else "spectrogram")
    assert not re.findall(r".{0,40}\b(?:texts?|tokens?|images?|patch|patches|recordings?|frames)\b.{0,40}", words)
    assert "first spot" in words and "another blip" in words and "along the zork" in words


def test_every_kind_of_input_has_its_nouns() -> None:
    assert [nouns.first for nouns in (TEXT, IMAGE, SOUND, INPUT)] == ["first token", *["first position"] * 3]
    assert [nouns.query_token for nouns in (TEXT, IMAGE, HEARD)] == ["query token", "query patch", "query token"]
    assert [nouns.key_token for nouns in (TEXT, IMAGE, HEARD)] == ["key token", "key patch", "key frame"]
    assert [nouns.both_texts for nouns in (TEXT, INPUT, HEARD)] == ["two texts", "two inputs", "text and the recording"]
    assert [nouns.key_text for nouns in (TEXT, INPUT, HEARD)] == ["encoder's text", "encoder's input", "recording"]


def test_a_report_of_too_many_frames_is_refused() -> None:
    with pytest.raises(InputError, match="at most 800 patches or frames; got"):
        am.report(senses.hooked("wav2vec2"), torch.randn(1, 9000, generator=torch.Generator().manual_seed(0)))
