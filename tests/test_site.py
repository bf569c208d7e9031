"""The documentation, as built into the folder that ATTNMECH_SITE names: its links, and its pages without a network."""

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

SITE = Path(os.environ.get("ATTNMECH_SITE", "no site")).resolve()
pytestmark = pytest.mark.skipif("ATTNMECH_SITE" not in os.environ, reason="no documentation was built")

SHOWN = (
    "index", "first_hour", "made/quickstart", "recipes/why", "coming_from/transformerlens", "formulas",
    "made/reference/index", "made/reference/ablate_heads", "made/reference/decompose_scores", "benchmarks",
)  # fmt: skip
"""The pages to open in a browser, one of each kind."""


def pages() -> dict[Path, BeautifulSoup]:
    return {path: BeautifulSoup(path.read_text("utf-8"), "html.parser") for path in sorted(SITE.rglob("*.html"))}


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_a_network() -> None:
    read = pages()
    anchors = {path: {each["id"] for each in page.select("[id]")} for path, page in read.items()}
    assert len(read) > 50
    wrong = []
    for path, page in read.items():
        wrong += [str(each)[:90] for each in page.select("script[src], link[href], img[src], iframe[src]")
                  if urlsplit(each.get("src") or each["href"]).scheme in ("http", "https")]  # fmt: skip
        for link in page.select("a[href]"):
            parts = urlsplit(link["href"])
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors.get(target, set())):
                wrong.append(f"{path.relative_to(SITE)}: {link['href']}")
    assert not wrong, wrong


def test_every_public_name_is_in_the_reference() -> None:
    import attnmech as am

    top = {name for name in am.__all__ if not inspect.ismodule(getattr(am, name))}
    below = {
        f"{module}.{name}"
        for module in ("architecture", "errors", "reducers", "results")
        for name in dir(getattr(am, module))
        if name[0].isupper() and not name.isupper() and name not in top
    }
    ids = {element["id"] for page in pages().values() for element in page.select("[id^='attnmech.']")}
    assert {f"attnmech.{name}" for name in top | below} <= ids


def test_the_text_for_language_models_names_every_call_and_its_links_lead_somewhere() -> None:
    import attnmech as am

    short, full = ((SITE / name).read_text("utf-8") for name in ("llms.txt", "llms-full.txt"))
    assert short.startswith("# attnmech\n\n> ") and f"Version {am.__version__}." in short
    calls = {name for name in am.__all__ if inspect.isfunction(getattr(am, name))}
    assert all(f"`am.{name}(" in short and f"## am.{name}(" in full for name in calls)
    results = {name for name in am.results.__all__ if inspect.isclass(getattr(am.results, name))}
    assert {name for name in results if f"`results.{name}`: " not in short} == set()
    links = re.findall(r"\]\(([^)]+)\)", short)
    assert len(links) > 50 and all((SITE / link).is_file() for link in links)
    assert short in full and full.count("\n## am.") >= len(calls)
    assert len(short) < 60_000


@contextmanager
def visiting(chromium: Any, name: str, *, width: int = 1280, dark: bool = False) -> Iterator[Any]:
    """A page of the site in an offline browser; fails where it logs an error or asks for anything beyond the site."""
    complaints: list[str] = []
    scheme = "dark" if dark else "light"
    context = chromium.browser.new_context(offline=True, viewport={"width": width, "height": 800}, color_scheme=scheme)

    def only_the_site(route: Any) -> None:
        if route.request.url.startswith(SITE.as_uri()):
            route.continue_()
        else:
            complaints.append(f"request for {route.request.url}")
            route.abort()

    context.route("**/*", only_the_site)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    file, _, query = name.partition("?")
    page.goto((SITE / file).as_uri() + (f"?{query}" if query else ""))
    yield page
    context.close()
    assert complaints == [], complaints


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", SHOWN)
def test_a_page_opens_without_a_network_and_fits(chromium: Any, name: str, width: int) -> None:
    with visiting(chromium, f"{name}.html", width=width, dark=width == 390) as page:
        page.wait_for_function("[...document.querySelectorAll('div.attnmech[id]')].every(each => 'control' in each)")
        assert "could not be drawn" not in page.inner_text("body")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(each) for each in dark[4:-1].split(",")) < 384) == (width == 390)


@pytest.mark.browser
def test_the_search_finds_a_name_without_a_server(chromium: Any) -> None:
    with visiting(chromium, "search.html?q=ablate_heads") as page:
        page.wait_for_selector("ul.search a")
        assert any("ablate_heads" in each for each in page.locator("ul.search a").all_inner_texts())


def test_every_result_with_figures_shows_them() -> None:
    """All results, except those whose figures need a model that is missing, and the classes that results share."""
    import attnmech as am

    read = pages()
    drawn = {
        each["id"].split("-")[0] for page in read.values() for each in page.select("div.output > div.attnmech[id]")
    }
    results = {name for name in am.results.__all__ if hasattr(getattr(am.results, name), "plot")}
    assert results - drawn == {"KVPatchEffects", "Table", "TextResult"}
