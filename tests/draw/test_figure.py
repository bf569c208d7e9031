"""A notebook shows a figure as a view; in all other respects it remains a plotly figure."""

import json
import pickle
import re

import numpy as np
import plotly.graph_objects as go
from IPython.core.formatters import DisplayFormatter

from attnmech.draw.figure import Figure
from attnmech.methods.scores.figures import key_terms_chart


def key_terms(terms: dict[str, list[float]], tokens: list[str]) -> Figure:
    chart = key_terms_chart({name: np.array([[values]]) for name, values in terms.items()}, tokens)
    return chart.figure(layer=0, head=0)


def test_ipython_shows_the_numbers_as_html_alone() -> None:
    figure = key_terms({"position": [0.0, 1.0, 5.0]}, ["</script>", " b", " c"])
    bundle, _ = DisplayFormatter().format(figure)
    assert set(bundle) == {"text/html", "text/plain"}
    (numbers,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', bundle["text/html"])
    assert json.loads(numbers) == json.loads(figure.to_json())
    assert bundle["text/plain"] == "Figure(scatter; shows itself in a notebook, or .show())"


def test_a_changed_or_copied_figure_is_still_one() -> None:
    figure = key_terms({"position": [0.0, 1.0, 5.0]}, ["a", " b", " c"]).update_layout(height=300)
    assert isinstance(figure, go.Figure)
    assert isinstance(figure, Figure)
    assert pickle.loads(pickle.dumps(figure)) == figure
    assert isinstance(pickle.loads(pickle.dumps(figure)), Figure)


def test_the_numbers_of_a_figure_as_a_table() -> None:
    lines = key_terms({"position": [0.0, 1.0, 5.0], "key_bias": [2.0, 3.0, 4.0]}, ["<s>", "b", "c"])
    frame = lines.to_frame()
    assert len(lines.data) == 2 and frame.trace.nunique() == 2
    for drawn in lines.data:
        assert frame[frame.trace == drawn.name].y.tolist() == list(drawn.y)
    assert any("<s>" in str(value) for value in frame.to_numpy().ravel())  # as read, not as HTML
    cells = Figure(
        go.Heatmap(z=[[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]], x=["a", "b", "c"], y=[7, 8], name="map")
    ).to_frame()
    assert cells.columns.tolist() == ["trace", "x", "y", "z"]
    assert cells.z.tolist()[2:] == [3.0, 4.0, 5.0, 6.0] and np.isnan(cells.z[1])
    assert list(zip(cells.x, cells.y, strict=True)) == [(x, y) for y in (7, 8) for x in "abc"]
    assert Figure(go.Heatmap(z=[[1.0, 2.0]])).to_frame().x.tolist() == [0, 1]
    assert Figure().to_frame().empty
