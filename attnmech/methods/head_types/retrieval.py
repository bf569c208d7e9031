"""Measures retrieval from long texts: whether a head attends most to the token that the model then produces.

Formulas: docs/formulas.md#head-types.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...maths.intervals import LEVEL, TextMeans
from ...model.attention.observed import RowBlock
from ...model.run.hooked import HookedModel
from ...runs.reducer import Reducer, Run, Source, State
from .repeated import COUNT, first_token, ordinary_tokens

NEEDLE: Final = 12
"""The number of tokens of a needle."""

CUE: Final = 4
"""The number of these tokens at the end of a text, after which the others are requested."""

REQUESTED: Final = NEEDLE - CUE

LEAST_SHARE: Final = 0.1
"""A head is claimed only if it retrieves at least this share of the needles' tokens (Wu et al. 2024)."""


@dataclass(frozen=True)
class Haystacks:
    """Texts of random tokens around a needle. Each ends with the beginning of its needle, and the requested tokens.

    All texts have the same length; the needles lie at different depths.
    """

    begin: Int[Tensor, " first"]
    filler: Int[Tensor, "text filler"]
    needles: Int[Tensor, "text needle"]
    depths: Sequence[int]
    """The number of fillers before each needle."""

    @classmethod
    def of(cls, model: HookedModel, tokens: int, seed: int) -> "Haystacks":
        """Random texts of that many tokens; raises `InputError` if the model does not read them or the number does not
        fit.
        """
        if not model.causal or len(model.stacks) > 1:
            raise InputError("`context` needs a decoder alone, which predicts the next token; leave it out.")
        model.points.resolve(["logits"], None, model.refused)
        ordinary, begin = ordinary_tokens(model), first_token(model)
        least, limit = len(begin) + 2 * NEEDLE + COUNT, model.architecture.position_limit or tokens
        if not least <= tokens <= limit:
            raise InputError(
                f"`context` must be 0, or {least} tokens or more, and no more than the model reads ({limit:,}); got "
                f"{tokens}."
            )
        if len(ordinary) < 2 * NEEDLE:
            raise InputError(f"`context` needs {2 * NEEDLE} ordinary tokens; this model has {len(ordinary)}.")
        generator = torch.Generator().manual_seed(seed)
        fillers = tokens - len(begin) - 2 * NEEDLE
        shuffled = torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)] for _ in range(COUNT)])
        others = shuffled[:, NEEDLE:]
        chosen = torch.randint(others.shape[1], (COUNT, fillers), generator=generator)
        depths = [fillers * number // (COUNT - 1) for number in range(COUNT)]
        return cls(begin, others.gather(1, chosen), shuffled[:, :NEEDLE], depths)

    def __iter__(self) -> Iterator[Int[Tensor, "1 position"]]:
        for filler, needle, depth in zip(self.filler, self.needles, self.depths, strict=True):
            yield torch.cat((self.begin, filler[:depth], needle, filler[depth:], needle))[None]

    @property
    def rows(self) -> range:
        """The positions whose next tokens are requested."""
        end = len(self.begin) + self.filler.shape[1] + 2 * NEEDLE - 1
        return range(end - REQUESTED, end)

    @property
    def keys(self) -> Int[Tensor, "text requested"]:
        """The positions of the requested tokens in the needles."""
        return len(self.begin) + torch.tensor(self.depths)[:, None] + torch.arange(CUE, NEEDLE)

    @torch.no_grad()
    def produced(self, model: HookedModel) -> Float[Tensor, "text requested"]:
        """1 where the model's most probable next token is the requested one, else 0."""
        rows = slice(self.rows.start, self.rows.stop)
        highest = [model.run(ids)["logits"][0, rows].argmax(dim=-1).cpu() for ids in self]
        return (torch.stack(highest) == self.needles[:, CUE:]).double()


@dataclass(frozen=True)
class HighestKeys(Reducer):
    """The key with the highest probability in some rows; −1 if two keys tie."""

    rows: range

    def start(self, run: Run) -> State:
        """No keys yet."""
        shape = run.n_layers, run.n_heads, len(run.batch.ids), len(self.rows)
        return {"keys": torch.full(shape, -1, device=run.model.device), "documents": run.documents.clone()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds the rows of a block that are wanted."""
        start, stop = max(self.rows.start, block.rows.start), min(self.rows.stop, block.rows.stop)
        if start >= stop:
            return
        here, there = (slice(start - rows.start, stop - rows.start) for rows in (block.rows, self.rows))
        clear = block.top.first > block.top.second
        keys = torch.where(clear, block.top.key, -1)[:, :, here]
        state["keys"][block.index, :, :, there] = keys.transpose(0, 1)

    def merge(self, one: State, other: State) -> State:
        """The keys of both, in the order of the texts."""
        documents, order = torch.cat((one["documents"], other["documents"])).sort()
        return {"keys": torch.cat((one["keys"], other["keys"]), dim=2)[:, :, order], "documents": documents}

    def finish(self, state: State, source: Source) -> Tensor:
        """The keys alone."""
        return state["keys"]


@dataclass(frozen=True)
class Retrieval:
    """The share of the needles' tokens that each head retrieves: those that the model produces, while the head gives
    the needle's token its highest attention.
    """

    context: int
    """The number of tokens of each text."""
    produced: Float[Tensor, "needle requested"]
    """1 for tokens that the model produces, else 0."""
    retrieved: Float[Tensor, "measured head needle"]
    """The number of tokens of each needle that a head retrieves."""
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
        places = ((low > 0) & (self.share >= LEAST_SHARE)).nonzero().tolist()
        return pd.DataFrame(
            [
                {
                    "layer": layers[layer],
                    "head": head,
                    "type": "retrieval",
                    "score": float(self.share[layer, head]),
                    "baseline": float(baseline[layer, head]),
                    "score_low": float((baseline + low)[layer, head].clamp(0, 1)),
                    "score_high": float((baseline + high)[layer, head].clamp(0, 1)),
                    "top": float(self.share[layer, head]),
                    "position_alone": float("nan"),
                    "by_position_alone": False,
                    "rows": self.produced.numel(),
                }
                for layer, head in places
            ]
        )
