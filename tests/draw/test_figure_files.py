"""Figures in files: size, fonts, colours cell by cell, and the errors if no file can be made."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest
from browser import CHROMIUM
from comparing import refuses
from PIL import Image

from attnmech import draw
from attnmech.draw import embed, figure_files
from attnmech.draw.figure_files import _on_paper
from attnmech.draw.head_maps import SIGNED_COLOURS
from attnmech.errors import OutputError

HOSTILE = "</title><script>window.owned=1</script> & <b>layer 2</b>"
SVG = "{http://www.w3.org/2000/svg}"
EFFECTS = np.array([[-4.0, 1.0, 2.0], [3.0, np.nan, 0.5]])


def drawn() -> go.Figure:
    return draw.effect_map(EFFECTS, label="nats", layers=[3, 5])


def width_of(pdf: bytes) -> float:
    (box,) = re.findall(rb"/MediaBox \[([^\]]+)\]", pdf)
    return float(box.split()[2]) / 72 * 25.4


@pytest.mark.browser
def test_a_pdf_has_the_width_of_a_column_one_page_and_its_fonts(chromium: Any, tmp_path: Path) -> None:
    pdf = draw.save_figure(drawn(), tmp_path / "map.pdf", title=HOSTILE).read_bytes()
    assert width_of(pdf) == pytest.approx(85, abs=0.4)
    assert pdf.count(b"/FontFile2") == 2  # the fonts of the figure and of its title, embedded
    assert [path.name for path in tmp_path.iterdir()] == ["map.pdf"]


@pytest.mark.browser
def test_an_svg_has_a_shape_in_the_colour_of_each_cell(chromium: Any, tmp_path: Path) -> None:
    root = ElementTree.fromstring(draw.save_figure(drawn(), tmp_path / "map.svg", title=HOSTILE).read_text())
    assert root.get("width") == "85mm"
    title, *_ = (each for each in root if each.tag == f"{SVG}text")
    assert " ".join(title.itertext()) == HOSTILE  # wrapped to the lines it needs
    (maps,) = (each for each in root.iter(f"{SVG}g") if each.get("class") == "hm")
    found = {}
    for path in maps.iter(f"{SVG}path"):
        fill = re.search(r"fill: ?rgb\((\d+), ?(\d+), ?(\d+)\)", path.get("style", ""))
        assert fill is not None
        for x, y in re.findall(r"M([\d.]+),([\d.]+)", path.get("d", "")):
            found[float(y), float(x)] = [int(each) for each in fill.groups()]
    assert len(found) == 5  # NaN has none
    rows, columns = (sorted({place[axis] for place in found}) for axis in (0, 1))
    at = np.linspace(-4, 4, len(SIGNED_COLOURS))
    hexes = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in SIGNED_COLOURS])
    for (y, x), colour in found.items():
        value = EFFECTS[rows.index(y), columns.index(x)]
        np.testing.assert_allclose(colour, [np.interp(value, at, hexes[:, part]) for part in range(3)], atol=1.5)


@pytest.mark.browser
def test_a_png_of_a_slide_says_how_large_it_is(chromium: Any, tmp_path: Path) -> None:
    assert asyncio.get_running_loop() is not None  # in the tests' browser: as in a notebook
    with Image.open(draw.save_figure(drawn(), tmp_path / "slide.png", size="slide")) as picture:
        assert picture.size == (1920, 1080)
        assert picture.info["dpi"] == pytest.approx((144, 144), abs=0.1)
        assert picture.convert("RGB").getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.browser
def test_a_view_without_its_controls(chromium: Any, tmp_path: Path) -> None:
    pattern = np.array([[[[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.1, 0.2, 0.7]]]])
    view = draw.sentence_view(pattern, ["Hi", HOSTILE, " !"], layers=[3]).of_model("demo")
    assert view._full_title == "Sentence view · layer 3, head 0 · demo"
    pdf = view.save_figure(tmp_path / "lines.pdf", size="double").read_bytes()
    assert width_of(pdf) == pytest.approx(178, abs=0.4)
    assert b"/FontFile2" in pdf


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="no poppler")
def test_a_saved_map_says_what_its_deepest_colour_stands_for(chromium: Any, tmp_path: Path) -> None:
    view = draw.attention_pattern(np.array([[0.5, 0.0], [0.25, 0.125]]), ["<b>", "c"])
    pdf = view.save_figure(tmp_path / "map.pdf")
    text = subprocess.run(["pdftotext", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    assert view.finding == "The deepest colour is an absolute value of 0.5; white is 0."
    assert view.finding in " ".join(text.split())


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="no poppler")
@pytest.mark.parametrize("size", ["column", "double"])
def test_lines_of_a_file_end_at_their_tokens(chromium: Any, tmp_path: Path, size: str) -> None:
    tokens = [f"token{number}" for number in range(40)]
    view = draw.sentence_view(np.eye(40)[None, None], tokens, layers=[0])
    pdf = view.save_figure(tmp_path / "lines.pdf", size=size)
    boxes = subprocess.run(["pdftotext", "-bbox", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    labels: dict[str, float] = {}
    for top, bottom, word in re.findall(r'yMin="([\d.]+)" xMax="[\d.]+" yMax="([\d.]+)">(token\d+)<', boxes):
        labels[word] = (float(top) + float(bottom)) / 2
    subprocess.run(["pdftoppm", "-r", "288", "-png", "-singlefile", str(pdf), str(tmp_path / "page")], check=True)
    with Image.open(tmp_path / "page.png") as picture:
        grey = np.asarray(picture.convert("L"), float)
    dark = np.flatnonzero(grey[:, int(0.35 * grey.shape[1])] < 128)
    runs = np.split(dark, np.flatnonzero(np.diff(dark) > 1) + 1)
    lines = [float(run.mean()) / 4 for run in runs if len(run) < 20][-40:]
    assert lines == pytest.approx([labels[token] for token in tokens], abs=2.0)


def test_no_text_is_too_small_and_all_is_ink_on_white() -> None:
    figure = go.Figure(go.Heatmap(z=[[1]], textfont={"size": 6}, colorbar={"tickfont": {"size": 14}}))
    found = _on_paper(figure.to_plotly_json())
    assert found["data"][0]["textfont"]["size"] == 10.5
    assert found["data"][0]["colorbar"]["tickfont"]["size"] == 14
    assert found["layout"]["font"]["size"] * 0.75 * 7 / 9 == 7  # pt of a column's text
    assert found["layout"]["paper_bgcolor"] == "#ffffff"


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "map.pdf"
    with pytest.raises(OutputError, match=r"saved as \.pdf, \.png, \.svg; got map\.jpg"):
        draw.save_figure(drawn(), tmp_path / "map.jpg")
    refuses("`size` must be one of column, double, slide; got 'poster'", draw.save_figure, drawn(), path, size="poster")
    refuses("there is no folder", draw.save_figure, drawn(), tmp_path / "none" / "map.pdf", error=OutputError)
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-browser"))
    with pytest.raises(OutputError, match=r"BROWSER_PATH must name a browser executable .*; got .*no-browser"):
        draw.save_figure(drawn(), path)
    monkeypatch.delenv("BROWSER_PATH")
    monkeypatch.setattr(figure_files, "find_spec", lambda name: None)
    with pytest.raises(OutputError, match=r"pip install 'attnmech\[figures\]', and Chromium or Chrome"):
        draw.save_figure(drawn(), path)
    assert list(tmp_path.iterdir()) == []


def test_the_svg_of_a_view_needs_poppler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = draw.sentence_view(np.ones((1, 1, 1, 1)), ["Hi"], layers=[0])
    monkeypatch.setattr(embed.shutil, "which", lambda name: None)
    with pytest.raises(OutputError, match=r"apt install poppler-utils\); or write a \.pdf file"):
        view.save_figure(tmp_path / "view.svg")


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("pdftocairo") is None, reason="no poppler")
def test_the_svg_of_a_view_is_made_of_its_pdf(chromium: Any, tmp_path: Path) -> None:
    view = draw.sentence_view(np.ones((1, 1, 1, 1)), ["Hi"], layers=[0])
    root = ElementTree.parse(view.save_figure(tmp_path / "view.svg")).getroot()
    assert root.tag == f"{SVG}svg"
    assert float(root.get("width", "0").removesuffix("pt")) == pytest.approx(85 / 25.4 * 72, abs=1)


def test_where_there_is_no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("playwright")
    monkeypatch.setattr(figure_files, "NAMES", ())
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "none"))
    refuses("install Chromium or Chrome", draw.save_figure, drawn(), tmp_path / "map.pdf", error=OutputError)


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM.exists(), reason="no browser")
def test_a_browser_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "map.svg"
    path.write_text("old")
    monkeypatch.setenv("BROWSER_PATH", "/bin/false")
    refuses("the browser /bin/false failed", draw.save_figure, drawn(), path, error=OutputError)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
