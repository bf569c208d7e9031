"""In a real, offline browser: choices reach every figure, and hostile text does not run."""

import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import WHOLE, opening

from attnmech.draw.chart import ByChoice, Chart, Slot
from attnmech.draw.numbers import ScoreNumbers
from attnmech.draw.section import Section
from attnmech.draw.text import shorten, visible_token

from .conftest import FULL_START, HOSTILE, START, TOKENS, choose_by_address
from .conftest import page as page_of

pytestmark = pytest.mark.browser


def traces(page: Any, figure: str) -> dict[str, dict[str, Any]]:
    """The data arrays that plotly draws, by each trace's `meta`."""
    drawn = page.evaluate(
        """id => document.getElementById(id).data.map(({meta, x, y, z, a, b, c, customdata}) =>
             ({meta, x, y, z, a, b, c, customdata}))""",
        figure,
    )
    return {trace["meta"]: trace for trace in drawn}


def drawn_at(page: Any, figure: str, *paths: str) -> list[Any]:
    """The values of a figure's properties on the page."""
    drawn = page.evaluate(
        """([id, paths]) => paths.map(path =>
             path.split(".").reduce((place, step) => place[step], document.getElementById(id)))""",
        [figure, paths],
    )
    return list(drawn)


def assert_alike(drawn: Any, expected: Any, place: str) -> None:
    """The same words, and the same numbers up to 16-bit rounding."""
    if isinstance(expected, np.ndarray) and expected.dtype.kind == "f":
        shown = np.array(drawn, dtype=float).reshape(expected.shape)
        np.testing.assert_allclose(shown, expected, rtol=1e-4, atol=1e-4, err_msg=place)
    elif isinstance(expected, float):
        assert drawn == pytest.approx(expected, rel=1e-4, abs=1e-4), place
    elif isinstance(expected, (list, np.ndarray)):
        assert len(drawn) == len(expected), place
        for one, other in zip(drawn, expected, strict=True):
            assert_alike(one, other, place)
    elif isinstance(expected, str) and re.fullmatch(r"[+−]\d+\.\d{3}", expected):
        one, other = (float(each.replace("−", "-")) for each in (drawn, expected))
        assert one == pytest.approx(other, abs=1.1e-3), place
    elif place.endswith("text") and isinstance(expected, str):  # the page breaks lines where its width ends
        assert drawn.replace("<br>", " ") == expected.replace("<br>", " "), place
    else:
        assert drawn == expected, place


def is_shown(figure: Chart, slot: Slot, chosen: dict[str, int]) -> bool:
    switch = ".".join([*slot.path.split(".")[:2], "visible"])
    return slot.path == switch or all(each.value(chosen) for each in figure.slots if each.path == switch)


CHOICES = [
    {"layer": 0, "head": 0, "rank": 0, "query": 6, "side": 0, "measure": 0, "against": 0, "split": 0},
    {"layer": 1, "head": 2, "rank": 3, "query": 3, "side": 1, "measure": 1, "against": 1, "split": 1},
    {"layer": 1, "head": 1, "rank": 4, "query": 1, "side": 0, "measure": 2, "against": 2, "split": 1},
    {"layer": 0, "head": 2, "rank": 1, "query": 0, "side": 1, "measure": 0, "against": 1, "split": 0},
]


@pytest.mark.parametrize("by", ["controls", "address"])
def test_the_page_fills_every_slot_and_sentence_as_python_does(
    opened_full: Any, all_sections: list[Section], by: str
) -> None:
    for chosen in CHOICES[1:2] if by == "controls" else (CHOICES[0], *CHOICES[2:]):
        if by == "address":
            choose_by_address(opened_full, address_of(opened_full, chosen))
        else:
            for name, index in chosen.items():
                if name == "query":
                    opened_full.click(f".token >> nth={index}")
                else:
                    opened_full.select_option(f"#{name}", index=index)
        assert slots_filled(opened_full, all_sections, chosen) > 100


def test_a_page_of_many_heads_holds_the_details_of_some(
    chromium: Any, view: ScoreNumbers, all_sections: list[Section], tmp_path: Path
) -> None:
    html = page_of(view, all_sections, detailed=[0, 4])
    with opening(chromium, html, tmp_path / "page.html", **WHOLE) as page:
        for chosen in (CHOICES[0], CHOICES[2]):  # heads 0 and 4, counted layer by layer
            choose_by_address(page, address_of(page, chosen))
            assert slots_filled(page, all_sections, chosen) > 100
            assert page.locator(".not-held").count() == 0
        choose_by_address(page, address_of(page, CHOICES[1]))
        section = page.locator("#score-shares-section")
        assert "holds this figure for 2 heads, not for L5H2" in section.inner_text()
        assert "layer=5, head=2" in section.locator("code").inner_text()
        assert not section.locator(".figure").first.is_visible()
        for key, chip in enumerate(page.locator("#tokens .token").all()):
            depth = float(chip.evaluate("chip => chip.style.getPropertyValue('--depth')"))
            assert depth**2 == pytest.approx(float(view.pattern[1, 2, 3, key]), abs=0.01)
        assert "holds this figure" not in page.inner_text("#magnitude-section")


