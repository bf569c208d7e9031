"""Maps of weights from any code keep the numbers and escape names; errors say what to select."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from comparing import refuses
from torch import nn

from attnmech import draw
from attnmech.draw import edges, heatmap, heatmaps
from attnmech.draw.head_maps import SIGNED_COLOURS
from attnmech.draw.style import SCORE_COLOURS
from attnmech.errors import InputError

NAMES = ["a", "<b>", "c", "d", "e"]


def weights(*, across: int = 5) -> torch.Tensor:
    """The weights of torch's own attention, [text head query key]."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    x, y = torch.randn(2, 5, 12), torch.randn(2, across, 12)
    found = attention(x, x if across == 5 else y, x if across == 5 else y, average_attn_weights=False)[1]
    assert found is not None
    return found.detach()


def test_a_heatmap_holds_the_weights() -> None:
    found = weights()[0, 1]
    figure = heatmap(found, NAMES)
    assert np.array_equal(figure.data[0].z, found.numpy())
    assert figure.layout.yaxis.autorange == "reversed"
    assert figure.layout.xaxis.ticktext[1] == "1 &lt;b&gt;"
    assert figure.data[0].text[2][1].startswith("2 c → 1 &lt;b&gt;<br>")
    assert heatmap(weights(across=4)[0, 0]).layout.xaxis.ticktext == ("0", "1", "2", "3")


def test_all_heads_and_the_graph() -> None:
    found = weights()[0]
    view = heatmaps(found, NAMES)
    assert view.data["heads"] == 3 and view.data["layers"] == [0]
    assert heatmaps(torch.stack([found, found]), NAMES).data["layers"] == [0, 1]
    for given in (found, found[1], found[None]):
        assert edges(given, NAMES, threshold=0.3).data["threshold"] == 0.3
    assert heatmaps(weights(across=4)[0], NAMES).data["keys"] == ["0", "1", "2", "3"]


def test_what_is_refused() -> None:
    refuses(re.escape("`weights` must have the axes [query key]; got the shape (2, 3, 5"), heatmap, weights())
    refuses(re.escape("average_attn_weights=False"), heatmaps, weights()[0, 0])
    refuses("one query for each of the 2 tokens; got 5", heatmap, weights()[0, 0], NAMES[:2])
    refuses("must hold probabilities", edges, torch.randn(5, 5))


SHARES = np.array([[0.5, 0.25, np.nan], [0.125, 1.0, 0.75]])


@pytest.mark.parametrize("given", [SHARES, torch.tensor(SHARES), SHARES.tolist(), pd.DataFrame(SHARES)])
def test_any_numbers_by_layer_and_head(given: object) -> None:
    figure = draw.effect_map(given, label="share of rows")
    np.testing.assert_array_equal(np.array(figure.data[0].z), SHARES)
    assert figure.data[0].y == ("0", "1")
    assert [colour for _, colour in figure.layout.coloraxis.colorscale] == SCORE_COLOURS
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0.0, 1.0)
    assert figure.layout.coloraxis.colorbar.title.text == "share of rows"
    crosses = figure.data[-1]
    assert (crosses.name, crosses.x, crosses.y) == ("not measured", (2,), ("0",))


def test_numbers_below_zero_are_centred() -> None:
    figure = draw.effect_map(np.array([[0.5, -2.0]]), layers=[7], title="Change")
    assert [colour for _, colour in figure.layout.coloraxis.colorscale] == SIGNED_COLOURS
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-2.0, 2.0)
    assert (figure.layout.title.text, len(figure.data)) == ("Change", 1)
    assert figure.data[0].text[0][1] == "L7H1<br>−2"
    assert draw.effect_map(np.array([[0.5, 2.0]]), signed=True).layout.coloraxis.cmin == -2.0


def test_a_table_with_a_row_for_each_head() -> None:
    """Layers 2 and 5; layer 5 lacks head 0."""
    rows = [(5, 1, 0.3), (2, 0, 0.1), (2, 1, 0.2)]
    figure = draw.effect_map(pd.DataFrame(rows, columns=["layer", "head", "entropy"]))
    np.testing.assert_array_equal(np.array(figure.data[0].z), [[0.1, 0.2], [np.nan, 0.3]])
    assert figure.data[0].y == ("2", "5")
    assert figure.data[0].customdata[1][1] == [5, 1]


def test_what_is_no_map() -> None:
    refuses(r"must be \[layer head\] of 2 layers; got the shapes \(2, 3, 4\)", draw.effect_map, np.zeros((2, 3, 4)))
    with pytest.raises(InputError, match=r"one column of values; its value columns are a, b"):
        draw.effect_map(pd.DataFrame({"layer": [0], "head": [0], "a": [1.0], "b": [2.0]}))
    refuses("got duplicates", draw.effect_map, pd.DataFrame({"layer": [0, 0], "head": [1, 1], "a": [1.0, 2.0]}))
