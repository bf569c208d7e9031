"""The page is one file that loads nothing, contains the view's numbers, and shows hostile text as text."""

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from unpacking import page_data

from attnmech.draw import scripts
from attnmech.draw.chart import ByChoice, Chart
from attnmech.draw.numbers import FocusNumbers, ScoreNumbers, UpdateNumbers
from attnmech.draw.packing import rounding_error
from attnmech.errors import InputError
from attnmech.methods.focus.section import focus_sections
from attnmech.methods.updates.section import update_sections

from .conftest import page, sections_of


class Elements(HTMLParser):
    """Every start tag of a page, and the text of its script elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.parametrize("name", ["page_html", "full_page_html"])
def test_a_page_loads_nothing_and_makes_no_element_of_hostile_text(name: str, request: pytest.FixtureRequest) -> None:
    html = request.getfixturevalue(name)
    for tag, attributes in Elements(html).tags:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}
        assert not {"src", "srcset", "action"} & attributes.keys(), (tag, attributes)
        assert (attributes.get("href") or "#")[0] == "#"
        assert not any(name.startswith("on") for name in attributes)
    texts = 3 if name == "page_html" else 4
    scripts_of_page = [attributes.get("type") for tag, attributes in Elements(html).tags if tag == "script"]
    assert scripts_of_page == [None, *["text/plain"] * texts, "application/json", None, "module"]
    assert "<script>window.owned" not in html and "<img src=x" not in html


def test_the_policy_lets_only_our_own_scripts_run_and_nothing_load(page_html: str) -> None:
    policy = next(a["content"] for tag, a in Elements(page_html).tags if "http-equiv" in a)
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert "connect-src" not in directives
    found = re.findall(r'<script(?: type="module")?>(.*?)</script>', page_html, re.DOTALL)
    texts = [*found, scripts.views().text, scripts.heads().text, scripts.plotly().text]
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts]
    assert directives["script-src"].split() == hashes


def test_status_is_said_in_words(page_html: str) -> None:
    assert re.search(r'rows sum to 1</th><td class="status ok">✓ ok</td>', page_html)
    assert re.search(r'causal</th><td class="status fail">✗ fails</td>', page_html)


def test_a_page_without_facts_or_checks_has_no_sections_for_them(view: ScoreNumbers, page_html: str) -> None:
    html = page(view, sections_of(view))
    for name in ("run", "checks", "summary", "numbers"):
        assert f'id="{name}-section"' not in html and f'data-section="{name}"' not in html
    assert 'id="provenance-section"' in html and 'data-section="provenance"' in html
    assert 'id="run-section"' in page_html and 'data-section="checks"' in page_html


def test_what_can_be_chosen_is_what_the_sections_offer(page_html: str, full_page_html: str) -> None:
    data = page_data(page_html)
    assert data["choices"] == {
        "layer": [2, 5],
        "head": [0, 1, 2],
        "rank": [0, 1, 2, 3, 4],
        "query": [0, 1, 2, 3, 4, 5, 6],
        "tab": ["look", "why", "model", "all"],
        "colour": ["type", "mass", "effect"],
        "across": ["map", "mass", "effect"],
        "up": ["mass", "effect"],
        "measure": ["score", "relative", "probability"],
        "against": ["mean", "zero", "runner_up"],
    }
    assert data["optional"] == ["tab", "colour", "across", "up", "measure", "against"]
    assert list(page_data(full_page_html)["choices"]) == [
        "layer", "head", "rank", "split", "side", "query", "tab", "colour", "across", "up", "measure", "against",
    ]  # fmt: skip


def test_an_array_travels_once(full_page_html: str, view: ScoreNumbers) -> None:
    data = page_data(full_page_html)
    slots = data["figures"]["attention-map"]["slots"]
    scores, relative, probability = (slot["columns"][0]["array"] for slot in slots if slot["path"][-1] == "z")
    assert scores == relative != probability == data["pattern"]
    assert data["arrays"][scores]["low"] == pytest.approx(np.nanmin(view.scores, axis=(2, 3)).ravel().tolist())


def test_bounds_are_rounded_up_and_what_is_exact_is_called_so(view: ScoreNumbers, page_html: str) -> None:
    off = re.search(r"scores and their terms are off by at most (\S+); shares", page_html)
    assert off and float(off[1]) >= max(rounding_error(each) for each in (view.scores, *view.terms.values()))
    whole = replace(view, scores=np.zeros_like(view.scores), terms={})
    assert "scores and their terms are exact; shares" in page(whole, sections_of(whole))


def big_view() -> ScoreNumbers:
    layers, heads, count = 4, 8, 64
    square = np.random.default_rng(0).normal(size=(layers, heads, count, count)).astype(np.float32)
    exponential = np.exp(square)
    return ScoreNumbers(
        tokens=tuple(f" {position}" for position in range(count)),
        layers=tuple(range(layers)),
        scores=square,
        pattern=exponential / exponential.sum(-1, keepdims=True),
        ranked_key=np.argsort(-square, axis=-1).astype(np.int32)[..., :10],
        ranked_share=dict.fromkeys(("position", "key_bias", "query_key"), square[..., :10]),
        key_terms={"position": square[..., 0], "key_bias": square[..., 1]},
        terms={"position": square[:, :, :1], "query_key": square},
    )


def test_numbers_of_another_text_infinite_or_none_are_refused(view: ScoreNumbers) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tokens": view.tokens[:6]}, "`scores` must be .* with layer=2, query=6, key=6; got"),
        ({"scores": np.nan_to_num(view.scores, nan=-np.inf)}, "`scores` must be finite, or NaN"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            replace(view, **changes)


def headings(html: str) -> list[str]:
    return [heading.split(".")[0] for heading in re.findall(r"<h2>(Figure \d+\.)", html)]


def test_the_page_has_the_sections_that_it_is_given(page_html: str, full_page_html: str) -> None:
    assert headings(page_html) == [f"Figure {number}" for number in range(1, 4)]
    assert headings(full_page_html) == [f"Figure {number}" for number in range(1, 11)]


def test_the_page_says_which_rows_count_and_if_there_are_intervals(full_page_html: str, focus: FocusNumbers) -> None:
    assert full_page_html.count("Row 0 is left out: it sees only itself &lt;/script&gt;") == 3
    assert full_page_html.count("Hover over a point for its interval.") == 3


def test_axes_are_the_same_in_every_layer_and_updates_of_nothing_have_some(updates: UpdateNumbers) -> None:
    nothing = replace(
        updates, magnitude=np.zeros_like(updates.magnitude), orientation=np.full_like(updates.orientation, np.nan)
    )
    first = update_sections(nothing, "updates")[0]
    chart = first.figures["magnitude"]
    assert isinstance(chart, Chart) and isinstance(first.finding, ByChoice)
    assert chart.figure(side=0, layer=0, head=0).layout.xaxis.range == (-1, 0)
    assert first.finding.at({"side": 0, "layer": 1, "head": 2}) == "L4H2 has no update to show."
    charts = {name: each for section in update_sections(updates, "updates") for name, each in section.figures.items()}
    for name, axis in (("magnitude", "x"), ("orientation-by-magnitude", "x"), ("magnitude-by-position", "y")):
        drawn = [charts[name].figure(side=side, layer=layer, head=0).layout for side, layer in ((0, 0), (0, 1), (1, 0))]
        ends = [layout[f"{axis}axis"].range for layout in drawn]
        assert ends[0] == ends[1] != ends[2], name  # layers can be compared


def test_a_section_of_other_layers_or_tokens_is_refused(
    view: ScoreNumbers, focus: FocusNumbers, updates: UpdateNumbers
) -> None:
    with pytest.raises(InputError, match=r"`magnitude` has 3 layers but the page offers 2 \(\[2, 5\]\)"):
        page(view, sections_of(view, *update_sections(updates, "updates")))
    with pytest.raises(InputError, match=r"`self-focus` has 1 layers but the page offers 2"):
        page(view, sections_of(view, *focus_sections(focus, "focus", layers=[5])))


def test_a_page_of_4_layers_8_heads_and_64_tokens_is_small() -> None:
    """Less than 4 megabytes; figures 4 to 10 take 200 kilobytes."""
    layers, heads, count = 4, 8, 64
    generator = np.random.default_rng(0)
    fraction = generator.uniform(size=(layers, heads)).astype(np.float32)
    number = generator.uniform(size=(layers, heads, count)).astype(np.float32)
    view = big_view()
    focus = FocusNumbers(view.layers, fraction, fraction, fraction, fraction, "all rows")
    updates = UpdateNumbers(
        view.tokens, view.layers, *[np.stack([number, number])] * 2, number.argsort(axis=2).astype(np.int32)
    )
    further = [*focus_sections(focus, "focus", view.layers), *update_sections(updates, "updates")]
    size = len(page(view, sections_of(view)).encode())
    assert size < 4e6 and len(page(view, sections_of(view, *further)).encode()) - size < 200e3
