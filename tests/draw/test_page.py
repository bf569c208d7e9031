"""The page is one file that loads nothing, carries the view's numbers, and shows hostile text as text."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from attnmech.draw import scripts
from attnmech.draw.packing import rounding_error
from attnmech.draw.page import render_page
from attnmech.draw.view import FocusView, ScoreView, UpdateView
from attnmech.errors import InputError


class Elements(HTMLParser):
    """Every start tag of a page, and the text of its script elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def embedded(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_no_element_loads_anything(page_html: str) -> None:
    for tag, attributes in Elements(page_html).tags:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}
        assert not {"src", "srcset", "action"} & attributes.keys(), (tag, attributes)
        assert (attributes.get("href") or "#")[0] == "#"
        assert not any(name.startswith("on") for name in attributes)


def test_hostile_text_makes_no_element(page_html: str) -> None:
    assert scripts_of(page_html) == ["text/plain", "text/plain", "application/json", None, "module"]
    assert "<script>window.owned" not in page_html
    assert "<img src=x" not in page_html


def scripts_of(html: str) -> list[str | None]:
    return [attributes.get("type") for tag, attributes in Elements(html).tags if tag == "script"]


def test_the_policy_lets_only_our_own_scripts_run_and_nothing_load(page_html: str) -> None:
    policy = next(a["content"] for tag, a in Elements(page_html).tags if "http-equiv" in a)
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert "connect-src" not in directives
    found = re.findall(r'<script(?: type="module")?>(.*?)</script>', page_html, re.DOTALL)
    texts = [*found, scripts.views().text, scripts.plotly().text]
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts]
    assert directives["script-src"].split() == hashes


def test_status_is_said_in_words(page_html: str) -> None:
    assert re.search(r'rows sum to 1</th><td class="status ok">✓ ok</td>', page_html)
    assert re.search(r'causal</th><td class="status fail">✗ fails</td>', page_html)


def test_empty_tables_say_so(view: ScoreView) -> None:
    html = render_page(title="t", lead="l", view=view, facts=[], checks=[], provenance={}, calls={})
    assert "No facts were given." in html
    assert "No checks were run." in html


def test_the_view_travels_whole(page_html: str, view: ScoreView) -> None:
    data = embedded(page_html)
    assert data["layers"] == [2, 5]
    assert (data["heads"], data["ranks"], len(data["tokens"])) == (3, 5, 7)
    assert set(data["ranked_share"]) == {"key_bias", "query_key"}
    assert data["scores"]["low"] == pytest.approx(np.nanmin(view.scores, axis=(2, 3)).ravel().tolist())


def test_bounds_are_rounded_up_and_what_is_exact_is_called_so(view: ScoreView, page_html: str) -> None:
    off = re.search(r"scores and their terms are off by at most (\S+), shares", page_html)
    assert off and float(off[1]) >= max(rounding_error(each) for each in (view.scores, *view.terms.values()))
    whole = replace(view, scores=np.zeros_like(view.scores), terms={})
    html = render_page(title="t", lead="-0.5 nats", view=whole, facts=[], checks=[], provenance={}, calls={})
    assert "scores and their terms are exact, shares" in html
    assert "−0.5 nats" in html


def test_four_layers_of_eight_heads_and_64_tokens_stay_below_4_megabytes() -> None:
    layers, heads, count = 4, 8, 64
    square = np.random.default_rng(0).normal(size=(layers, heads, count, count)).astype(np.float32)
    view = ScoreView(
        tokens=tuple(f" {position}" for position in range(count)),
        layers=tuple(range(layers)),
        scores=square,
        pattern=np.exp(square - square.max(-1, keepdims=True)),
        ranked_key=np.argsort(-square, axis=-1).astype(np.int32),
        ranked_share={"position": square, "key_bias": square, "query_key": square},
        key_terms={"position": square[..., 0], "key_bias": square[..., 1]},
    )
    html = render_page(title="t", lead="l", view=view, facts=[], checks=[], provenance={}, calls={})
    assert len(html.encode()) < 4e6


def test_arrays_of_another_text_are_refused(view: ScoreView) -> None:
    with pytest.raises(InputError, match=r"`scores` must have the shape \(2, 3, 6, 6\) .* got \(2, 3, 7, 7\)"):
        replace(view, tokens=view.tokens[:6])


def test_infinities_are_refused(view: ScoreView) -> None:
    with pytest.raises(InputError, match="`scores` must be finite, with NaN where a cell is hidden"):
        replace(view, scores=np.nan_to_num(view.scores, nan=-np.inf))


def test_an_empty_view_is_refused(view: ScoreView) -> None:
    with pytest.raises(InputError, match="at least one token, one layer and one term"):
        replace(view, ranked_share={})


