"""Repeated random tokens, and retrieval from long texts: whether a head attends to the token that the model produces.

Formulas: docs/formulas.md#head-types.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..maths.intervals import LEVEL, TextMeans
from ..model.attention.observed import RowBlock
from ..model.run.hooked import HookedModel
from ..results.by_layer import table_of
from .haystacks import COUNT, first_token, ordinary_tokens
from .reducer import Reducer, Run, State

_SHORTEST, _LONGEST = 14, 60  # of the repeated part; lengths differ, so that copies are at no fixed distance


TOKENS: Final = COUNT * (_SHORTEST + _LONGEST + 1)  # the total number of tokens


def repeated_sequences(model: HookedModel, *, seed: int = 0) -> Iterator[Int[Tensor, "1 position"]]:
    """Yields repeated sequences of distinct random tokens, each after the token with which the model's texts begin.

    Raises `InputError` for a model that reads no tokens, or too few.
    """
    ordinary, begin = ordinary_tokens(model), first_token(model)
    limit = model.longest_text or 2 * _LONGEST + 1
    longest = min(_LONGEST, (limit - len(begin)) // 2, len(ordinary))
    if longest < 4:
        raise InputError(
            f"this model reads {limit} tokens and has {len(ordinary)} ordinary tokens, too few for two copies of a "
            "sequence; give `inputs`."
        )
    shortest = min(_SHORTEST, max(2, longest // 2))
    generator = torch.Generator().manual_seed(seed)
    for number in range(COUNT):
        length = shortest + (longest - shortest) * number // (COUNT - 1)
        chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[:length]]
        yield torch.cat((begin, chosen, chosen))[None]


LEAST_SHARE: Final = 0.1  # a claimed head retrieves at least this share of the needles' tokens (Wu et al. 2024)


@dataclass(frozen=True)
class NeedleRows(Reducer):
    """The key with the highest probability in some rows, -1 if two keys tie; and the probability of a target."""

    rows: range
    targets: Int[Tensor, "text row"]  # the position of each row's target, by the text's number

    def start(self, run: Run) -> State:
        """No keys yet."""
        shape, device = (run.n_layers, run.n_heads, len(run.batch.ids), len(self.rows)), run.model.device
        state = {"highest": torch.full(shape, -1, device=device), "on_target": torch.zeros(shape, device=device)}
        return {**state, "documents": run.documents.clone()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds the rows of a block that are wanted."""
        start, stop = max(self.rows.start, block.rows.start), min(self.rows.stop, block.rows.stop)
        if start >= stop:
            return
        here, there = (slice(start - rows.start, stop - rows.start) for rows in (block.rows, self.rows))
        clear = block.top.first > block.top.second
        keys = torch.where(clear, block.top.key, -1)[:, :, here]
        state["highest"][block.index, :, :, there] = keys.transpose(0, 1)
        targets = self.targets[run.documents, there].to(keys.device)[:, None, :, None].expand(*keys.shape, 1)
        on_target = block.pattern[:, :, here].gather(-1, targets)[..., 0]
        state["on_target"][block.index, :, :, there] = on_target.transpose(0, 1)

    def merge(self, one: State, other: State) -> State:
        """The rows of both, in the order of the texts."""
        return in_order(one, other, axis=2)


def in_order(one: State, other: State, *, axis: int) -> State:
    """The tensors of both states joined along their axis of texts, in the order of the texts' numbers, `documents`."""
    documents, order = torch.cat((one["documents"], other["documents"])).sort()
    joined = {name: torch.cat((one[name], other[name]), dim=axis) for name in one if name != "documents"}
    ordered = {name: value.index_select(axis, order.to(value.device)) for name, value in joined.items()}
    return {**ordered, "documents": documents}


@dataclass(frozen=True)
class Retrieval:
    """The share of the needles' tokens that each head retrieves: those that the model produces, while the head gives
    the needle's token its highest attention.
    """

    context: int  # the number of tokens of each text
    produced: Float[Tensor, "needle requested"]  # 1 for tokens that the model produces, else 0
    retrieved: Float[Tensor, "measured head needle"]  # the number of tokens of each needle that a head retrieves
    by_position: Float[Tensor, "measured head needle"]
    """The mean number that it would retrieve if its highest keys were those of this text, but the needle lay where it
    lies in the other texts."""

    @classmethod
    def of(
        cls,
        context: int,
        produced: Float[Tensor, "needle requested"],
        highest: Int[Tensor, "measured head needle requested"],
        keys: Int[Tensor, "needle requested"],
    ) -> "Retrieval":
        """Counts the tokens whose key is a head's highest, and those for which a key of another text would be.

        >>> keys = torch.tensor([[5, 6], [9, 10]])
        >>> highest = torch.tensor([[5, 6], [5, 10]])[None, None]
        >>> counts = Retrieval.of(20, torch.ones(2, 2), highest, keys)
        >>> counts.retrieved.tolist(), counts.by_position.tolist()
        ([[[2.0, 1.0]]], [[[0.0, 1.0]]])
        """
        hits = ((highest == keys) * produced).sum(dim=-1)
        at_any = (highest[..., None, :] == keys).sum(dim=-2)
        elsewhere = ((at_any - (highest == keys).long()) * produced).sum(dim=-1) / (len(keys) - 1)
        return cls(context, produced, hits.double(), elsewhere.double())

    @property
    def share(self) -> Float[Tensor, "measured head"]:
        """The retrieval score of Wu et al. 2024."""
        return self.retrieved.sum(dim=-1) / self.produced.numel()

    def claims(self, layers: Sequence[int]) -> pd.DataFrame:
        """One row per head that retrieves, with the columns of `HeadTypes.to_frame`.

        The t interval of score − baseline over texts has an error rate of 5 % / (number of heads). Most heads retrieve
        a token or two by chance, and in replicates of so few `TextMeans.simultaneous` finds no bound.
        """
        requested = torch.full((len(self.produced),), float(self.produced.shape[1]))
        means = TextMeans.of_ratio(self.retrieved - self.by_position, requested)
        low, high = means.interval(1 - (1 - LEVEL) / self.share.numel())
        baseline = self.by_position.sum(dim=-1) / self.produced.numel()
        columns = {
            "score": self.share,
            "baseline": baseline,
            "score_low": (baseline + low).clamp(0, 1),
            "score_high": (baseline + high).clamp(0, 1),
            "top": self.share,
        }
        frame = table_of({"layer": layers, "head": range(self.share.shape[1])}, columns)
        frame.insert(2, "type", "retrieval")
        frame = frame.assign(position_alone=float("nan"), by_position_alone=False, rows=self.produced.numel())
        claimed = (low > 0) & (self.share >= LEAST_SHARE)
        return frame[claimed.flatten().numpy()].reset_index(drop=True)
