"""Pairs of clean and corrupted prompts: checks that they pair up, and captures activations of both runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..basics.arguments import integer, listed, shown
from ..errors import InputError
from ..interventions import Positions, Values
from ..model.run.hooked import HookedModel
from .ablations import one_by_one
from .corpus import CorpusBatch, batches, contents_of
from .reference import captured


@dataclass(frozen=True)
class PromptPairs:
    """Clean prompts, each paired with a corrupted prompt of the same length."""

    clean: list[CorpusBatch]
    corrupted: list[CorpusBatch]
    prompts: tuple[Any, Any]  # the clean and the corrupted prompts, as the caller passed them
    lengths: list[int]  # the length of each pair, in tokens of the output's stack
    stack: str

    @classmethod
    def of(cls, model: HookedModel, clean: Any, corrupted: Any, bos: bool | None) -> "PromptPairs":
        label = model.output_stack.label
        parts, others = (
            list(batches(prompts_of_run, model, window=4096, bos=bos)) for prompts_of_run in (clean, corrupted)
        )
        prompts = _prompts(parts, label)
        _check_pairs(prompts, _prompts(others, label))
        for number, (digest, other) in enumerate(zip(contents_of(parts), contents_of(others), strict=True)):
            if digest == other:
                raise InputError(
                    f"the two prompts of a pair must differ; those of pair {number} are the same, so patching changes "
                    "nothing. Leave the pair out."
                )
        return cls(parts, others, (clean, corrupted), [len(prompt.queries) for prompt in prompts], label)

    @cached_property
    def contents(self) -> list[tuple[int, int]]:
        """The digests of both prompts of each pair; the same for copies of a pair."""
        return list(zip(contents_of(self.clean), contents_of(self.corrupted), strict=True))

    def values(
        self, model: HookedModel, at: str, layers: Sequence[int], *, corrupted: bool = False
    ) -> dict[int, Values]:
        return self.values_at(model, {at: layers}, corrupted=corrupted)[at]

    def values_at(
        self, model: HookedModel, points: Mapping[str, Sequence[int]], *, corrupted: bool = False
    ) -> dict[str, dict[int, Values]]:
        """Returns the activations of one run at several points, by point and layer; `points` has their layers."""
        parts, run = (self.corrupted, "corrupted") if corrupted else (self.clean, "clean")
        names = {model.output_stack.point(point): point for point in points}
        by_point = captured(model, parts, {name: points[point] for name, point in names.items()})
        return {names[name]: one_by_one(Values(values, f"that of the {run} run")) for name, values in by_point.items()}

    def check_positions(self, positions: Positions) -> list[int]:
        """The positions sorted, negative ones from the end; `InputError` for one beyond the shortest prompt."""
        wanted = '"last" or a list of positions'
        numbers = [-1] if isinstance(positions, str) and positions == "last" else listed("positions", positions, wanted)
        shortest = min(self.lengths)
        if not numbers:
            raise InputError("`positions` must name at least one position; got an empty list.")
        for number in numbers:
            try:
                if -shortest <= integer(number) < shortest:
                    continue
            except TypeError:
                pass
            raise InputError(
                f"`positions` must be from {-shortest} to {shortest - 1} (the shortest prompt has {shortest} tokens); "
                f"got {shown(number)}."
            )
        return sorted({integer(number) for number in numbers})

    def one_length(self, at: str) -> int:
        """Returns the length that all prompts share; raises `InputError` if their lengths differ."""
        first = self.lengths[0]
        for number, length in enumerate(self.lengths):
            if length != first:
                raise InputError(
                    f"at={at!r} is indexed by position, so all pairs must have the same length; pair 0 has {first} "
                    f"tokens, pair {number} has {length}. Patch the pairs of each length separately."
                )
        return first


@dataclass(frozen=True)
class _Prompt:
    """The real tokens of one prompt, and the position at which they begin."""

    queries: tuple[str, ...]
    keys: tuple[str, ...]  # the encoder's tokens in a model that has an encoder; else the same as `queries`
    begins: tuple[int, int]


def _prompts(parts: Sequence[CorpusBatch], stack: str) -> list[_Prompt]:
    prompts: dict[int, _Prompt] = {}
    for part in parts:
        sides = part.batch.queries(stack), part.batch
        for row, number in enumerate(part.documents.tolist()):
            real = [side.mask[row].nonzero()[:, 0].tolist() for side in sides]
            queries, keys = (tuple(side.tokens[row][i] for i in at) for side, at in zip(sides, real, strict=True))
            prompts[number] = _Prompt(queries, keys, (real[0][0], real[1][0]))
    return [prompts[number] for number in sorted(prompts)]


def _check_pairs(clean: Sequence[_Prompt], corrupted: Sequence[_Prompt]) -> None:
    if len(clean) != len(corrupted):
        raise InputError(
            f"every clean prompt needs a corrupted one; got {len(clean)} clean and {len(corrupted)} corrupted."
        )
    for number, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
        for mine, yours in ((one.keys, other.keys), (one.queries, other.queries)):
            if len(mine) != len(yours):
                raise InputError(
                    f"the two prompts of a pair must have the same number of tokens; pair {number} has {len(mine)} "
                    f"clean, {list(mine)}, and {len(yours)} corrupted, {list(yours)}. Use words with the same number "
                    "of tokens."
                )
        if one.begins != other.begins:
            raise InputError(
                f"the two prompts of a pair must start at the same position; with its padding, pair {number} starts "
                f"at {one.begins[0]} (clean) and {other.begins[0]} (corrupted)."
            )
