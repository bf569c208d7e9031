import inspect
from pathlib import Path
from typing import Any

import pytest

import attnmech as am
from attnmech.errors import InputError, OutputError
from tests import models

CLASSES = [kind for kind in (getattr(am.results, name) for name in dir(am.results)) if inspect.isclass(kind)]
PAGED = [kind for kind in (*CLASSES, am.draw.View) if hasattr(kind, "to_html") or hasattr(kind, "write_html")]


@pytest.mark.parametrize("kind", PAGED, ids=lambda kind: kind.__name__)
def test_to_html_returns_and_write_html_writes(kind: Any) -> None:
    returns, writes = inspect.signature(kind.to_html), inspect.signature(kind.write_html)
    assert (returns.return_annotation, writes.return_annotation) == (str, Path)
    options = list(returns.parameters.values())[1:]
    assert all(option.kind is option.KEYWORD_ONLY for option in options)
    assert [parameter.name for parameter in writes.parameters.values()][1:] == ["path", *(o.name for o in options)]
    for call in (lambda: kind.to_html(None, "page.html"), lambda: kind.to_html(None, path="page.html")):
        with pytest.raises(InputError, match=r"use write_html\(path\)"):
            call()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_save_writes_numbers(kind: Any) -> None:
    """`load_result` reads everything that has `save`; a report only has a page."""
    assert hasattr(kind, "save") == issubclass(kind, am.results.Result)


def test_the_pages(tmp_path: Path) -> None:
    split = am.decompose_scores(models.demo(), ["Anna sang.", "Tom gave a shell."])
    effects = am.ablate_heads(models.demo(), "Anna sang of shells.", heads=[(0, 1)])
    view = models.demo().run("Anna sang.", points=["pattern"]).show("pattern", layer=2)
    for thing in (split, effects, view, am.report(models.demo(), "Anna sang.")):
        path = thing.write_html(str(tmp_path / "page.html"))
        assert path == tmp_path / "page.html"
        assert path.read_text("utf-8") == thing.to_html()
        assert thing.to_html().startswith("<!doctype html>")
        with pytest.raises(OutputError, match="there is no folder"):
            thing.write_html(tmp_path / "nowhere" / "page.html")
    second = split.write_html(tmp_path / "second.html", sequence=1).read_text("utf-8")
    assert second == split.to_html(sequence=1) != split.to_html()


def test_what_a_report_says_of_save() -> None:
    with pytest.raises(AttributeError, match=r"write its page with write_html\(path\), .* `report.focus.save\(path\)`"):
        am.report(models.demo(), "Anna sang.").save("report.safetensors")
    with pytest.raises(AttributeError, match="'Report' object has no attribute 'nothing'"):
        am.report(models.demo(), "Anna sang.").nothing
