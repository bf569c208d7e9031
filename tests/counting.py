"""Counts of documents and of passes, for tests of interrupted runs."""

import math
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents as demo_documents
from attnmech.runs.engine import Texts

State = dict[str, Tensor]

TEXTS = demo_documents(120, seed=5)


class Lengths(am.Reducer):
    """The number of times each document was seen, its tokens, and the sum of its rows' largest weights, by layer."""

    def __init__(self, most: int) -> None:
        self.most = most

    def start(self, run: am.reducers.Run) -> State:
        state = {
            "times": torch.zeros(self.most, dtype=torch.long),
            "tokens": torch.zeros(self.most, dtype=torch.long),
            "largest": torch.zeros(run.n_layers, self.most, dtype=torch.float64),
        }
        state["times"][run.documents] += 1
        state["tokens"][run.documents] = run.batch.lengths
        return state

    def add(self, state: State, block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
        largest = block.pattern.double().amax(dim=-1).masked_fill(~block.real[:, None], 0.0).sum(dim=(1, 2))
        state["largest"][block.index].index_add_(0, run.documents, largest)

    def merge(self, one: State, other: State) -> State:
        return {name: one[name] + other[name] for name in one}


class Slow(Lengths):
    def start(self, run: am.reducers.Run) -> State:
        time.sleep(0.05)
        return super().start(run)


class Poisoned(Lengths):
    """The same, but one document kills its process."""

    def __init__(self, most: int, number: int) -> None:
        super().__init__(most)
        self.number = number

    def start(self, run: am.reducers.Run) -> State:
        if self.number in run.documents.tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().start(run)


def counted_passes(monkeypatch: pytest.MonkeyPatch, most: float = math.inf) -> list[int]:
    """Counts the changes in each pass of changes of a sweep; beyond `most` passes, each raises KeyboardInterrupt."""
    real, measured = Texts.after, list[int]()

    def counting(self: Any, changes: Any, *more: Any) -> Any:
        if len(measured) >= most:
            raise KeyboardInterrupt
        measured.append(len(changes))
        return real(self, changes, *more)

    monkeypatch.setattr(Texts, "after", counting)
    return measured
