"""Sums attention from words of one group to words of another, and to matched words, over the pairs of a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...batch import Batch
from ...maths.float64 import as_float64, float64_device
from ...model.attention.observed import RowBlock
from ...model.run.hooked import HookedModel
from ...runs.reducer import Reducer, Run, State
from ...runs.stream import stream
from ...runs.words import bare, members_of, split_words


@dataclass(frozen=True)
class Word:
    """A word of a text: its name, its first token, its number of tokens, and whether it counts."""

    name: str
    start: int
    tokens: int
    counts: bool


@dataclass(frozen=True)
class Matching:
    """Decides which words match a key word."""

    within: int
    factor: float
    counts: Mapping[str, int]
    group_of: Mapping[str, str]
    causal: bool

    def others(self, words: Sequence[Word], query: int, key: int) -> list[int]:
        """Returns the indices of the words that match a key word, for a query word."""
        q, k = words[query], words[key]
        far, frequent = q.start - k.start, self.counts[k.name]
        return [
            place
            for place, c in enumerate(words)
            if c.counts and c.name and c.name not in self.group_of and place != query and c.tokens == k.tokens
            and (q.start - c.start > 0) == (far > 0) and abs(q.start - c.start - far) <= self.within
            and frequent <= self.factor * self.counts[c.name] and self.counts[c.name] <= self.factor * frequent
        ]  # fmt: skip


Difference: TypeAlias = tuple[int, tuple[str, str], Tensor]
"""A matched pair: its direction, its words, and attention − baseline `[layer head]`."""


def sums_of_text(
    model: HookedModel,
    batch: Batch,
    text: str,
    match: Matching,
    directions: Sequence[tuple[str, str]],
    layers: Sequence[int],
) -> tuple[State, list[Difference]]:
    """Returns the sums of one text, `[direction layer head 1]`, its numbers of pairs and each matched pair's
    difference.
    """
    shape = len(directions), len(layers), model.n_heads, 1
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name in ("attention", "baseline")}
    sums |= {name: torch.zeros(len(directions), 1, dtype=torch.float64) for name in ("matched", "found")}
    pieces = split_words(text)
    if len({match.group_of.get(bare(piece)) for piece in pieces} - {None}) < 2:
        return sums, []
    member = members_of(model, batch, pieces)
    ordinary = ~(batch.is_special | batch.first)[0].cpu()
    words = [
        Word(
            bare(piece), int(own.argmax()), int(own.sum()), bool(bare(piece) and own.any() and ordinary[own > 0].all())
        )
        for piece, own in zip(pieces, member, strict=True)
    ]
    pairs = []
    in_group = [place for place, word in enumerate(words) if word.counts and word.name in match.group_of]
    for query, key in permutations(in_group, 2):
        names = match.group_of[words[query].name], match.group_of[words[key].name]
        if names[0] == names[1] or (match.causal and key > query):
            continue
        direction = directions.index(names)
        sums["found"][direction] += 1
        if others := match.others(words, query, key):
            pairs.append((direction, query, key, others))
    if not pairs:
        return sums, []
    queries = sorted({query for _, query, _, _ in pairs})
    (state,) = stream(model, batch, [AttentionToWords(member, tuple(queries))], layers=layers)
    differences: list[Difference] = []
    for direction, query, key, others in pairs:
        row = state["mass"][:, :, queries.index(query)]
        attention, baseline = row[..., key], row[..., others].mean(dim=-1)
        sums["matched"][direction] += 1
        sums["attention"][direction, ..., 0] += attention
        sums["baseline"][direction, ..., 0] += baseline
        differences.append((direction, (words[query].name, words[key].name), attention - baseline))
    return sums, differences


class AttentionToWords(Reducer):
    """Attention from some words of a text to all its words: a sum over key tokens, a mean over query tokens."""

    points = ()

    def __init__(self, member: Float[Tensor, "word position"], queries: tuple[int, ...]) -> None:
        self.member, self.queries = member, queries

    @property
    def options(self) -> dict[str, str]:
        """The query words."""
        return {"queries": str(self.queries)}

    def start(self, run: Run) -> State:
        """Sums of 0."""
        shape = run.n_layers, run.n_heads, len(self.queries), len(self.member)
        return {"mass": torch.zeros(shape, dtype=torch.float64, device=float64_device(run.model.device))}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        member = self.member.to(block.pattern)
        asks = member[list(self.queries)]
        asks = (asks / asks.sum(dim=-1, keepdim=True))[:, block.rows.start : block.rows.stop]
        got = asks @ block.pattern[0] @ member[:, : block.pattern.shape[-1]].T
        state["mass"][block.index] += as_float64(got)

    def merge(self, one: State, other: State) -> State:
        return {"mass": one["mass"] + other["mass"]}
