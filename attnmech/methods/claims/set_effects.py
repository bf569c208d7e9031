"""Sets of the same shape, and how removing whole sets of heads affects a task: one sweep measures many sets once."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations, product
from pathlib import Path
from random import Random
from typing import Any, Final

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import option, whole_number
from ...basics.public import public
from ...errors import InputError
from ...interventions import Head, Intervention, Values
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel
from ...runs.ablations import METHODS, Ablations, check_template, each_head, mean_of, reread
from ...runs.engine import Change
from ...runs.sweep import Swept, run_sweep
from ...runs.workers import Workers
from .tasks import Task, group_means

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


@dataclass(frozen=True)
class Removal:
    """One way to remove heads from a model."""

    model: HookedModel
    method: str | Intervention
    reference: Values | None  # for method="mean", the means of every layer
    seed: int = 0
    bos: bool | None = None

    @classmethod
    def of(
        cls, model: HookedModel, method: str | Intervention, reference: Any, seed: int, bos: bool | None
    ) -> "Removal":
        """Computes means over the reference texts if the method needs them."""
        stack = model.output_stack
        if isinstance(method, Intervention):
            check_template(model, method)
            if method.by_kv_head and stack.n_kv_heads < stack.n_heads:
                raise InputError(
                    f"in this model, heads share k and v, so {method.point} of one head cannot be changed; use an "
                    "intervention at z, q, the scores or the pattern."
                )
        elif method not in METHODS:
            raise InputError(f"`method` must be one of {', '.join(METHODS)}, or an am.Intervention; got {method!r}.")
        means = None
        if method == "mean":
            means = mean_of(model, reference, list(stack.layers), bos=bos)
        return cls(model, method, means, seed, bos)

    @property
    def name(self) -> str:
        """The method's name in a result."""
        return each_head(self.method) if isinstance(self.method, Intervention) else self.method

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers in which heads can be changed: those for which an intervention has values, or all."""
        layers = tuple(self.model.output_stack.layers)
        values = getattr(self.method.edit, "values", None) if isinstance(self.method, Intervention) else None
        return layers if values is None else tuple(layer for layer in layers if layer in values.by_layer)

    @property
    def heads(self) -> HeadSet:
        """All heads of these layers."""
        return tuple((layer, head) for layer in self.layers for head in range(self.model.output_stack.n_heads))

    def changes(self, inputs: Any, sets: Sequence[HeadSet]) -> list[Change]:
        """Returns the changes that remove each set on these texts."""
        if isinstance(self.method, Intervention):
            return [(replace(self.method, heads=heads),) for heads in sets]
        heads = sorted({head for head_set in sets for head in head_set})
        ablations = Ablations.of(
            self.model, inputs, heads, self.method, reference=self.reference, seed=self.seed, bos=self.bos
        )
        return [tuple(map(ablations.of_head, head_set)) for head_set in sets]


@dataclass(frozen=True)
class Measuring:
    """The settings of a sweep besides its texts and changes."""

    removal: Removal
    memory: float = 1.0
    progress: bool = False
    engine: str | Workers = "local"

    def swept(
        self,
        task: Task,
        sets: Sequence[HeadSet],
        journal: str | Path | None = None,
        noted: Mapping[str, Any] | None = None,
    ) -> Swept:
        """Measures the metric of each case without each set; repeated sets are measured once."""
        once = {tuple(sorted(head_set)): None for head_set in sets}
        measured = run_sweep(
            self.removal.model, iter(task.inputs), self.removal.changes(task.inputs, list(once)), task.metric,
            answers=task.answers, against=task.against, bos=self.removal.bos, memory=self.memory, journal=journal,
            progress=self.progress, engine=self.engine, noted={"method": self.removal.name, **(noted or {})},
        )  # fmt: skip
        row = {head_set: number for number, head_set in enumerate(once)}
        rows = torch.tensor([row[tuple(sorted(head_set))] for head_set in sets], dtype=torch.long)
        return replace(measured, after=measured.after[rows])


@public
@dataclass(frozen=True)
class Discovery:
    """The half of a task on which heads may be chosen. It contains no case of the other half."""

    measuring: Measuring
    task: Task
    """The cases of this half only."""

    @property
    def model(self) -> HookedModel:
        """The model."""
        return self.measuring.removal.model

    @cached_property
    def harm(self) -> Float[Tensor, "layer head group"]:
        """Measures how much worse the model does in each group when a head is removed, in the metric's units."""
        stack, heads = self.model.output_stack, self.measuring.removal.heads
        swept = self.measuring.swept(self.task, [(head,) for head in heads])
        worse = swept.before - swept.after if self.task.higher else swept.after - swept.before
        harm = group_means(worse, self.task.group_of)
        values = torch.full((max(stack.layers) + 1, stack.n_heads, harm.shape[-1]), torch.nan, dtype=torch.float64)
        values[tuple(torch.tensor(heads).T)] = harm
        return values

    def strongest(self, count: int = 10, by: str | None = None) -> pd.DataFrame:
        """The heads whose removal alone hurts most on this half, with their mean `harm`; a rule may return this table.

        `by` is "harm", the only number of this half.
        """
        option("by", "harm" if by is None else by, ["harm"])
        mean = self.harm.mean(dim=-1)
        layer, head = (~mean.isnan()).nonzero().T.tolist()
        count = whole_number("count", count, least=1, most=len(head), most_is="the heads of the model")
        frame = pd.DataFrame({"layer": layer, "head": head, "harm": mean[layer, head].numpy()})
        return frame.sort_values("harm", ascending=False, kind="stable", ignore_index=True).head(count)


