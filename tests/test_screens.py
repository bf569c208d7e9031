"""Screenshots of the report and of every view at two widths, in `.screenshots/`, for people to inspect.

The tests check that nothing is wider than the screen, nothing logs an error, and nothing is fetched.
The pages contain difficult text: hostile names, right-to-left writing, emoji, a thousand tokens.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from browser import WHOLE, opening

import attnmech as am
from attnmech.demo.text import PARAGRAPH

pytestmark = pytest.mark.browser

SCREENS = Path(__file__).parents[1] / ".screenshots"

HARD = "Anna sang, שלום עולם, 👩‍👩‍👧 of <img src=x onerror=window.owned=1>\n\tand $x$ &amp; </script>"


@cache
def demo(*points: str) -> am.results.Activations:
    return models.demo().run([HARD, PARAGRAPH], points=list(points))


def long_pattern(view: str) -> Any:
    acts = models.demo().run(torch.randint(300, 2000, (1, 1000)), points=[("pattern", 2)])
    return acts.show("pattern", layer=2, view=view)


VIEWS: dict[str, Callable[[], Any]] = {
    "model": lambda: demo("pattern").show("pattern", text=1),
    "sentence": lambda: demo("pattern").show("pattern", layer=2, head=6, text=1, view="sentence"),
    "sentence-hard": lambda: demo("pattern").show("pattern", layer=2, head=6, view="sentence"),
    "token-graph": lambda: demo("pattern").show("pattern", layer=2, head=6, view="token_graph"),
    "attention-heads": lambda: demo("pattern").show("pattern", layer=2),
    "attention-pattern": lambda: demo("scores").show("scores", layer=2, head=6),
    "colored-tokens": lambda: demo("pattern").show("pattern", layer=2, head=6, query=9),
    "colored-tokens-multi": lambda: demo("pattern").show("pattern", layer=2, query=9),
    "token-log-probs": lambda: demo("logits").show("logits"),
    "text-neuron-activations": lambda: demo("z").show("z", layer=2),
    "model-1000": lambda: long_pattern("model"),
    "sentence-1000": lambda: long_pattern("sentence"),
    "token-graph-1000": lambda: long_pattern("token_graph"),
    "bert": lambda: models.hooked("bert").run(models.token_ids("bert")[:1], points=["pattern"]).show("pattern"),
    "cross-attention": lambda: (
        models.hooked("t5")
        .run(models.inputs_of("t5"), points=["cross.pattern"])
        .show("cross.pattern", view="token_graph")
    ),
    "effects": lambda: am.ablate_heads(models.demo(), [PARAGRAPH, "Anna sang of shells."]),
    "focus": lambda: am.attention_focus(models.demo(), HARD),
    "joint-embedding": lambda: am.joint_embedding(models.demo(), [HARD, PARAGRAPH], dims=3),
    "updates": lambda: am.residual_updates(models.demo(), HARD),
}


@cache
def page_of(name: str, folder: Path) -> str:
    return str(VIEWS[name]().to_html())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    SCREENS.mkdir(exist_ok=True)
    return tmp_path_factory.mktemp("screens")


def photograph(page: Any, name: str, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.owned") is None
    page.screenshot(path=SCREENS / f"{name}-{width}.png", full_page=True)


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_fits_the_screen(chromium: Any, folder: Path, name: str, width: int) -> None:
    html = page_of(name, folder)
    with opening(
        chromium, html, folder / f"{name}.html", width=width, ready="[data-shown] > *, html[data-ready]"
    ) as page:
        page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        assert page.locator("text=could not be drawn").count() == 0
        photograph(page, name, width)


@cache
def report_of(model: str) -> str:
    if model == "demo":
        return am.report(models.demo(), HARD).to_html()
    words = (
        "[PAD]",
        "[UNK]",
        "[BOS]",
        "שלום",
        "עולם",
        "👩‍👩‍👧",
        "</script><img src=x onerror=window.owned=1>",
        "a",
        "word",
    )
    hooked = am.load(models.fresh(model), tokenizer=models.tokenizer(words=words))
    hooked.name = "<img src=x onerror=window.owned=1> שלום"
    return am.report(hooked, torch.tensor([[3, 4, 5, 3, 4, 6, 7, 8, 2]])).to_html()


@pytest.mark.parametrize(("model", "width"), [("demo", 1280), ("demo", 390), ("bert", 390), ("bloom", 1280)])
def test_a_report_fits_the_screen(chromium: Any, folder: Path, model: str, width: int) -> None:
    with opening(chromium, report_of(model), folder / f"{model}.html", width=width, **WHOLE) as page:
        photograph(page, f"report-{model}", width)


@cache
def results() -> list[Any]:
    """One result of every kind that has a figure."""
    model, texts = models.demo(), ["Anna sang of shells.", "Tom gave an old anchor to Clara."]
    clean, corrupted = (
        "When Anna and Tom came to the harbour, Tom gave a shell to",
        "When Anna and Tom came to the harbour, Anna gave a shell to",
    )
    few: list[tuple[int, int]] = [(1, 4), (2, 6), (0, 0)]
    return [
        am.decompose_scores(model, texts[0]),
        am.decompose_by_source(model, texts[0]),
        am.attention_focus(model, texts),
        am.residual_updates(model, texts[0]),
        am.ablate_heads(model, texts, heads=few),
        am.null_attention(model, texts, heads=few),
        am.patch(model, clean, corrupted, heads=few, answers=" Anna", against=" Tom"),
        am.head_importance(model, texts),
        am.joint_embedding(model, texts, layers=[1, 2]),
        am.ablate_pairs(model, texts, [(few[0], few[1])]),
        am.prune_heads(model, texts, heads=few, steps=2),
        model.certificate,
    ]


@pytest.mark.parametrize(("background", "ink"), [("white", "black"), ("#111111", "white")])
def test_every_result_shows_itself_in_a_notebook(chromium: Any, tmp_path: Path, background: str, ink: str) -> None:
    found = results()
    shown = [result._repr_html_() for result in found]
    head = f"<!doctype html><meta charset=utf-8><body bgcolor={background} text={ink}>"
    with opening(chromium, head + "".join(f"<div>{html}</div>" for html in shown), tmp_path / "notebook.html") as page:
        page.wait_for_function(
            "[...document.querySelectorAll('div.attnmech[id]')].every(each => 'control' in each)", timeout=60000
        )
        assert page.locator("text=could not be drawn").count() == 0
        for result, html in zip(found, shown, strict=True):
            assert "<table" in html
            if hasattr(result, "plot"):
                assert 'class="attnmech" id="' in html, type(result).__name__
        photograph(page, f"results-{ink}", 1280)


def test_a_report_shows_itself_in_a_notebook(chromium: Any, tmp_path: Path) -> None:
    html = am.report(models.demo(), "Anna sang.")._repr_html_()
    with opening(chromium, f"<!doctype html><meta charset=utf-8>{html}", tmp_path / "notebook.html") as page:
        frame = page.frame_locator("iframe")
        frame.locator("html[data-whole]").wait_for(state="attached")
        frame.locator("#head").select_option("3")
        assert "H3: " in frame.locator("#self-focus-finding").inner_text()