def headings(html: str) -> list[str]:
    return [heading.split(".")[0] for heading in re.findall(r"<h2>(Figure \d+\.)", html)]


def test_figures_4_to_10_stand_only_where_their_numbers_are_given(
    page_html: str, full_page_html: str, view: ScoreView, focus: FocusView
) -> None:
    assert headings(page_html) == [f"Figure {number}" for number in range(1, 4)]
    assert headings(full_page_html) == [f"Figure {number}" for number in range(1, 11)]
    page: dict[str, Any] = {"facts": [], "checks": [], "provenance": {}, "calls": {}}
    html = render_page(title="t", lead="l", view=view, focus=focus, **page)
    assert headings(html) == [f"Figure {number}" for number in range(1, 7)]
    assert (embedded(page_html)["focus"], embedded(page_html)["updates"]) == (None, None)


def test_the_full_page_loads_nothing_and_makes_no_element_of_hostile_text(full_page_html: str) -> None:
    tags = Elements(full_page_html).tags
    assert scripts_of(full_page_html) == [*["text/plain"] * 3, "application/json", None, "module"]
    assert not any({"src", "srcset", "action"} & attributes.keys() for _, attributes in tags)
    assert "<script>window.owned" not in full_page_html
    assert "<img src=x" not in full_page_html


def test_the_page_says_which_rows_count_and_whether_there_are_intervals(full_page_html: str, focus: FocusView) -> None:
    assert full_page_html.count("Row 0 is left out: it sees only itself &lt;/script&gt;") == 3
    assert full_page_html.count("The hover box gives each number&#x27;s interval.") == 3


def test_updates_travel_for_the_pages_layers_alone(full_page_html: str, view: ScoreView, updates: UpdateView) -> None:
    sides = embedded(full_page_html)["updates"]["sides"]
    assert list(sides) == ["query", "target"]
    shown = np.log10(updates.target_magnitude[[0, 2]])
    assert sides["target"]["log_magnitude"]["low"] == pytest.approx(np.nanmin(shown, axis=2).ravel().tolist())
    assert sides["target"]["log_range"] == pytest.approx([np.nanmin(shown) - 0.1, np.nanmax(shown) + 0.1])
    assert np.isfinite(sides["query"]["log_range"]).all()


def test_updates_of_nothing_have_axes_all_the_same(view: ScoreView, updates: UpdateView) -> None:
    nothing = replace(
        updates, magnitude=np.zeros_like(updates.magnitude), orientation=np.full_like(updates.orientation, np.nan)
    )
    html = render_page(title="t", lead="l", view=view, facts=[], checks=[], provenance={}, calls={}, updates=nothing)
    assert embedded(html)["updates"]["sides"]["query"]["log_range"] == [-1, 0]


def test_focus_and_updates_of_another_run_are_refused(view: ScoreView, focus: FocusView, updates: UpdateView) -> None:
    def page(**views: Any) -> str:
        return render_page(title="t", lead="l", view=view, facts=[], checks=[], provenance={}, calls={}, **views)

    with pytest.raises(InputError, match=r"`focus` must hold the page's layers \[2, 5\] .* got layers \[0, 2, 4, 7\]"):
        page(focus=replace(focus, layers=(0, 2, 4, 7)))
    with pytest.raises(InputError, match=r"`updates` must hold the page's layers \[2, 5\] with 3 heads each"):
        page(updates=replace(updates, layers=(2, 3, 4)))
    with pytest.raises(InputError, match="`updates` must be of the page's text"):
        page(updates=replace(updates, tokens=(*updates.tokens[:6], "other")))


def test_figures_4_to_10_of_4_layers_8_heads_and_64_tokens_add_less_than_150_kilobytes() -> None:
    layers, heads, count = 4, 8, 64
    generator = np.random.default_rng(0)
    square = generator.normal(size=(layers, heads, count, count)).astype(np.float32)
    fraction = generator.uniform(size=(layers, heads)).astype(np.float32)
    number = generator.uniform(size=(layers, heads, count)).astype(np.float32)
    labels, tokens = tuple(range(layers)), tuple(f" {position}" for position in range(count))
    view = ScoreView(
        tokens=tokens,
        layers=labels,
        scores=square,
        pattern=np.exp(square - square.max(-1, keepdims=True)),
        ranked_key=np.argsort(-square, axis=-1).astype(np.int32),
        ranked_share={"position": square},
        key_terms={},
    )
    focus = FocusView(labels, fraction, fraction, fraction, fraction, "all rows")
    updates = UpdateView(tokens, labels, number, number, number, number, number.argsort(axis=2).astype(np.int32))
    page: dict[str, Any] = {"title": "t", "lead": "l", "view": view, "facts": [], "checks": [], "provenance": {}}
    without = render_page(**page, calls={})
    assert len(render_page(**page, calls={}, focus=focus, updates=updates)) - len(without) < 150e3
