"""A pass uses the memory again that it or the last freed; what is much goes back at its end."""

import json
import os
import subprocess
import sys
from threading import Event, Thread
from typing import Any

import pytest

from attnmech.maths import allocation

SIZE = 40 * 2**20
PAGES = SIZE // 4096

# In a process of its own: what others freed would be there already.
SCRIPT = """
import json, resource
from pathlib import Path
import torch
from attnmech.maths import allocation
from attnmech.maths.allocation import freed_memory_kept

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def each():
    before = faults()
    torch.zeros({size} // 4).add_(1)
    return faults() - before

def passes(widest):
    with freed_memory_kept(widest):
        # Room for more than all four: glibc asks for more than a tensor needs, to align it, and what is small and freed
        # (a tensor's head) stays behind it, so that the next may not fit before it.
        torch.zeros(6 * {size} // 4).add_(1)
        return [each() for _ in range(4)]

each()
before = held()
usual, small, kept = [each() for _ in range(4)], passes(1), passes({size})
stays = held() - before
with freed_memory_kept({size}):
    again = [each() for _ in range(4)]
allocation.HELD = {size}
passes({size})
found = {{"usual": usual, "small": small, "kept": kept, "stays": stays, "again": again}}
print(json.dumps({{**found, "left": held() - before, "after": each()}}))
"""


def measured(**environment: str) -> dict[str, Any]:
    script = SCRIPT.format(size=SIZE)
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=usual | environment, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


@pytest.mark.skipif(allocation._glibc() is None, reason="the C library is not glibc")
def test_freed_memory_is_used_again_and_given_back_if_it_is_much() -> None:
    found = measured()
    assert min(found["usual"]) > PAGES / 2
    assert min(found["small"]) > PAGES / 2
    assert max(found["kept"]) < PAGES / 20
    assert 5 * SIZE < found["stays"] < 7 * SIZE
    assert max(found["again"]) < PAGES / 20
    assert found["left"] < SIZE / 4
    assert found["after"] > PAGES / 2


@pytest.mark.skipif(allocation._glibc() is None, reason="the C library is not glibc")
def test_what_a_user_told_the_c_library_stays() -> None:
    found = measured(MALLOC_MMAP_THRESHOLD_="65536")
    assert min(found["kept"]) > PAGES / 2


class _Library:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def mallopt(self, name: int, value: int) -> None:
        if name == -1:
            self.told.append("keep" if value > allocation.HELD else "usual")

    def malloc_trim(self, _: int) -> None:
        self.told.append("trim")


@pytest.mark.parametrize(("grown", "then"), [(allocation.HELD, []), (allocation.HELD + 1, ["trim"])])
def test_the_last_of_several_threads_gives_it_back(
    monkeypatch: pytest.MonkeyPatch, grown: int, then: list[str]
) -> None:
    library, held = _Library(), iter([7, 7 + grown, 8])
    monkeypatch.setattr(allocation, "_passes", allocation._Passes())
    monkeypatch.setattr(allocation, "_resident", lambda: next(held))
    monkeypatch.setattr(allocation, "_glibc", lambda: library)
    began, end = Event(), Event()

    def other() -> None:
        with allocation.freed_memory_kept(allocation.LEAST):
            began.set()
            end.wait(10)

    thread = Thread(target=other)
    thread.start()
    began.wait(10)
    with pytest.raises(KeyError), allocation.freed_memory_kept(allocation.LEAST):
        raise KeyError
    assert library.told == ["keep"]
    end.set()
    thread.join()
    assert library.told == ["keep", "usual", *then]
