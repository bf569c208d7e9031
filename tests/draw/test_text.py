"""Escaping leaves nothing for HTML, a script element or plotly to interpret."""

import json

from attnmech.draw.text import (
    LONGEST_LABEL,
    html_text,
    json_for_script,
    plotly_text,
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


def test_html_text_survives_half_a_surrogate_pair() -> None:
    assert html_text("a\ud800b") == "a?b"


def test_plotly_text_has_neither_tags_nor_tex() -> None:
    assert plotly_text("<b>$x$ & 'y'</b>") == "&lt;b&gt;&#36;x&#36; &amp; 'y'&lt;/b&gt;"


def test_characters_that_would_not_print_are_shown() -> None:
    assert visible_token(" a\u202eb\x00\ud800\n") == "·a⟨202E⟩b⟨0000⟩⟨D800⟩⏎"


def test_labels_of_equal_tokens_differ() -> None:
    assert token_labels(["the", "the"]) == ["0 the", "1 the"]


def test_long_tokens_are_cut_before_they_are_escaped() -> None:
    assert token_labels(["<" * 50]) == ["0 " + "&lt;" * (LONGEST_LABEL - 1) + "…"]
