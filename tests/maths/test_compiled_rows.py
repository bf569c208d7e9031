"""The compiled loops give what torch gives, row by row."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numba import TypingError
from torch import Tensor

from attnmech.maths import compiled
from attnmech.maths.compiled_rows import NEAR, measured_softmax, summed_by_diagonal, summed_by_key
from attnmech.maths.row_loops import shared_sum_by_key
from attnmech.maths.softmax import Attention, softmax_with_sink

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def close_to(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 1e-13


def scores_of(dtype: torch.dtype, keys: int = 301, rows: int = 5) -> Tensor:
    """Some with a wide spread, hidden cells, cells at −∞, a row that sees nothing, ties, and one key far above."""
    torch.manual_seed(keys)
    scores = torch.randn(2, 3, rows, keys, dtype=dtype) * torch.tensor([0.1, 3.0, 30.0], dtype=dtype)[:, None, None]
    lowest = torch.finfo(dtype).min
    scores[0, 0, 0, keys // 3 :] = lowest
    scores[0, 1, 1, ::2] = -torch.inf
    scores[0, 1, 1, -1] = 0.5
    scores[0, 2, 2] = lowest
    scores[1, 0, 3, [0, -1]] = 7.0
    scores[1, 1, 4, keys // 2] = 300.0
    return scores


@BOTH
@pytest.mark.parametrize("keys", [1, 2, 15, 128, 301, 2049, 5003])
@pytest.mark.parametrize("with_sink", [False, True])
def test_softmax_and_what_follows_from_it(dtype: torch.dtype, keys: int, with_sink: bool) -> None:
    scores, rows = scores_of(dtype, keys), range(40, 45)
    sink = torch.tensor([-2.0, 0.3, 9.0], dtype=dtype) if with_sink else None
    tokens = max(1, keys - 2)
    pattern, at_sink, found = measured_softmax(scores, sink, rows, torch.arange(tokens))

    wide = None if sink is None else sink.double()
    wanted, mass = softmax_with_sink(scores.double(), wide)
    close = close_to(dtype)
    torch.testing.assert_close(pattern.double(), wanted, rtol=4 * close, atol=close)
    assert (at_sink is None) == (mass is None)
    if at_sink is not None and mass is not None:
        torch.testing.assert_close(at_sink.double(), mass, rtol=4 * close, atol=close)
    best = wanted.topk(min(2, keys), dim=-1).values
    assert torch.equal(pattern.gather(-1, found.key[..., None])[..., 0], found.first)
    assert torch.equal(found.first, pattern.amax(dim=-1))
    others = pattern.scatter(-1, found.key[..., None], -1.0).amax(dim=-1).clamp_min(0)
    assert torch.equal(found.second, others)
    torch.testing.assert_close(found.first.double(), best[..., 0], rtol=4 * close, atol=close)
    entropy = -torch.xlogy(wanted, wanted).sum(dim=-1)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=4 * close, atol=8 * close)
    far = (torch.tensor(list(rows))[:, None] - torch.arange(tokens)).abs().double()
    distance = (wanted[..., :tokens] * far).sum(dim=-1)
    torch.testing.assert_close(found.distance.double(), distance, rtol=4 * close, atol=keys * close)


@BOTH
@pytest.mark.parametrize("first_row", [0, 3, 9, 40])
@pytest.mark.parametrize("keys", [1, 4, 11, 45])
def test_what_near_keys_get(dtype: torch.dtype, first_row: int, keys: int) -> None:
    scores, rows, begins = scores_of(dtype, keys), range(first_row, first_row + 5), torch.tensor([0, 2])
    pattern, _, found = measured_softmax(scores, None, rows, torch.arange(45), begins=begins)
    assert found.near is not None and found.near.shape == (4, 2, 3, 5)
    for text in range(2):
        for row, here in enumerate(rows):

            def of(places: Iterable[int], text: int = text, row: int = row) -> Tensor:
                there = [place for place in places if 0 <= place < keys]
                return pattern[text, :, row, there].double().sum(dim=-1)

            wanted = of([int(begins[text])]), of([here]), of([here - 1]), of(range(here - NEAR + 1, here + 1))
            torch.testing.assert_close(
                found.near[:, text, :, row].double(), torch.stack(wanted), rtol=4 * close_to(dtype), atol=0
            )
    assert measured_softmax(scores, None, rows, torch.arange(45))[2].near is None


@BOTH
def test_hidden_keys_weigh_exactly_nothing(dtype: torch.dtype) -> None:
    scores = scores_of(dtype)
    pattern, _, _ = measured_softmax(scores, None, range(5), torch.arange(301))
    hidden = (scores == torch.finfo(dtype).min) | (scores == -torch.inf)
    hidden[0, 2, 2] = False  # sees nothing: uniform, as in torch
    assert bool((pattern[hidden] == 0).all())
    torch.testing.assert_close(pattern[0, 2, 2], torch.full((301,), 1 / 301, dtype=dtype))


@BOTH
def test_the_highest_key_of_equal_ones_is_tied(dtype: torch.dtype) -> None:
    scores = torch.zeros(1, 1, 2, 700, dtype=dtype)
    scores[0, 0, 0, [300, 650]] = 5.0
    scores[0, 0, 1, 699] = 5.0
    pattern, _, found = measured_softmax(scores, None, range(2), torch.arange(700))
    assert found.key.tolist() == [[[300, 699]]]
    top = Attention(pattern, scores, found).top
    assert (top.first == top.second).tolist() == [[[True, False]]]


@BOTH
@pytest.mark.parametrize("bad", [math.nan, -math.nan])
def test_nan_stays_nan(dtype: torch.dtype, bad: float) -> None:
    scores = scores_of(dtype)
    scores[1, 2, 1, 17] = bad
    pattern, _, found = measured_softmax(scores, None, range(5), torch.arange(301))
    assert bool(pattern[1, 2, 1].isnan().all())
    assert bool(found.entropy[1, 2, 1].isnan())
    assert bool(pattern[1, 2, 0].isfinite().all())


@BOTH
def test_sums_by_class(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    pattern = torch.rand(2, 3, 5, 11, dtype=dtype)
    classes = torch.rand(2, 4, 5) > 0.4  # a row may be in several classes, or in none
    by_key, by_diagonal = torch.zeros(2, 3, 4, 11).double(), torch.zeros(2, 3, 4, 15).double()
    for text in range(2):
        for kind in range(4):
            for row in range(5):
                if classes[text, kind, row]:
                    by_key[text, :, kind] += pattern[text, :, row]
                    for key in range(11):
                        by_diagonal[text, :, kind, key - row + 4] += pattern[text, :, row, key]
    close = {"rtol": close_to(dtype), "atol": 0.0}
    torch.testing.assert_close(summed_by_key(pattern, classes).double(), by_key, **close)
    torch.testing.assert_close(summed_by_diagonal(pattern, classes).double(), by_diagonal, **close)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, however many torch was given."""
    monkeypatch.setattr(compiled.torch, "get_num_threads", lambda: 3)


