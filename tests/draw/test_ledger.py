"""The ledger of a row holds its terms, their sum and its probability, for the keys that matter and no hidden one."""

from typing import Any

import numpy as np
import pytest

from attnmech.draw.ledger import row_ledger
from attnmech.draw.style import term_style
from attnmech.errors import InputError

from .conftest import by_meta

TOKENS = ["<s>", " a", "</b><img src=x>", " $d$", " e"]
TERMS = {
    "query_key": np.array([0.5, -1.0, 2.0, 0.25, 8.0]),
    "softcap": np.array([0.0, 0.125, -0.5, 0.0, -4.0]),
    "position": np.array([1.0, 0.5, 0.25, 0.125, 0.0]),
}
HIDDEN_4 = np.array([0, 0, 0, 0, np.nan])
SCORE = sum(TERMS.values()) + HIDDEN_4
PATTERN = np.array([0.3, 0.0002, 0.4, 0.1, 0.0])  # a sink takes the rest


def ledger(**changed: Any) -> Any:
    given = {"terms": TERMS, "score": SCORE, "pattern": PATTERN, "tokens": TOKENS, "query": 3} | changed
    return row_ledger(**given)


def test_keys_stand_by_probability_and_hidden_ones_not_at_all() -> None:
    figure = ledger()
    for trace in figure.data:
        assert [label.split()[0] for label in trace.y] == ["2", "0", "3", "1"]
    assert by_meta(figure)["probability"].x.tolist() == [0.4, 0.3, 0.1, 0.0002]
    assert list(by_meta(figure)["probability"].text) == ["0.400", "0.300", "0.100", "&lt;0.001"]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]
    assert "img" in figure.to_json() and not any(tag in figure.to_json() for tag in ("<img", "u003cimg"))


def test_the_bars_of_a_row_add_up_to_its_mark() -> None:
    traces = by_meta(ledger())
    assert list(traces) == ["position", "query_key", "softcap", "score", "probability"]
    np.testing.assert_array_equal(sum(traces[name].x for name in TERMS), traces["score"].x)
    np.testing.assert_array_equal(traces["query_key"].x, [2.0, 0.5, 0.25, -1.0])
    assert ledger().layout.barmode == "relative"
    assert {traces[name].xaxis for name in (*TERMS, "score")} == {None}
    assert traces["probability"].xaxis == "x2"


def test_only_so_many_keys_are_shown_and_the_title_says_what_they_hold() -> None:
    figure = ledger(top=2)
    assert [len(trace.x) for trace in figure.data] == [2] * 5
    assert (
        figure.layout.title.text == "query 3 “·&#36;d&#36;”<br>2 of its 4 visible keys, with 0.700 of the "
        "attention in total"
    )


def test_of_equal_probabilities_the_earlier_key_comes_first() -> None:
    figure = ledger(pattern=np.array([0.2, 0.2, 0.2, 0.4, 0.0]), top=3)
    assert [label.split()[0] for label in figure.data[0].y] == ["3", "0", "1"]


def test_the_hover_box_holds_the_whole_sum() -> None:
    for trace in ledger().data:
        assert trace.hovertemplate == (
            "key %{y}<br>position %{customdata[0]}<br>query-key %{customdata[1]}<br>softcap %{customdata[2]}<br>"
            "score %{customdata[3]}<br>probability %{customdata[4]}<extra></extra>"
        )
        assert trace.y[3] == "1 ·a"
        assert list(trace.customdata[3]) == ["+0.500", "−1.000", "+0.125", "−0.375", "&lt;0.001"]


def test_grey_terms_differ_by_their_hatches() -> None:
    rest = {name: np.ones(5) for name in ("query_bias", "constant", "softcap")}
    traces = by_meta(ledger(terms=rest, score=3 + HIDDEN_4))
    looks = {(traces[name].marker.color, traces[name].marker.pattern.shape) for name in rest}
    assert len(looks) == 3
    assert traces["query_bias"].name == term_style("query_bias").label == "query bias"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"terms": {}}, "at least one term"),
        ({"tokens": TOKENS[:3]}, "`score` must have one number for each of the 3 tokens; got the shape \\(5,\\)"),
        ({"pattern": PATTERN[:4]}, "`pattern` must have one number for each of the 5 tokens; got the shape \\(4,\\)"),
        ({"query": 5}, r"`query` must be from 0 to 4 \(the text has 5 tokens\); got 5"),
        ({"top": 0}, "`top` must be a whole number, 1 or more; got 0"),
        ({"score": np.full(5, np.nan)}, "NaN"),
    ],
)
def test_what_does_not_fit_is_refused(unchecked: None, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ledger(**changed)