def address_of(page: Any, chosen: dict[str, int]) -> str:
    values = {
        name: index if name == "query" else page.locator(f"#{name} option").nth(index).get_attribute("value")
        for name, index in chosen.items()
    }
    return "#tab=all&" + "&".join(f"{name}={value}" for name, value in values.items())


def slots_filled(page: Any, sections: list[Section], chosen: dict[str, int]) -> int:
    """Checks that all slots and sentences on the page have Python's values; returns the number of slots."""
    slots = 0
    for section in sections:
        for text, element in ((section.finding, "finding"), (section.reading, "reading")):
            if isinstance(text, ByChoice):
                assert page.text_content(f"#{section.anchor}-{element}") == str(text.at(chosen))
        for name, figure in section.figures.items():
            if isinstance(figure, Chart):
                seen = [slot for slot in figure.slots if is_shown(figure, slot, chosen)]
                drawn = drawn_at(page, name, *(slot.path for slot in seen))
                for slot, value in zip(seen, drawn, strict=True):
                    expected = slot.value(chosen)
                    if any(column.logarithmic for column in slot.columns):
                        np.testing.assert_allclose(np.array(value, dtype=float), expected, rtol=1e-3)
                    else:
                        assert_alike(value, expected, f"{name}: {slot.path}")
                slots += len(seen)
    return slots


def test_a_small_map_chooses_its_head_for_the_whole_page(opened: Any, view: ScoreNumbers) -> None:
    box = opened.locator("#model-view canvas").first.bounding_box()
    assert box["width"] > 0
    opened.evaluate("document.getElementById('model-view').control.choose({layer: 0, head: 0})")
    opened.focus("#model-view [tabindex='0']")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("Enter")
    assert [opened.input_value(f"#{name}") for name in ("layer", "head")] == ["5", "1"]
    drawn = traces(opened, "attention-map")["scores"]["z"]
    np.testing.assert_allclose(np.array(drawn, dtype=float), view.scores[1, 1], atol=1e-4)


def test_the_contents_lead_to_every_section(opened_low: Any) -> None:
    sections = opened_low.eval_on_selector_all("[id$='-section']", "all => all.map(one => one.id.slice(0, -8))")
    named = opened_low.eval_on_selector_all("nav a", "all => all.map(one => one.dataset.section)")
    assert sorted(named) == sorted({*sections} - {"text", "summary"})
    opened_low.click("nav summary")
    opened_low.click("nav a[data-section='concentration']")
    opened_low.wait_for_url("**&tab=model")
    assert 0 <= opened_low.locator("#concentration-section h2").bounding_box()["y"] < 200
    opened_low.click("nav summary")


def test_a_tab_shows_its_sections_and_the_choices_that_they_follow(opened_full: Any) -> None:
    def seen(kind: str) -> list[str]:
        visible = "all => all.filter(one => !one.closest('[hidden]')).map(one => one.id)"
        return list(opened_full.eval_on_selector_all(kind, visible))

    for tab, figures, controls in (
        ("look", ["model-view", "attention-map", "sentence-view", "token-graph"], []),
        ("why", ["row-ledger", "share-triangle", "share-bars", "key-terms"], ["rank-control", "split-control"]),
        ("write", list(UPDATE_FIGURES), ["side-control"]),
        ("model", ["expected-tokens", *FOCUS_FIGURES], []),
    ):
        opened_full.click(f"#tab-{tab}")
        assert seen("main .figure") == figures
        assert seen("#controls .control") == controls
        assert opened_full.get_attribute("[role=tab][aria-selected=true]", "id") == f"tab-{tab}"
        assert (f"tab={tab}" in opened_full.url) == (tab != "look")
    opened_full.keyboard.press("ArrowLeft")
    assert opened_full.get_attribute("[role=tab][aria-selected=true]", "id") == "tab-write"
    assert "tab-token" not in opened_full.inner_html("#tabs")


def test_a_figure_of_another_tab_shows_the_choice_once_its_tab_is_chosen(opened_full: Any) -> None:
    opened_full.click("#tab-look")
    opened_full.select_option("#head", "2")
    opened_full.click("#tab-write")
    opened_full.wait_for_function(
        """() => !document.querySelector("#magnitude.stale")
                 && document.getElementById("magnitude").data.map(({opacity}) => opacity).join() === "0.4,0.4,1\""""
    )
    opened_full.evaluate("history.back()")
    opened_full.wait_for_selector("#tab-look[aria-selected=true]")
    assert opened_full.input_value("#head") == "2"


# -- the heads -------------------------------------------------------------------------------------------------


