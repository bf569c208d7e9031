"""The page of an image and of a recording: the thing itself, with a row's attention, in its own words."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import senses
import torch
from browser import opening

import attnmech as am
from attnmech.draw.wording import IMAGE, SOUND, TEXT
from attnmech.pages.senses import sense_section


@cache
def page(name: str) -> str:
    given = senses.inputs_of(name, 1)
    return am.report(senses.hooked(name), given).to_html()


def prose(html: str) -> str:
    """What is read on a page: without scripts, code, and the tables of checks."""
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
    with opening(chromium, page("vit"), tmp_path / "vit.html", height=16_000, ready="html[data-whole]") as opened:
        said = " ".join(opened.locator("section:not(.table)").all_inner_texts())
    assert not re.findall(r"[^.]{0,40}\btokens?\b[^.]{0,40}", said)
    assert "hide the first position" in said and "query patches look" in said


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


def test_words() -> None:
    assert IMAGE("3 texts; a text. Tokens attend to a token or the first token.") == (
        "3 images; an image. Patches attend to a patch or the first position."
    )
    assert SOUND("The text has one token; the tokenizer is not changed.") == (
        "The recording has one frame; the tokenizer is not changed."
    )
    assert TEXT("a text") == "a text"


def test_a_report_of_too_many_frames_is_refused() -> None:
    with pytest.raises(am.InputError, match="up to 800 patches or frames; got"):
        am.report(senses.hooked("wav2vec2"), torch.randn(1, 9000, generator=torch.Generator().manual_seed(0)))