def measured_sets(
    measuring: Measuring, task: Task, shape: Shape, journal: str | Path | None, noted: Mapping[str, Any]
) -> dict[str, Any]:
    """Measures the metric without each set, without each of its heads, and without all other heads of the set."""
    all_heads = measuring.removal.heads
    tested, size, count = shape.sets[0], len(shape.sets[0]), len(shape.sets)
    alone = [(head,) for head_set in shape.sets for head in head_set]
    rest = [tuple(other for other in head_set if other != head) for head_set in shape.sets for head in head_set]
    only = tuple(head for head in all_heads if head not in tested)
    changes = [*shape.sets, all_heads, *([only] if only else []), *(alone + rest if size > 1 else [])]
    swept = measuring.swept(task, changes, journal, noted)
    after = swept.after[:count]
    ends = count + 1 + len(only[:1])
    singles, others = after[:, None], swept.before.expand(count, 1, -1)
    if size > 1:
        singles, others = swept.after[ends:].reshape(2, count, size, -1)
    return {
        "metric": str(swept.provenance.options["metric"]),
        "sets": torch.tensor(shape.sets),
        "before": swept.before,
        "after": after,
        "after_alone": singles,
        "after_rest": others.clone(),
        "after_all": swept.after[count],
        "after_only": swept.after[count + 1] if only else swept.before,
        "provenance": swept.provenance,
    }


def general_effects(
    measuring: Measuring, texts: Inputs | Iterable[Inputs], shape: Shape, journal: str | None
) -> Float[Tensor, "set text"]:
    """Measures the change of the loss on other texts when each set is removed."""
    texts, removal = reread(texts), measuring.removal
    if isinstance(texts, str):
        texts = [texts]
    swept = run_sweep(
        removal.model, texts, removal.changes(texts, shape.sets), "loss", bos=removal.bos, memory=measuring.memory,
        journal=journal, progress=measuring.progress, engine=measuring.engine, noted={"method": removal.name},
    )  # fmt: skip
    return swept.after - swept.before


@dataclass(frozen=True)
class OtherTask:
    """The effect that removing the heads has on another task."""

    name: str
    metric: str
    higher_is_better: bool
    effect: Float[Tensor, " other_group"]  # the metric after minus before, in each group


def other_task(measuring: Measuring, task: Task, heads: HeadSet) -> "OtherTask":
    """Measures the effect of removing the heads on another task."""
    swept = measuring.swept(task, [heads])
    effect = group_means(swept.after[0] - swept.before, task.group_of)
    return OtherTask(task.name, str(swept.provenance.options["metric"]), task.higher, effect)