def test_the_map_of_heads_shows_types_and_chooses_by_click_and_keys(opened: Any) -> None:
    cells = opened.locator(".heads-cell")
    assert cells.all_inner_texts() == ["", "", "I", "", "", "I"]
    assert opened.inner_text(".heads-legend").split() == ["I", "induction", "2"]
    cells.nth(2).click()
    assert (opened.input_value("#layer"), opened.input_value("#head")) == ("2", "2")
    assert opened.inner_text("#head-name") == "L2H2"
    assert opened.inner_text("#card-0").startswith("L2H2 </script>")
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("ArrowLeft")
    assert (opened.input_value("#layer"), opened.input_value("#head")) == ("5", "1")
    assert cells.nth(4).get_attribute("aria-selected") == "true"
    assert opened.evaluate("document.activeElement.ariaLabel") == "L5H1, no type claimed"
    assert opened.inner_text(".heads-sentence").startswith("L5H1 </script>")
    assert opened.evaluate("window.owned") is None


def test_the_map_of_heads_shows_a_number_and_pales_what_is_not_clear(opened: Any) -> None:
    opened.select_option("#colour", "effect")
    assert "colour=effect" in opened.url
    pale = opened.eval_on_selector_all(".heads-cell", "all => all.map(one => one.classList.contains('heads-pale'))")
    assert pale == [False, True, True, True, False, False]  # |values| of 2, NaN, 0, 1, 2, 3; clear above 1
    assert opened.inner_text(".heads-sentence").endswith("effect, nats: 2.")
    colours = opened.eval_on_selector_all(".heads-cell", "all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert colours[0] != colours[4]  # 2 and −2
    assert opened.inner_text(".heads-legend").split()[:2] == ["−3", "3"]


def test_the_headline_is_about_the_head_in_the_address_and_explains_its_terms(opened: Any) -> None:
    for layer, head in ((2, 1), (5, 2)):
        choose_by_address(opened, f"#layer={layer}&head={head}&tab=all")
        assert opened.inner_text("h1") == f"L{layer}H{head} {HOSTILE}: 3 nats" and not opened.evaluate("window.owned")
        assert opened.locator("h1 dfn").all_inner_texts() == ["nats"] and opened.get_attribute("h1 dfn", "data-means")


def test_a_scatter_of_two_numbers_has_a_point_for_each_head_that_has_both(opened: Any) -> None:
    opened.select_option("#across", "mass")
    opened.select_option("#up", "effect")
    assert opened.locator(".heads-grid").is_hidden()
    points = opened.eval_on_selector_all(
        ".heads-point", "all => all.map(one => [+one.getAttribute('cx'), +one.getAttribute('cy')])"
    )
    assert len(points) == 5  # one head has no number
    across, up = np.array(points).T
    assert np.corrcoef(across, up)[0, 1] == pytest.approx(1)  # effect = −mass, and SVG counts downwards
    opened.locator(".heads-point").nth(4).click()
    assert (opened.input_value("#layer"), opened.input_value("#head")) == ("5", "2")
    assert "across=mass&up=effect" in opened.url
    names = opened.locator(".heads-name").all_text_contents()
    assert "L5H2" in names and "L2H0" in names


def test_a_head_is_found_by_its_name_or_its_type(opened: Any) -> None:
    def pale() -> list[bool]:
        return list(
            opened.eval_on_selector_all(".heads-cell", "all => all.map(one => one.classList.contains('heads-pale'))")
        )

    search = opened.get_by_label("find a head")
    search.fill("previous")
    assert pale() == [True, True, False, True, True, False]
    search.press("Enter")
    assert (opened.input_value("#layer"), opened.input_value("#head")) == ("2", "2")
    search.fill("l5h1")
    search.press("Enter")
    assert (opened.input_value("#layer"), opened.input_value("#head")) == ("5", "1")
    search.fill("no such")
    assert not any(pale()), "a search without a match dims nothing"
    assert opened.text_content(".heads-found") == "No head or type matches “\u2068no such\u2069”."
    search.fill("")
    assert not any(pale()) and not opened.text_content(".heads-found")


def test_an_address_that_the_page_cannot_follow_shows_the_next_best(opened: Any) -> None:
    usual = START.removesuffix("&tab=all")
    for address, shown, said in (
        ("#layer=99&head=1&tab=all", START.replace("head=0", "head=1"), "This page has no layer 99; it shows the next"),
        ("#layer=99&head=-1&rank=x&query=1&owned=1", usual.replace("query=6", "query=1"), "This page has no"),
        ("#constructor=2&toString=2&__proto__=2&valueOf=2", usual, ""),
    ):
        choose_by_address(opened, START)
        assert opened.inner_text("#unknown") == "" and opened.evaluate("location.hash") == START
        opened.evaluate("address => { location.hash = address; }", address)
        opened.wait_for_url(f"**{shown}")
        assert opened.inner_text("#unknown").startswith(said)
    assert not opened.is_visible("#side")  # a page without updates has no side


def test_the_address_keeps_the_choice(opened_full: Any) -> None:
    def drawn() -> list[Any]:
        return [traces(opened_full, figure) for figure in ("attention-map", "orientation")]

    chosen = {"layer": "5", "head": "2", "rank": "3", "split": "means", "side": "target"}
    for name, value in chosen.items():
        opened_full.select_option(f"#{name}", value)
    opened_full.click(".token >> nth=4")
    address = "#" + "&".join(f"{name}={value}" for name, value in chosen.items()) + "&query=4"
    assert opened_full.evaluate("location.hash") == f"{address}&tab=all"
    before = drawn()
    opened_full.reload()
    opened_full.wait_for_selector("html[data-whole]", state="attached")
    assert drawn() == before
    assert {name: opened_full.input_value(f"#{name}") for name in chosen} == chosen
    assert opened_full.get_attribute('.token[aria-pressed="true"]', "title").startswith("token 4:")
    opened_full.evaluate("location.hash = '#side=both'")
    opened_full.wait_for_url(f"**{address}")


def test_calls_name_the_figure_and_the_choice(opened: Any, opened_full: Any) -> None:
    assert opened.locator("[data-call]").all_inner_texts()[-1] == "print()  # </script>"
    for name, value in (("layer", "5"), ("split", "biases"), ("side", "target")):
        opened_full.select_option(f"#{name}", value)
    place = "layer=5, head=0"
    assert opened_full.locator("[data-call]").all_inner_texts() == [
        f'scores(centre=None).plot("attention_map", {place})',
        'acts.show("pattern", view="sentence")',
        'acts.show("pattern", view="token_graph")',
        f'scores(centre=None).plot("row_ledger_mean", {place}, query=6)',
        f'scores(centre=None).show("score_shares", {place})',
        f'scores(centre=None).plot("key_terms", {place})',
        *(
            f'updates.plot("{name}_of_target", {place})'
            for name in ("magnitude", "orientation", "orientation_by_magnitude", "magnitude_by_position")
        ),
        *(f'focus.plot("{name}", {place})' for name in ("self_focus", "first_focus", "concentration")),
    ]
    opened_full.select_option("#split", "means")
    assert opened_full.inner_text("#score-shares-section code").startswith('scores(centre="mean").show(')


def test_a_page_begins_where_it_is_told_to(chromium: Any, page_html: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    start = '"start": {"layer": 2, "head": 0, "query": 6}'
    assert start in page_html
    html = page_html.replace(start, '"start": {"layer": 5, "head": 1, "query": 4}')
    for address, head in (("", 1), ("#head=2", 2)):
        with opening(chromium, html, path, address=address, ready="html[data-ready]") as page:
            assert page.evaluate("location.hash") == f"#layer=5&head={head}&rank=0&query=4"


def test_a_window_may_change_while_a_page_loads(chromium: Any, page_html: str, tmp_path: Path) -> None:
    """A notebook's frame grows with its page; here, as soon as the page listens."""
    path = tmp_path / "page.html"
    path.write_text(page_html, "utf-8")
    context = chromium.browser.new_context(offline=True)
    page, errors = context.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script(
        """const listen = window.addEventListener;
           window.addEventListener = (name, ...rest) => {
             listen.call(window, name, ...rest);
             if (name === "resize") dispatchEvent(new Event("resize"));
           };"""
    )
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    context.close()
    assert errors == []


@pytest.fixture(scope="module")
def visit_low(chromium: Any, full_page_html: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("page") / "page.html"
    with opening(chromium, full_page_html, path, address="#tab=all", ready="html[data-whole]") as page:
        yield page


@pytest.fixture
def opened_low(visit_low: Any) -> Any:
    """The page of figures 1 to 10, completely drawn on a screen of usual size."""
    choose_by_address(visit_low, FULL_START)
    visit_low.wait_for_selector(".stale", state="detached")
    return visit_low


@pytest.mark.parametrize("scrolls", ["window", "box in the page"])
def test_figures_off_the_screen_are_drawn_while_nothing_moves_and_never_show_another_head(
    opened_low: Any, scrolls: str
) -> None:
    stale = """() => [...document.querySelectorAll(".figure")].filter(one => one.data && one.firstElementChild
                 && getComputedStyle(one.firstElementChild).visibility === "hidden").map(one => one.id)"""
    page = opened_low
    assert page.eval_on_selector_all(".figure", "all => all.filter(one => one.data).length") == 12
    page.evaluate(
        """scrolls => {
             const box = document.querySelector("main").appendChild(document.createElement("div"));
             const moved = scrolls === "window" ? window : box;
             window.moving = setInterval(() => moved.dispatchEvent(new Event("scroll")), 20);
             window.rest = () => { clearInterval(window.moving); box.remove(); };
           }""",
        scrolls,
    )
    page.select_option("#head", "2")
    hidden = page.evaluate(stale)
    assert "magnitude" in hidden
    page.wait_for_timeout(300)
    assert page.evaluate(stale) == hidden
    page.evaluate("window.rest()")
    page.wait_for_function(f"() => ({stale})().length === 0", timeout=20000)
    opacity = page.evaluate("document.getElementById('magnitude').data.map(({opacity}) => opacity)")
    assert [head for head, each in enumerate(opacity[:3]) if each == 1] == [2]


UNDER_WAY = """document.getElementById("magnitude").data &&
    getComputedStyle(document.querySelector("#magnitude > *")).visibility === "hidden\""""
"""JavaScript: whether drawing this figure has begun while it is still hidden."""


@pytest.fixture
def half_drawn(chromium: Any, full_page_html: str, tmp_path: Path) -> Iterator[Any]:
    """A page that is scrolling since its figure of magnitudes was begun, with that figure in sight."""
    path = tmp_path / "page.html"
    with opening(chromium, full_page_html, path, address="#tab=all", ready="html[data-ready]") as page:
        page.evaluate(
            f"""() => new Promise((proceed) => {{
                 const look = () => {{
                   if (!({UNDER_WAY})) return;
                   seen.disconnect();
                   window.moving = setInterval(() => dispatchEvent(new Event("scroll")), 20);
                   dispatchEvent(new Event("scroll"));
                   document.getElementById("magnitude").scrollIntoView();
                   const inSight = new IntersectionObserver((entries) => {{ // after the page's own, which is older
                     if (!entries.at(-1).isIntersecting) return;
                     inSight.disconnect();
                     proceed();
                   }});
                   inSight.observe(document.getElementById("magnitude"));
                 }};
                 const seen = new MutationObserver(look);
                 seen.observe(document.getElementById("magnitude"), {{ attributes: true, childList: true }});
               }})"""
        )
        yield page


def test_a_figure_that_is_half_drawn_waits_until_scrolling_rests(half_drawn: Any) -> None:
    half_drawn.wait_for_timeout(300)
    assert half_drawn.evaluate(UNDER_WAY)
    assert half_drawn.locator("#magnitude .scatterlayer .trace").count() == 0
    half_drawn.evaluate("() => clearInterval(window.moving)")
    half_drawn.wait_for_function(f"() => !({UNDER_WAY})")
    assert half_drawn.locator("#magnitude .scatterlayer .trace").count() == 3


def test_a_half_drawn_figure_shows_a_choice_at_once(half_drawn: Any) -> None:
    half_drawn.select_option("#head", "2")
    assert not half_drawn.evaluate(UNDER_WAY)
    opacity = half_drawn.evaluate("document.getElementById('magnitude').data.map(({opacity}) => opacity)")
    assert opacity == [0.4, 0.4, 1]
    assert half_drawn.locator("#magnitude .scatterlayer .trace").count() == 3


def test_a_half_drawn_figure_off_the_screen_is_not_to_be_seen_with_the_head_before(half_drawn: Any) -> None:
    half_drawn.evaluate(
        f"""() => {{
             scrollTo(0, 0);
             window.wrong = 0;
             const look = () => {{
               const opacity = document.getElementById("magnitude").data.map(({{ opacity }}) => opacity);
               window.wrong += !({UNDER_WAY}) && opacity[2] !== 1;
               requestAnimationFrame(look);
             }};
             setTimeout(() => requestAnimationFrame(look), 200);
           }}"""
    )
    half_drawn.wait_for_timeout(100)
    half_drawn.select_option("#head", "2")
    half_drawn.wait_for_timeout(300)
    half_drawn.evaluate("() => clearInterval(window.moving)")
    half_drawn.wait_for_selector("html[data-whole]", state="attached")
    assert half_drawn.evaluate("window.wrong") == 0
    assert half_drawn.evaluate("document.getElementById('magnitude').data.at(-1).opacity") == 1


def test_a_half_drawn_figure_is_printed_whole(half_drawn: Any) -> None:
    half_drawn.emulate_media(media="print")
    half_drawn.wait_for_selector("html.printing")
    assert not half_drawn.evaluate(UNDER_WAY)
    assert half_drawn.locator("#magnitude .scatterlayer .trace").count() == 3
    width = half_drawn.evaluate("document.getElementById('magnitude')._fullLayout.width")
    assert width == half_drawn.evaluate("document.getElementById('magnitude').clientWidth")


def blank(page: Any) -> list[str]:
    """The figures in which nothing is drawn: no plotly data, no words, and only transparent canvases."""
    return list(
        page.eval_on_selector_all(
            ".figure",
            """all => all.filter(one => {
                 const inked = each => each.width && each.getContext("2d")
                   .getImageData(0, 0, each.width, each.height).data.some(Boolean);
                 const canvases = [...one.querySelectorAll("canvas")];
                 return !one.data && (!one.textContent.trim() || !canvases.every(inked));
               }).map(one => one.id)""",
        )
    )


def test_of_all_tabs_a_page_printed_at_once_has_every_figure(
    chromium: Any, full_page_html: str, view: ScoreNumbers, tmp_path: Path
) -> None:
    with opening(
        chromium, full_page_html, tmp_path / "page.html", ready="html[data-ready]", address="#tab=all"
    ) as page:
        page.evaluate(
            """addEventListener("afterprint", () => {
                 window.edges = document.querySelectorAll("#token-graph path").length;
                 window.printed = [...document.querySelectorAll(".figure")].filter(one => !one.data).map(one =>
                   [one.id, one.childElementCount]);
               }, {capture: true})"""
        )
        page.pdf(path=tmp_path / "page.pdf")
        printed = dict(page.evaluate("window.printed"))
        assert printed.keys() == {"model-view", "sentence-view", "token-graph", "expected-tokens"}
        assert all(printed.values()), printed
        assert page.evaluate("window.edges") == 2 * (view.pattern[0, 0] >= 0.1).sum()
        assert set(widths_beyond(page)) == {0}


def test_the_chosen_tab_is_printed(chromium: Any, full_page_html: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with opening(chromium, full_page_html, path, address="#tab=why", ready="html[data-ready]") as page:
        page.emulate_media(media="print")
        page.wait_for_selector("html.printing")
        shown = page.locator("section[data-tabs]").evaluate_all(
            "all => all.filter(one => !one.hidden).map(one => one.dataset.tabs)"
        )
        assert shown and set(shown) == {"why"}


def test_print_media_show_every_figure_and_no_bars(chromium: Any, full_page_html: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with opening(chromium, full_page_html, path, address="#tab=all", ready="html[data-ready]") as page:
        page.emulate_media(media="print")
        page.wait_for_selector("html.printing")
        assert blank(page) == [] and page.is_hidden("nav")
        for bar in ("#tabs", ".attnmech-sentence-heading"):
            assert page.locator(bar).evaluate("one => getComputedStyle(one).position") == "static"
        box = page.locator(".attnmech-sentence-box")
        assert box.evaluate("one => one.scrollHeight <= one.clientHeight")
        assert box.locator("canvas").bounding_box()["height"] >= 24 * len(TOKENS)
        page.emulate_media(media="screen")
        page.wait_for_selector("html:not(.printing)")
        assert page.is_visible("nav") and page.locator(".attnmech-printing").count() == 0
        assert widths_beyond(page) == [0] * 12
        for event, is_printing in (
            ("beforeprint", True),
            ("afterprint", False),
        ):  # of browsers without the media's event
            page.evaluate("event => dispatchEvent(new Event(event))", event)
            assert page.locator("html.printing").count() == is_printing


def test_steppers_stop_at_the_ends_of_their_range(opened: Any) -> None:
    assert opened.inner_text("#layer-range") == "2–5"
    assert opened.inner_text("#rank-range") == "0–4"
    opened.click('[data-control="layer"][data-step="-1"]')
    assert opened.input_value("#layer") == "2"
    for _ in range(3):
        opened.click('[data-control="layer"][data-step="1"]')
    assert opened.input_value("#layer") == "5"


def test_the_buttons_of_figures_cover_and_send_nothing(opened_full: Any) -> None:
    opened_full.hover("#concentration .nsewdrag")
    buttons = opened_full.eval_on_selector_all(".modebar-btn", "all => all.map(one => one.dataset.title)")
    assert "Reset axes" in buttons
    assert not [title for title in buttons if "hare" in title or "loud" in title or "dit" in title]
    found = opened_full.eval_on_selector_all(
        ".js-plotly-plot",
        """all => all.map(one => [one.id, one._context.plotlyServerURL,
             one.querySelector(".modebar").getBoundingClientRect().bottom,
             one.querySelector(".main-svg").getBoundingClientRect().top])""",
    )
    assert len(found) == 12
    for figure, server, bottom, top in found:
        assert server == "" and bottom <= top + 1, figure


def saved(page: Any, figure: str, button: str) -> Path:
    page.hover(f"{figure} .nsewdrag")
    with page.expect_download() as download:
        page.click(f"{figure} .modebar-btn[data-title='{button}']")
    path = Path(download.value.path()).with_name(download.value.suggested_filename)
    download.value.save_as(path)
    return path


COLOURS = """bytes => new Promise(proceed => {
  const image = new Image();
  image.onload = () => {
    const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
    canvas.drawImage(image, 0, 0);
    const all = canvas.getImageData(0, 0, image.width, image.height).data;
    proceed([image.width, all.every((value, at) => at % 4 < 3 || value === 255), [...all.slice(0, 3)]]);
  };
  image.src = `data:image/png;base64,${bytes}`;
})"""


def test_a_saved_picture_has_a_name_a_title_and_a_background(opened_full_alone: Any) -> None:
    page = opened_full_alone
    choose_by_address(page, FULL_START.replace("layer=2&head=0", "layer=5&head=2"))
    width = 3 * page.evaluate("document.getElementById('attention-map').layout.width")
    inks = []
    for theme, background in (("light", [255, 255, 255]), ("dark", [21, 23, 28])):
        page.click("#theme")
        inks.append(page.evaluate("document.getElementById('key-terms').layout.font.color"))
        assert page.inner_text("#theme") == f"Theme: {theme}"
        png = saved(page, "#attention-map", "Save as PNG")
        assert png.name == "L5H2_attention_map.png"
        assert page.evaluate(COLOURS, b64encode(png.read_bytes()).decode()) == [width, True, background]
    assert inks[0] != inks[1]
    svg = saved(page, "#magnitude-by-position", "Save as SVG")
    assert svg.name == "L5H2_magnitude_by_position.svg"
    title, *_ = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")
    assert title.text == "Figure 7. Magnitude along the text, L5H2, query side"


def test_the_keys_of_a_chosen_query_are_listed_below(opened: Any, view: ScoreNumbers) -> None:
    lists = [f"#{stage} .attnmech-list" for stage in ("sentence-view", "token-graph")]
    assert all(opened.locator(each).bounding_box() is None for each in lists)
    opened.click(".token >> nth=5")
    row = view.pattern[0, 0, 5]
    for each, least in zip(lists, (0.02, 0.1), strict=True):
        said = opened.inner_text(each).replace("\u2068", "").replace("\u2069", "")
        keys = [key for key in np.argsort(-row) if row[key] >= least]
        weights = [f"{100 * row[key]:.1f}\u00a0% to {key} “{visible_token(TOKENS[key])}”" for key in keys]
        assert said == f"Query 5 “{visible_token(TOKENS[5])}”: {', '.join(weights)}."


def test_back_goes_to_the_choice_before(opened_alone: Any) -> None:
    before = opened_alone.evaluate("history.length")
    opened_alone.select_option("#head", "2")
    opened_alone.click(".token >> nth=3")
    drawn = traces(opened_alone, "attention-map")
    for _ in range(3):  # one step for Back
        opened_alone.click("[data-control='rank'][data-step='1']")
    assert opened_alone.evaluate("history.length") == before + 3
    assert opened_alone.evaluate("location.hash") == "#layer=2&head=2&rank=3&query=3&tab=all"
    opened_alone.evaluate("history.back()")
    opened_alone.wait_for_url("**#layer=2&head=2&rank=0&query=3&tab=all")
    assert opened_alone.input_value("#rank") == "0"
    assert opened_alone.locator(".attnmech-sentence-query button[aria-pressed='true']").count() == 1
    assert traces(opened_alone, "attention-map") == drawn
    opened_alone.evaluate("history.back()")
    opened_alone.wait_for_url("**#layer=2&head=2&rank=0&query=6&tab=all")
    opened_alone.wait_for_function(
        "document.querySelectorAll('.attnmech-sentence-box [aria-pressed=true]').length === 0"
    )
    opened_alone.evaluate("history.back()")
    opened_alone.wait_for_url("**#layer=2&head=0&rank=0&query=6&tab=all")
    opened_alone.wait_for_function("document.getElementById('head').value === '0'")
    opened_alone.evaluate("history.forward()")
    opened_alone.wait_for_url("**#layer=2&head=2&rank=0&query=6&tab=all")
    assert opened_alone.evaluate("history.length") == before + 3


def test_sentences_name_heads_quote_tokens_and_write_minus_in_one_way(opened_full: Any) -> None:
    opened_full.select_option("#head", "1")
    opened_full.click(".token >> nth=5")
    for name in ("mean of the heads", "one head"):
        opened_full.locator("#sentence-view select").select_option(name)
    shown = opened_full.eval_on_selector_all(
        ".finding, .lead, .brief, .attnmech-finding, .gtitle, #reason",
        "all => all.map(one => one.textContent).join(' ')",
    )
    assert not re.search(r"[Hh]ead \d|layer \d, head|(?<![\w.])-\d|[‘’]", shown), shown
    assert "L2H1" in shown and "−" in shown and "“" in shown


def test_tokens_are_chosen_by_keyboard_and_the_frame_follows(opened: Any) -> None:
    opened.focus('.token[aria-pressed="true"]')
    opened.keyboard.press("Home")
    assert opened.get_attribute(".token >> nth=0", "data-mark") == "self"
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    for figure in ("attention-map", "share-bars"):
        frame = opened.evaluate("id => document.getElementById(id).layout.shapes[0]", figure)
        assert (frame["y0"], frame["y1"]) == (0.5, 1.5)


def test_a_click_on_a_row_of_the_map_chooses_it(opened: Any) -> None:
    cells = opened.locator("#attention-map .nsewdrag")
    size = cells.bounding_box()
    second_row = {"x": size["width"] / 10, "y": size["height"] * 2.5 / 7}
    cells.hover(position=second_row)
    opened.wait_for_selector("#attention-map .hovertext")
    cells.click(position=second_row)
    opened.wait_for_url("**&query=2&tab=all", timeout=5000)


def test_chips_are_shaded_by_the_row_pointed_at(opened: Any, view: ScoreNumbers) -> None:
    def depths() -> list[float]:
        read = "chips => chips.map(chip => Number(chip.style.getPropertyValue('--depth')))"
        return list(opened.eval_on_selector_all(".token", read))

    assert depths() == pytest.approx(np.sqrt(view.pattern[0, 0, 6]).tolist(), abs=5e-3)
    opened.hover(".token >> nth=3")
    assert depths() == pytest.approx(np.sqrt(view.pattern[0, 0, 3]).tolist(), abs=5e-3)
    opened.hover("h1")
    assert depths() == pytest.approx(np.sqrt(view.pattern[0, 0, 6]).tolist(), abs=5e-3)


def test_hostile_text_is_shown_and_does_not_run(opened: Any, opened_full: Any, view: ScoreNumbers) -> None:
    assert opened_full.locator(".token").all_inner_texts() == [visible_token(token) for token in view.tokens]
    labels = opened_full.locator("#share-bars .ytick text").all_text_contents()
    assert {'2 <a·href="java…', "4 ⏎$x$", "5 ·&amp;"} <= {*labels}
    opened_full.wait_for_selector("#expected-tokens span")
    expected = opened_full.inner_text("#expected-tokens").replace("\u2060", "")
    assert shorten(visible_token(TOKENS[1])) in expected
    place = opened_full.evaluate(
        """() => {
             const {_fullLayout: {xaxis, yaxis}, data} = document.getElementById("magnitude-by-position");
             const trace = data.find(({meta, x}) => meta.startsWith("chosen") && x.includes(2));
             return {x: xaxis.d2p(2), y: yaxis.d2p(trace.y[trace.x.indexOf(2)])};
           }"""
    )
    opened_full.locator("#magnitude-by-position .nsewdrag").hover(position=place)
    box = opened_full.wait_for_selector("#magnitude-by-position .hovertext")
    assert 'query 2 <a·href="java…' in box.text_content()
    opened.hover("#attention-map .nsewdrag")
    for page in (opened, opened_full):
        assert page.locator("svg a, header img, main img").count() == 0
        assert page.evaluate("window.owned") is None


def test_nothing_is_wider_than_the_screen_and_no_title_is_cut(opened_full_alone: Any) -> None:
    """Titles of figures, legends and axes lie inside their figure."""
    page = opened_full_alone
    assert page.inner_text("#reason") == "" and page.locator("#reason").bounding_box() is None  # leaves no gap
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 24000})
        page.wait_for_function("width => document.getElementById('magnitude').layout.width < width", arg=width)
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert widths_beyond(page) == [0] * 12
        cut = page.eval_on_selector_all(
            ".figure .gtitle, .figure .legendtitletext, .figure .xtitle, .figure .annotation-text",
            """texts => texts.filter(text => {
                 const [own, around] = [text, text.closest(".figure")].map(part => part.getBoundingClientRect());
                 return own.left < around.left - 1 || own.right > around.right + 1;
               }).map(text => text.textContent)""",
        )
        assert cut == [], width


def widths_beyond(page: Any) -> list[float]:
    """The width of each plotly figure minus that of its place."""
    beyond = """all => all.filter(one => one.layout && !one.closest("[hidden]"))
                          .map(one => one.layout.width - one.clientWidth)"""
    return list(page.eval_on_selector_all(".figure", beyond))


FOCUS_FIGURES = ("self-focus", "first-focus", "concentration")
UPDATE_FIGURES = ("magnitude", "orientation", "orientation-by-magnitude", "magnitude-by-position")


def test_a_click_on_a_head_chooses_it_where_the_page_has_its_layer(opened_full: Any) -> None:
    def click(layer: int, rank: int) -> int:
        """Clicks the point of this rank; returns its head."""
        place = opened_full.evaluate(
            """([layer, rank]) => {
                 const {_fullLayout: {xaxis, yaxis}, data} = document.getElementById("concentration");
                 const [trace, index] = [data[rank], data[rank].x.indexOf(layer)];
                 return {head: trace.customdata[index][0], x: xaxis.l2p(layer), y: yaxis.l2p(trace.y[index])};
               }""",
            [layer, rank],
        )
        plot, position = opened_full.locator("#concentration .nsewdrag"), {"x": place["x"], "y": place["y"]}
        plot.hover(position=position)
        opened_full.wait_for_selector("#concentration .hovertext")
        plot.click(position=position)
        return int(place["head"])

    opened_full.select_option("#layer", "5")
    head = click(2, rank=2)
    opened_full.wait_for_url(f"**#layer=2&head={head}&**", timeout=5000)
    assert click(7, rank=0) != head
    assert f"#layer=2&head={head}&" in opened_full.url


def test_figures_of_a_window_that_opens_with_no_width_are_drawn_once_it_has_one(
    chromium: Any, view: ScoreNumbers, all_sections: list[Section], tmp_path: Path
) -> None:
    size = {"height": WHOLE["height"]}
    with opening(chromium, page_of(view, all_sections), tmp_path / "page.html", **{**WHOLE, "width": 390}) as page:
        for width in (1, 120, 390):
            page.set_viewport_size({**size, "width": width})
            page.wait_for_timeout(200)
        page.wait_for_function("document.querySelector('#row-ledger').clientWidth > 300")
        page.wait_for_function("document.querySelectorAll('#row-ledger .bars path').length > 0")
        assert page.evaluate("document.querySelector('#row-ledger')._fullLayout._size.h") > 100