@pytest.mark.usefixtures("threads")
def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(2, 7, 64, 300)
    everyone, at = torch.ones(2, 1, 64).bool(), torch.arange(300)

    def once() -> tuple[Tensor, Tensor, Tensor]:
        pattern, _, found = measured_softmax(scores, None, range(64), at)
        return pattern, found.entropy, summed_by_key(scores, everyone)

    with monkeypatch.context() as alone:
        alone.setattr(compiled.torch, "get_num_threads", lambda: 1)
        wanted = once()
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: once(), range(40)):
            assert all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("things", [1, 2, 3, 1000])
def test_everything_is_done_once(things: int) -> None:
    pattern, into = torch.ones(things, 2, 2**15), torch.zeros(things, 1, 2**15)
    arrays = pattern.numpy(), torch.ones(things, 1, 2).bool().numpy(), into.numpy()
    compiled.in_threads(things, 2**16, shared_sum_by_key, arrays)
    assert bool((into == 2).all())


@pytest.mark.usefixtures("threads")
def test_an_error_reaches_the_caller() -> None:
    with pytest.raises(TypingError, match="missing a required argument"):
        compiled.in_threads(4, 2**20, shared_sum_by_key, ())


FORKED = """
import os
import numpy as np, torch
from attnmech.maths import compiled
from attnmech.maths.row_loops import shared_sum_by_key

torch.set_num_threads(2)
arrays = np.ones((64, 1, 2**10), np.float32), np.ones((64, 1, 1), bool), np.zeros((64, 1, 2**10), np.float32)
compiled.in_threads(64, 2**10, shared_sum_by_key, arrays)
child = os.fork()
compiled.in_threads(64, 2**10, shared_sum_by_key, arrays)
if child == 0:
    print(set(arrays[2].ravel().tolist()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    command = [sys.executable, "-c", FORKED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("{2.0}\n", "")


@pytest.mark.usefixtures("threads")
def test_an_interruption_waits_for_the_other_threads() -> None:
    """Their arrays are the caller's, who may free them."""
    ended = []

    def loop(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        compiled.in_threads(1000, 2**16, loop, ())
    assert len(ended) == 2


def test_what_is_not_taken() -> None:
    assert compiled.compiles(torch.zeros(3))
    assert not compiled.compiles(torch.zeros(3).half())
    assert not compiled.compiles(torch.zeros(3, requires_grad=True))
    assert not compiled.compiles(torch.zeros(3, device="meta"))


def test_distances_to_keys_that_were_gathered() -> None:
    scores, at = torch.randn(2, 3, 4, 6), torch.tensor([0, 3, 7, 8, 9, 20])
    pattern, _, found = measured_softmax(scores, None, range(8, 12), at)
    far = (torch.arange(8, 12)[:, None] - at).abs()
    torch.testing.assert_close(found.distance, (pattern * far).sum(dim=-1))
