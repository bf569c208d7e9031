"""Maps of weights from any code keep the numbers and escape names; errors say what to select."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from attnmech.draw import edges, heatmap, heatmaps
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
    with pytest.raises(InputError, match=re.escape("`weights` must have the axes [query key]; got the shape (2, 3, 5")):
        heatmap(weights())
    with pytest.raises(InputError, match=re.escape("average_attn_weights=False")):
        heatmaps(weights()[0, 0])
    with pytest.raises(InputError, match="one query for each of the 2 tokens; got 5"):
        heatmap(weights()[0, 0], NAMES[:2])
    with pytest.raises(InputError, match="must hold probabilities"):
        edges(torch.randn(5, 5))
