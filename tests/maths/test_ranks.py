"""Correlations, and the size of blocks and steps by device."""

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from attnmech.maths import blocks
from attnmech.maths.blocks import block_bytes
from attnmech.maths.ranks import plain_correlation, rank_correlation
from attnmech.runs.engine import step_tokens


def test_ranks_with_ties() -> None:
    x, y = torch.tensor([1.0, 2.0, 2.0, 5.0, 3.0]), torch.tensor([4.0, 4.0, 1.0, 0.0, 2.0])
    assert rank_correlation(x, y) == pytest.approx(float(spearmanr(x, y).statistic))
    assert plain_correlation(x, y) == pytest.approx(float(pearsonr(x, y).statistic))


def test_nothing_to_correlate() -> None:
    assert math.isnan(rank_correlation(torch.ones(5), torch.arange(5).float()))
    assert math.isnan(rank_correlation(torch.ones(1), torch.ones(1)))


@pytest.mark.parametrize(
    ("free", "expected", "tokens"),
    [(80 * 2**30, 256 * 2**20, 21_845), (2**30, 64 * 2**20, 5461), (2**24, 8 * 2**20, 682), (2**20, 8 * 2**20, 682)],
)
def test_blocks_and_steps_on_an_accelerator_take_a_share_of_its_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: int, tokens: int
) -> None:
    module = SimpleNamespace(mem_get_info=lambda device: (free, 80 * 2**30))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    blocks._share.cache_clear()
    assert block_bytes(torch.device("cuda")) == expected
    assert step_tokens(4 * 3072, torch.device("cuda")) == tokens


def test_devices_that_do_not_say_how_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    blocks._share.cache_clear()
    assert block_bytes(torch.device("mps")) == 256 * 2**20
    assert block_bytes(torch.device("cpu")) == 8 * 2**20
