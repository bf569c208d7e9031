"""The attention that keys and distances receive, block by block, against a loop over pairs."""

import pytest
import torch
from torch import Tensor

from attnmech.maths.received import Received, neighbours, received_by_distance
from attnmech.maths.softmax import softmax_of

BATCH, HEADS, QUERIES, KINDS = 2, 3, 23, 4
BLOCKS = [range(0, 1), range(1, 9), range(9, 16), range(16, 23)]


def summed(pattern: Tensor, classes: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The attention that each key and each distance receives, pair by pair."""
    keys = pattern.shape[3]
    by_key = torch.zeros(BATCH, HEADS, KINDS, keys, dtype=torch.float64)
    by_distance = torch.zeros(BATCH, HEADS, KINDS, max(QUERIES, tokens), dtype=torch.float64)
    for text in range(BATCH):
        for kind in range(KINDS):
            for row in range(QUERIES):
                if classes[text, kind, row]:
                    by_key[text, :, kind] += pattern[text, :, row]
                    for key in range(tokens):
                        by_distance[text, :, kind, abs(row - key)] += pattern[text, :, row, key]
    return by_key, by_distance


def add(received: Received, scores: Tensor, rows: range, at: Tensor | None) -> Tensor:
    """The pattern of a block, added to the sums."""
    pattern = softmax_of(scores)
    received.add(pattern, rows, neighbours(at, scores.shape[3]))
    return pattern


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("keys", "tokens"), [(23, 23), (25, 23), (31, 0)], ids=["self", "further keys", "cross"])
def test_block_by_block(dtype: torch.dtype, keys: int, tokens: int) -> None:
    """A row may be in several classes or in none; blocks may see fewer keys than there are."""
    torch.manual_seed(keys)
    scores = 3 * torch.randn(BATCH, HEADS, QUERIES, keys, dtype=dtype)
    classes = torch.rand(BATCH, KINDS, QUERIES) > 0.6
    classes[:, 0] = True
    received = Received.nothing(classes, HEADS, keys, tokens)
    whole = torch.zeros(BATCH, HEADS, QUERIES, keys, dtype=torch.float64)
    for rows in BLOCKS:
        seen = min(keys, rows.stop + 2) if tokens else keys
        whole[:, :, rows, :seen] = add(received, scores[:, :, rows, :seen], rows, None).double()
    by_key, by_distance = summed(whole, classes, tokens)
    close = {"rtol": 1e-6 if dtype == torch.float32 else 1e-14, "atol": 0.0}
    torch.testing.assert_close(received.by_key, by_key, **close)
    if tokens:
        torch.testing.assert_close(received.by_distance, by_distance, **close)
    else:
        assert not received.by_diagonal.any()


def test_gathered_keys() -> None:
    """Each block has different keys, in runs that begin anywhere and may have a single key."""
    torch.manual_seed(5)
    classes = torch.ones(BATCH, KINDS, QUERIES).bool()
    received = Received.nothing(classes, HEADS, QUERIES, QUERIES)
    whole = torch.zeros(BATCH, HEADS, QUERIES, QUERIES, dtype=torch.float64)
    for rows, at in zip(BLOCKS, ([0], [0, 1, 5, 8], [0, 3, 4, 5, 22], [2, 15, 16, 17, 18, 19, 20, 21]), strict=True):
        scores = torch.randn(BATCH, HEADS, len(rows), len(at), dtype=torch.float64)
        pattern = add(received, scores, rows, torch.tensor(at))
        whole[:, :, rows.start : rows.stop, at] = pattern
    by_key, by_distance = summed(whole, classes, QUERIES)
    torch.testing.assert_close(received.by_key, by_key, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(received.by_distance, by_distance, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("length", [9, None])
def test_a_block_alone_by_distance(length: int | None) -> None:
    """By i − j from −8 to 8 if the length is given, else by |i − j|; the block's keys go beyond its rows."""
    pattern = torch.rand(1, 2, 3, 7, dtype=torch.float64)
    found = received_by_distance(pattern, torch.ones(1, 1, 3).bool(), range(2, 5), length)
    wanted = torch.zeros(1, 2, 1, 17 if length else 7, dtype=torch.float64)
    for row in range(3):
        for key in range(7):
            wanted[0, :, 0, 2 + row - key + 8 if length else abs(2 + row - key)] += pattern[0, :, row, key]
    torch.testing.assert_close(found, wanted)
