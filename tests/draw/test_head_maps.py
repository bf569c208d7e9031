"""A map of layers × heads shows any numbers, with a cross for a missing one."""

import numpy as np
import pandas as pd
import pytest
import torch

from attnmech import draw
from attnmech.draw.head_maps import SIGNED_COLOURS
from attnmech.draw.style import SCORE_COLOURS
from attnmech.errors import InputError

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
    with pytest.raises(InputError, match=r"must be \[layer head\] of 2 layers; got the shapes \(2, 3, 4\)"):
        draw.effect_map(np.zeros((2, 3, 4)))
    with pytest.raises(InputError, match=r"one column of values; its value columns are a, b"):
        draw.effect_map(pd.DataFrame({"layer": [0], "head": [0], "a": [1.0], "b": [2.0]}))
    with pytest.raises(InputError, match="got duplicates"):
        draw.effect_map(pd.DataFrame({"layer": [0, 0], "head": [1, 1], "a": [1.0, 2.0]}))
