"""Escaped text has nothing that HTML, a script element or plotly interprets."""

import json
import sys
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
import pytest
from browser import opening

from attnmech.draw.attention_maps import attention_map
from attnmech.draw.text import (
    LONGEST_LABEL,
    html_text,
    json_for_script,
    plotly_text,
    quoted,
    token_labels,
    visible_token,
)


def test_json_stays_inside_its_script_element_and_reads_back() -> None:
    value = {"token": "</script><!-- & \u2028\u2029 ']]>"}
    written = json_for_script(value)
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == value


def test_html_text_escapes_markup_and_quotes() -> None:
    assert html_text("<a b='c' d=\"e\">&") == "&lt;a b=&#x27;c&#x27; d=&quot;e&quot;&gt;&amp;"
    assert html_text("a\ud800b") == "a?b"  # half of a surrogate pair


def test_plotly_text_has_neither_tags_nor_tex() -> None:
    assert plotly_text("<b>$x$ & 'y'</b>") == "&lt;b&gt;&#36;x&#36; &amp; 'y'&lt;/b&gt;"


def test_characters_that_would_not_print_are_shown() -> None:
    assert visible_token(" a\u202eb\x00\ud800\n") == "·a⟨202E⟩b⟨0000⟩⟨D800⟩⏎"


def test_every_lone_combining_mark_stands_on_a_dotted_circle() -> None:
    marks = [mark for mark in map(chr, range(sys.maxunicode + 1)) if category(mark) in ("Mn", "Mc", "Me")]
    assert len(marks) > 2000
    for mark in marks:
        assert visible_token(mark) == f"◌{mark}"
        assert visible_token(f"e{mark}{mark}") == f"e{mark}{mark}"


@pytest.mark.parametrize(
    ("token", "seen"),
    [
        (" \u0301", "·◌\u0301"),
        ("\n\u0301", "⏎◌\u0301"),
        ("\u202e\u0301", "⟨202E⟩◌\u0301"),
        ("\u0301\u0300s", "◌\u0301\u0300s"),
        ("ि क", "◌ि·क"),
        ("\u0301[1/2]", "◌\u0301[1/2]"),
    ],
)
def test_a_mark_after_white_space_is_as_alone(token: str, seen: str) -> None:
    assert visible_token(token) == seen


def test_words_from_right_to_left_are_isolated_in_labels_and_sentences() -> None:
    assert token_labels(["שלום", " سلام", "٣", "a", "é"]) == [
        "0 \u2068שלום\u2069",
        "1 \u2068·سلام\u2069",
        "2 \u2068٣\u2069",
        "3 a",
        "4 é",
    ]
    assert token_labels(["the", "the"]) == ["0 the", "1 the"]
    assert quoted("שלום.") == "“\u2068שלום.\u2069”"


def test_long_tokens_are_cut_before_they_are_escaped() -> None:
    assert token_labels(["<" * 50]) == ["0 " + "&lt;" * (LONGEST_LABEL - 1) + "…"]


@pytest.mark.browser
def test_in_a_figure_a_word_from_right_to_left_keeps_its_full_stop(chromium: Any, tmp_path: Path) -> None:
    figure = attention_map(np.zeros((2, 2)), ["שלום.", "a"])
    with opening(chromium, figure.to_html(), tmp_path / "figure.html", ready=".ytick text") as page:
        # The full stop belongs to the word, so it appears between the number and the word's first letter on the right.
        label = page.locator(".ytick text").filter(has_text="ש")
        number, letter, stop = label.evaluate(
            """label => ["0", "ש", "."].map((each) =>
              label.getStartPositionOfChar(label.textContent.indexOf(each)).x)"""
        )
        assert number < stop < letter
