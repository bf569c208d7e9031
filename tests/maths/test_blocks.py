"""The size of blocks by device."""

from types import SimpleNamespace

import pytest
import torch

from attnmech.maths import blocks
from attnmech.maths.blocks import block_bytes


@pytest.mark.parametrize(("free", "expected"), [(80 * 2**30, 256 * 2**20), (2**30, 64 * 2**20), (2**20, 8 * 2**20)])
def test_blocks_of_an_accelerator_take_a_share_of_its_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    module = SimpleNamespace(mem_get_info=lambda device: (free, 80 * 2**30))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    blocks._share.cache_clear()
    assert block_bytes(torch.device("cuda")) == expected


def test_devices_that_do_not_say_how_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    blocks._share.cache_clear()
    assert block_bytes(torch.device("mps")) == 256 * 2**20
    assert block_bytes(torch.device("cpu")) == 8 * 2**20
