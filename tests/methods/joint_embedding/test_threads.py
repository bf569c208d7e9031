"""Heads measured in threads give the same numbers as heads measured one by one."""

import threading
from collections.abc import Iterator

import pytest
import torch

from attnmech.methods.joint_embedding.threads import in_threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_have_none_of_their_own_and_leave_none_changed() -> None:
    inside = in_threads(lambda number: (number, torch.get_num_threads()), 6)
    assert inside == [(number, 1) for number in range(6)] and torch.get_num_threads() == 2
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda number: 1 // number, 3)
    assert torch.get_num_threads() == 2
