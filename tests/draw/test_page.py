"""The page is one file that loads nothing, carries the view's numbers, and shows hostile text as text."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from attnmech.draw.page import render_page
from attnmech.draw.view import ScoreView
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
        assert not {"src", "href", "srcset", "action"} & attributes.keys(), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)


def test_hostile_text_makes_no_element(page_html: str) -> None:
    assert [tag for tag, _ in Elements(page_html).tags].count("script") == 3
    assert "<script>window.owned" not in page_html
    assert "<img src=x" not in page_html


def test_the_policy_lets_only_the_two_scripts_run_and_nothing_load(page_html: str) -> None:
    policy = next(a["content"] for tag, a in Elements(page_html).tags if "http-equiv" in a)
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert "connect-src" not in directives
    assert [source[:8] for source in directives["script-src"].split()] == ["'sha256-", "'sha256-"]


def test_status_is_said_in_words(page_html: str) -> None:
    assert re.search(r'rows sum to 1</th><td class="status ok">✓ ok</td>', page_html)
    assert re.search(r'causal</th><td class="status fail">✗ fails</td>', page_html)


def test_empty_tables_say_so(view: ScoreView) -> None:
    html = render_page(title="t", lead="l", view=view, facts=[], checks=[], provenance={}, call="c")
    assert "No facts were given." in html
    assert "No checks were run." in html


def test_the_view_travels_whole(page_html: str, view: ScoreView) -> None:
    data = embedded(page_html)
    assert data["layers"] == [2, 5]
    assert (data["heads"], data["ranks"], len(data["tokens"])) == (3, 5, 7)
    assert set(data["ranked_share"]) == {"key_bias", "query_key"}
    assert data["scores"]["low"] == pytest.approx(np.nanmin(view.scores, axis=(2, 3)).ravel().tolist())


def test_four_layers_of_eight_heads_and_64_tokens_stay_below_8_megabytes() -> None:
    layers, heads, count = 4, 8, 64
    square = np.random.default_rng(0).normal(size=(layers, heads, count, count)).astype(np.float32)
    view = ScoreView(
        tokens=tuple(f" {position}" for position in range(count)),
        layers=tuple(range(layers)),
        scores=square,
        pattern=square,
        ranked_key=np.argsort(-square, axis=-1).astype(np.int32),
        ranked_share={"position": square, "key_bias": square, "query_key": square},
        key_terms={"position": square[..., 0], "key_bias": square[..., 1]},
    )
    html = render_page(title="t", lead="l", view=view, facts=[], checks=[], provenance={}, call="c")
    assert len(html.encode()) < 7.5e6


def test_arrays_of_another_text_are_refused(view: ScoreView) -> None:
    with pytest.raises(InputError, match=r"`scores` must have the shape \(2, 3, 6, 6\) .* got \(2, 3, 7, 7\)"):
        replace(view, tokens=view.tokens[:6])


def test_infinities_are_refused(view: ScoreView) -> None:
    with pytest.raises(InputError, match="`scores` must be finite, with NaN where a cell is hidden"):
        replace(view, scores=np.nan_to_num(view.scores, nan=-np.inf))


def test_an_empty_view_is_refused(view: ScoreView) -> None:
    with pytest.raises(InputError, match="at least one token, one layer and one term"):
        replace(view, ranked_share={})
