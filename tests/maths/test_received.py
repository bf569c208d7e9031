"""The attention that keys and distances receive, block by block, against a loop over pairs."""

import torch
from torch import Tensor

from attnmech.maths.received import Received, neighbours
from attnmech.maths.softmax import softmax_of

BATCH, HEADS, QUERIES, KINDS = 2, 3, 23, 4
BLOCKS = [range(0, 1), range(1, 9), range(9, 16), range(16, 23)]


def summed(pattern: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """The attention that each key and each distance receives, pair by pair."""
    by_key = torch.zeros(BATCH, HEADS, KINDS, QUERIES, dtype=torch.float64)
    by_distance = torch.zeros(BATCH, HEADS, KINDS, QUERIES, dtype=torch.float64)
    for text in range(BATCH):
        for kind in range(KINDS):
            for row in range(QUERIES):
                if classes[text, kind, row]:
                    by_key[text, :, kind] += pattern[text, :, row]
                    for key in range(QUERIES):
                        by_distance[text, :, kind, abs(row - key)] += pattern[text, :, row, key]
    return by_key, by_distance


def test_gathered_keys() -> None:
    """Each block has different keys, in runs that begin anywhere and may have a single key."""
    torch.manual_seed(5)
    classes = torch.rand(BATCH, KINDS, QUERIES) > 0.6
    received = Received.nothing(classes, HEADS, QUERIES, QUERIES)
    whole = torch.zeros(BATCH, HEADS, QUERIES, QUERIES, dtype=torch.float64)
    for rows, at in zip(BLOCKS, ([0], [0, 1, 5, 8], [0, 3, 4, 5, 22], [2, 15, 16, 17, 18, 19, 20, 21]), strict=True):
        scores = torch.randn(BATCH, HEADS, len(rows), len(at), dtype=torch.float64)
        pattern = softmax_of(scores)
        received.add(pattern, rows, neighbours(torch.tensor(at), len(at)))
        whole[:, :, rows.start : rows.stop, at] = pattern
    by_key, by_distance = summed(whole, classes)
    torch.testing.assert_close(received.by_key, by_key, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(received.by_distance, by_distance, rtol=1e-14, atol=0.0)
