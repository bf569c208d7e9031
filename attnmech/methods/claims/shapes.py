"""Which sets of heads have the same shape as a tested one? As many heads in the same layers, or in as many layers."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from random import Random
from typing import Final

from ...errors import InputError
from ...interventions import Head

FEWEST: Final = 20
"""With fewer sets than this in the same layers, no p-value is below 0.05, so sets of other layers are added."""

HeadSet = tuple[Head, ...]


@dataclass(frozen=True)
class Shape:
    """All sets like a tested one, and those of them that are measured."""

    sets: tuple[HeadSet, ...]
    """The tested set first, then controls."""
    possible: int
    """How many sets of the shape there are, the tested one included."""
    wider: bool
    """Whether controls come from other layers too."""

    @property
    def enumerated(self) -> bool:
        """Whether every set of the shape is there."""
        return len(self.sets) == self.possible


def same_shape(heads: Sequence[Head], layers: Sequence[int], n_heads: int, most: int, seed: int = 0) -> Shape:
    """The sets with as many heads in the same layers, all of them if there are at most `most`, else drawn by `seed`.

    Where there are fewer than `FEWEST`, the sets with as many heads in each of as many layers, of any `layers`.

    >>> same_shape([(0, 1), (2, 3)], range(4), 8, most=1000).possible
    64
    >>> wide = same_shape([(2, 3)], range(4), 8, most=1000)
    >>> wide.possible, wide.wider, wide.sets[:2]
    (32, True, (((2, 3),), ((0, 0),)))
    """
    tested = tuple(sorted(heads))
    held = Counter(layer for layer, _ in tested)
    plans: list[Mapping[int, int]] = [held]
    wider = _count(plans, n_heads) < FEWEST
    if wider:
        counts = sorted(held.values())
        plans = [
            dict(zip(chosen, order, strict=True))
            for chosen in combinations(layers, len(counts))
            for order in sorted(set(permutations(counts)))
        ]
        wider = len(plans) > 1
    possible = _count(plans, n_heads)
    if possible < 2:
        raise InputError(
            f"there is no other set of {len(tested)} heads in as many layers to compare with: the model has {n_heads} "
            f"heads per layer and {len(layers)} layers. Test fewer heads."
        )
    others: Iterator[HeadSet]
    if possible <= most:
        others = (each for plan in plans for each in _of_plan(plan, n_heads) if each != tested)
    else:
        others = _drawn(plans, n_heads, most - 1, tested, Random(seed))
    return Shape((tested, *others), possible, wider)


def _count(plans: Sequence[Mapping[int, int]], n_heads: int) -> int:
    return sum(math.prod(math.comb(n_heads, count) for count in plan.values()) for plan in plans)


def _of_plan(plan: Mapping[int, int], n_heads: int) -> Iterator[HeadSet]:
    by_layer = [
        [tuple((layer, head) for head in some) for some in combinations(range(n_heads), count)]
        for layer, count in sorted(plan.items())
    ]
    for parts in product(*by_layer):
        yield tuple(head for part in parts for head in part)


def _drawn(
    plans: Sequence[Mapping[int, int]], n_heads: int, count: int, tested: HeadSet, rng: Random
) -> Iterator[HeadSet]:
    """Different sets other than the tested one, each as likely as any other."""
    weights = [math.prod(math.comb(n_heads, each) for each in plan.values()) for plan in plans]
    seen = {tested}
    while len(seen) <= count:
        (plan,) = rng.choices(plans, weights)
        found = tuple(
            (layer, head) for layer, held in sorted(plan.items()) for head in sorted(rng.sample(range(n_heads), held))
        )
        if found not in seen:
            seen.add(found)
            yield found
