"""Sets of the same shape as a tested set: the same number of heads in each of its layers, or in other layers."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from random import Random
from typing import Final

from ...errors import InputError
from ...interventions import Head

FEWEST: Final = 20  # with fewer sets in the same layers no p-value could be below 0.05: other layers' sets are added
HeadSet = tuple[Head, ...]


@dataclass(frozen=True)
class Shape:
    """The sets of one shape: how many exist, and which are measured."""

    sets: tuple[HeadSet, ...]  # the tested set, followed by the controls
    possible: int  # the number of sets of the shape, including the tested set
    wider: bool  # whether controls also come from other layers


def same_shape(heads: Sequence[Head], layers: Sequence[int], n_heads: int, most: int, seed: int = 0) -> Shape:
    """Returns the sets with the same number of heads in each of the same layers: all sets, or `most` drawn with `seed`.

    If there are fewer than `FEWEST`, it returns the sets with the same numbers of heads per layer in any of `layers`.

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
            dict(zip(some_layers, order, strict=True))
            for some_layers in combinations(layers, len(counts))
            for order in sorted(set(permutations(counts)))
        ]
        wider = len(plans) > 1
    possible = _count(plans, n_heads)
    if possible < 2:
        raise InputError(
            f"there is no other set of the same shape to compare with: `heads` has {len(tested)} heads, and the model "
            f"has {n_heads} heads per layer and {len(layers)} layers. Test fewer heads."
        )
    others: Iterator[HeadSet]
    if possible <= most:
        others = (control for plan in plans for control in _of_plan(plan, n_heads) if control != tested)
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
    """Draws distinct sets with equal probability, without the tested set."""
    weights = [math.prod(math.comb(n_heads, size) for size in plan.values()) for plan in plans]
    seen = {tested}
    while len(seen) <= count:
        (plan,) = rng.choices(plans, weights)
        control = tuple(
            (layer, head) for layer, held in sorted(plan.items()) for head in sorted(rng.sample(range(n_heads), held))
        )
        if control not in seen:
            seen.add(control)
            yield control
