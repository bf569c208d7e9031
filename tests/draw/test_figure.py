"""A notebook shows a figure as a view; in all other respects it remains a plotly figure."""

import json
import pickle
import re

import numpy as np
import plotly.graph_objects as go
from IPython.core.formatters import DisplayFormatter

from attnmech.draw.figure import Figure
from attnmech.methods.scores.figures import key_terms


def test_ipython_shows_the_numbers_as_html_alone() -> None:
    figure = key_terms({"position": np.array([0.0, 1.0, 5.0])}, ["</script>", " b", " c"])
    bundle, _ = DisplayFormatter().format(figure)
    assert set(bundle) == {"text/html", "text/plain"}
    (numbers,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', bundle["text/html"])
    assert json.loads(numbers) == json.loads(figure.to_json())
    assert bundle["text/plain"] == "Figure(scatter; shows itself in a notebook, or .show())"


def test_a_changed_or_copied_figure_is_still_one() -> None:
    figure = key_terms({"position": np.array([0.0, 1.0, 5.0])}, ["a", " b", " c"]).update_layout(height=300)
    assert isinstance(figure, go.Figure)
    assert isinstance(figure, Figure)
    assert pickle.loads(pickle.dumps(figure)) == figure
    assert isinstance(pickle.loads(pickle.dumps(figure)), Figure)
