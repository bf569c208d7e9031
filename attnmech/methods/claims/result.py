"""Does removing these heads hurt this task more than removing others? (formulas §7)

Heads are found on one half of the templates and tested on the other, against all sets of the same shape.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import flag, shown, whole_number
from ...demo.text import documents
from ...draw.intervals import interval_rows
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...interventions import Head, Heads, Intervention, Values
from ...maths.intervals import TextMeans
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results import OverTexts, PagedResult, Provenance
from ...runs.ablations import checked_seed, reread
from ...runs.journal import kept
from ...runs.sweep import sweep
from ...runs.workers import Workers
from .figures import null_sets
from .formulas import added, at_least, least_p, rank_p, strength, studentised
from .set_effects import Discovery, Measuring, Removal
from .shapes import FEWEST, HeadSet, Shape, same_shape
from .tasks import Task, TaskLike, by_group, require_apart, task_of

ALPHA: Final = 0.05
"""A p-value up to this confirms."""
MATCHED: Final = 20
"""How many sets that are nearest in their effect on general loss stand beside the tested one."""
GENERAL: Final = 8
"""How many of the demo model's texts measure general loss, if the task is one of its own."""

Rule: TypeAlias = Callable[[Discovery], Sequence[Head]]

VERDICTS: Final = ("confirmed", "in part", "not confirmed")

_QUANTITY: Final = {
    "logit_difference": ("logit difference", "logits"),
    "log_probability": ("log probability of the answer", "nats"),
    "accuracy": ("accuracy", ""),
    "loss": ("loss", "nats"),
    "cross_entropy": ("cross-entropy", "nats"),
    "kl": ("divergence from the clean output", "nats"),
}


def confirm_heads(
    model: HookedModel,
    heads: Heads | Rule,
    task: TaskLike,
    *,
    method: str | Intervention = "zero",
    reference: Values | Inputs | Iterable[Inputs] | None = None,
    discovery: TaskLike | None = None,
    others: Sequence[TaskLike] | None = None,
    general: Inputs | Iterable[Inputs] | None = None,
    sets: int = 1000,
    seed: int = 0,
    bos: bool | None = None,
    memory: float = 1.0,
    journal: str | Path | None = None,
    engine: str | Workers = "local",
    progress: bool = False,
) -> "HeadClaim":
    """Whether removing these heads together hurts this task more than removing other heads does.

    >>> import attnmech as am
    >>> task = am.Task.of_demo("copying", templates=10, each=1)
    >>> claim = am.confirm_heads(am.load(), lambda half: half.strongest(1), task)
    >>> claim.heads, claim.verdict, claim.p == claim.least_p == 1 / 32
    (((1, 0),), 'confirmed', True)

    The groups (templates) of the task's cases are split in halves by `seed`. A rule chooses heads on the discovery
    half: it gets a `Discovery`, whose `strongest(5)` are the five heads that hurt most alone, and which holds nothing
    of the other half. A list of heads must come from elsewhere: from `task.halves(seed)[0]`, or other texts. All else
    is measured on the confirmation half, at least five groups.

    `effect` is the metric after minus before, mean over groups, with its t interval over groups. The null distribution
    are *all* sets of the same shape (as many heads in the same layers), the tested one included; `p` is the share of
    them that are at least as strong, by their effect studentised over groups
    (`attnmech.methods.claims.formulas.strength`). No p-value is below `least_p`, 1 / number of sets. Under 20 sets,
    those of other layers are added (`wider`); more than `sets` are drawn by `seed` instead.

    A set is as strong as its strongest heads, so a head that does nothing can be in a strong set. `p_each` asks it of
    every head: by what the head that adds least adds, ½ (effect alone + effect of the set − effect of the other heads);
    it is never below the p of a t test that one of them adds nothing.
    The verdict is "confirmed" if the intervals of the effect and of what each head adds exclude 0 and p_each ≤ 0.05; it
    is "in part" if the set does more than others (p ≤ 0.05), but not every head is shown to add to that.

    Args:
        model: the model.
        heads: a list of (layer, head), or a rule that chooses such a list on the discovery half.
        task: an `am.Task`; the name of one of the demo model's ("copying", "agreement", "gender", "recipient"); or
            cases (prompt, answer, against, group), or (text, group) whose loss is measured.
        method: what removing does: "zero", "mean", "resample", or an `am.Intervention`, applied to these heads.
        reference: for "mean", the texts of the mean; by default the prompts of the discovery half.
        discovery: cases of your own for the discovery half; all of `task` then confirms.
        others: other tasks, to see what else the heads do; for a task by name, the demo model's others.
        general: texts whose loss tells how much a set matters to everything; for a task by name, 8 of the demo model's.
        sets: the most sets that are measured, the tested one included.
        seed: of the halves, of sets that are drawn, and of donors for "resample".
        bos: whether each text begins with the tokenizer's first token.
        memory: how many GB a step may use on top of the model.
        journal: a file that keeps what is measured; if interrupted, the same call resumes, and removes it at the end.
        engine: "local", or `am.Ray(...)` to have worker processes measure.
        progress: whether to show a progress bar.

    Returns:
        The effect with its interval, the null distribution, and a verdict.

    Raises:
        InputError: for fewer than six groups, a group or prompt in both halves, heads that the model does not have,
            and what `am.ablate_heads` raises.

    """
    require_model(model)
    seed, sets = checked_seed(seed), whole_number("sets", sets, least=FEWEST)
    flag("progress", progress)
    by_name = task if isinstance(task, str) else None
    whole = task_of(task)
    finding, confirming = whole.halves(seed) if discovery is None else (task_of(discovery), whole)
    require_apart(finding, confirming)
    if reference is not None and method != "mean":
        raise InputError(f'`reference` is for method="mean"; got it with method={shown(method)}.')
    if method == "mean" and reference is None:
        reference = iter(finding.inputs)
    measuring = Measuring(Removal.of(model, method, reference, seed, bos), memory, progress, engine)
    chosen = _chosen(model, heads, Discovery(measuring, finding))
    stack = model.output_stack
    shape = same_shape(chosen, stack.layers, stack.n_heads, sets, seed)
    if general is None and by_name:
        general = documents(GENERAL, seed=1)
    if others is None:
        others = [name for name in ("copying", "agreement", "gender") if by_name and name != by_name]
    further = tuple(map(task_of, others))
    beside = None if journal is None or general is None else f"{journal}.general"
    with kept(journal), kept(beside):
        noted = {"heads": [list(head) for head in chosen], "task": whole.name, "seed": seed, "sets": len(shape.sets)}
        if callable(heads):
            noted["rule"] = getattr(heads, "__name__", type(heads).__name__)
        measured = _measured(measuring, confirming, shape, journal, noted)
        if general is not None:
            measured["general"] = _general(measuring, general, shape, beside)
        return HeadClaim(
            task=whole.name,
            method=measuring.removal.name,
            heads=chosen,
            chosen_by_rule=callable(heads),
            higher_is_better=confirming.higher,
            possible=shape.possible,
            wider=shape.wider,
            groups=confirming.groups,
            discovery_groups=finding.groups,
            case_groups=confirming.group_of,
            others=tuple(_other(measuring, each, chosen) for each in further),
            **measured,
        )


def _chosen(model: HookedModel, heads: Any, half: Discovery) -> HeadSet:
    given = heads(half) if callable(heads) else heads
    if isinstance(given, str):
        raise InputError("`heads` must be a list of (layer, head), or a rule that chooses one; got a string.")
    return tuple(model.check_heads(list(given) if isinstance(given, Iterable) else given))


def _measured(
    measuring: Measuring, task: Task, shape: Shape, journal: str | Path | None, noted: Mapping[str, Any]
) -> dict[str, Any]:
    """The metric without each set, without each of its heads alone, and without all of its other heads."""
    stack = measuring.removal.model.output_stack
    every = tuple((layer, head) for layer in stack.layers for head in range(stack.n_heads))
    tested, size, count = shape.sets[0], len(shape.sets[0]), len(shape.sets)
    alone = [(head,) for each in shape.sets for head in each]
    rest = [tuple(other for other in each if other != head) for each in shape.sets for head in each]
    only = tuple(head for head in every if head not in tested)
    changes = [*shape.sets, every, *([only] if only else []), *(alone + rest if size > 1 else [])]
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


def _general(
    measuring: Measuring, texts: Inputs | Iterable[Inputs], shape: Shape, journal: str | None
) -> Float[Tensor, "set text"]:
    """The change of the loss of other texts without each set."""
    texts, removal = reread(texts), measuring.removal
    if isinstance(texts, str):
        texts = [texts]
    swept = sweep(
        removal.model, texts, removal.changes(texts, shape.sets), "loss", bos=removal.bos, memory=measuring.memory,
        journal=journal, progress=measuring.progress, engine=measuring.engine, noted={"method": removal.name},
    )  # fmt: skip
    return swept.after - swept.before


def _other(measuring: Measuring, task: Task, heads: HeadSet) -> "OtherTask":
    swept = measuring.swept(task, [heads])
    effect = by_group(swept.after[0] - swept.before, task.group_of)
    return OtherTask(task.name, str(swept.provenance.options["metric"]), task.higher, effect)


@dataclass(frozen=True)
class OtherTask:
    """What removing the heads does to another task."""

    name: str
    metric: str
    higher_is_better: bool
    effect: Float[Tensor, " other_group"]
    """The metric after minus before, in each group."""


@dataclass(frozen=True, repr=False)
class HeadClaim(OverTexts, PagedResult):
    """What removing a set of heads does to a task, beside what removing other sets of the same shape does.

    Effects are the metric after minus before, in its units; *harm* is the same in the direction in which the model does
    worse. Groups are the unit: a number of a group is the mean over its cases, and intervals are over groups.
    """

    SUBTRACT = "subtract what you compare: one.harm - other.harm"

    task: str
    metric: str
    method: str
    """What removing did: "zero", "mean", "resample", or an intervention."""
    heads: tuple[Head, ...]
    chosen_by_rule: bool
    """Whether the heads were chosen on the discovery half."""
    higher_is_better: bool
    possible: int
    """How many sets of the shape there are; all of them are in `sets`, or as many as were drawn."""
    wider: bool
    """Whether sets of other layers are among the controls."""
    groups: tuple[str, ...]
    """The groups that confirm."""
    discovery_groups: tuple[str, ...]
    case_groups: tuple[str, ...]
    """The group of each case."""
    sets: Int[Tensor, "set member 2"]
    """The (layer, head) of each set's heads; the first set is the one tested."""
    before: Float[Tensor, " case"]
    """The metric with all heads."""
    after: Float[Tensor, "set case"]
    """The metric without each set."""
    after_alone: Float[Tensor, "set member case"]
    """The metric without one of its heads."""
    after_rest: Float[Tensor, "set member case"]
    """The metric without the other heads of the set."""
    after_all: Float[Tensor, " case"]
    """The metric without any head of the model."""
    after_only: Float[Tensor, " case"]
    """The metric with the heads of the tested set alone."""
    others: tuple[OtherTask, ...]
    provenance: Provenance
    general: Float[Tensor, "set text"] | None = None
    """The change of the loss of other texts without each set, in nats."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes that cases and heads label."""
        return {"case": len(self.case_groups), "member": len(self.heads)}

    def _check(self) -> None:
        super()._check()
        if tuple(dict.fromkeys(self.case_groups)) != self.groups or self._set(0) != self.heads:
            raise ValueError("`case_groups` must be of `groups`, and the first set the heads tested")

    # -- the set ---------------------------------------------------------------------------------------------

    def _harm(self, after: Float[Tensor, "*place case"]) -> Float[Tensor, "*place group"]:
        return by_group(self.before - after if self.higher_is_better else after - self.before, self.case_groups)

    @cached_property
    def harm(self) -> Float[Tensor, "set group"]:
        """How much worse the model does in each group without each set."""
        return self._harm(self.after)

    @property
    def _measured_values(self) -> Float[Tensor, " group"]:
        return -self.harm[0] if self.higher_is_better else self.harm[0]

    @property
    def effect(self) -> float:
        """The metric after minus before, without the tested set: mean over groups."""
        return float(self._means.mean)

    @cached_property
    def t(self) -> Float[Tensor, " set"]:
        """Each set's harm, studentised over groups."""
        return studentised(self.harm)

    # -- against other sets ----------------------------------------------------------------------------------

    @cached_property
    def as_strong(self) -> Bool[Tensor, " set"]:
        """Which sets are at least as strong as the tested one, which is one of them."""
        return at_least(strength(self.harm))

    @property
    def p(self) -> float:
        """The share of all sets that are at least as strong."""
        return rank_p(strength(self.harm))

    @property
    def least_p(self) -> float:
        """The least p that so many sets allow."""
        return 1 / len(self.sets)

    @cached_property
    def added(self) -> Float[Tensor, "set member group"]:
        """How much harm each head adds to its set: the mean of what it does alone and after the set's other heads."""
        return added(self.harm, self._harm(self.after_alone), self._harm(self.after_rest))

    @cached_property
    def as_needed(self) -> Bool[Tensor, " set"]:
        """In which sets every head adds at least as much as every head of the tested set, by strength."""
        return at_least(strength(self.added).amin(dim=1))

    @property
    def p_each(self) -> float:
        """That of every head: the share of all sets in which every head adds at least as much; `p` for a single head.

        At least the p of a t test that some head of the tested set adds nothing: of two heads that act together, the
        lesser adds more than the lesser of two that do not, even where neither has an effect.
        """
        share = float(self.as_needed.double().mean())
        return share if len(self.heads) == 1 else max(share, least_p(self.added[0]))

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`.

        "confirmed" if the intervals of the effect and of what each head adds exclude 0 and p_each ≤ 0.05; "in part" if
        that is shown of the set as a whole (p ≤ 0.05), but not of each of its heads.
        """
        low, high = self._ends
        worse = high < 0 if self.higher_is_better else low > 0
        if worse and self.p_each <= ALPHA and not self._idle:
            return VERDICTS[0]
        return VERDICTS[1] if worse and self.p <= ALPHA and len(self.heads) > 1 else VERDICTS[2]

    @cached_property
    def _adds(self) -> TextMeans:
        """What each head of the tested set adds."""
        return TextMeans.of_values(self.added[0])

    @property
    def _idle(self) -> list[Head]:
        """The heads that do not clearly add to the harm.

        That all of them do is claimed only if each interval alone excludes 0, so these are pointwise (Berger 1982).
        """
        low, _ = self._adds.interval()
        return [head for head, end in zip(self.heads, low.tolist(), strict=True) if not end > 0]

    # -- beside it -------------------------------------------------------------------------------------------

    @cached_property
    def matched(self) -> Int[Tensor, " matched"]:
        """The sets that are nearest to the tested one in their effect on general loss, at most 20; else empty."""
        if self.general is None:
            return torch.zeros(0, dtype=torch.long)
        mean = self.general.mean(dim=-1)
        return 1 + (mean[1:] - mean[0]).abs().argsort(stable=True)[:MATCHED]

    @property
    def restored(self) -> TextMeans:
        """What the set alone restores: (metric with only the set − with no head) / (with all heads − with no head)."""
        alone, whole = (by_group(each - self.after_all, self.case_groups) for each in (self.after_only, self.before))
        return TextMeans.of_ratio(alone, whole)

    def to_frame(self) -> pd.DataFrame:
        """One row per set, the tested one first.

        Columns: heads; tested; effect with its interval over groups; t, of the harm; as_strong; adds_least, what the
        head that adds least adds to the harm; as_needed; general_loss, matched.
        """
        sign = -1 if self.higher_is_better else 1
        means = TextMeans.of_values(sign * self.harm)
        low, high = means.interval()
        number = torch.arange(len(self.sets))
        return pd.DataFrame(
            {
                "heads": [_named(self._set(each)) for each in range(len(self.sets))],
                "tested": (number == 0).numpy(),
                "effect": means.mean.numpy(),
                "effect_low": low.numpy(),
                "effect_high": high.numpy(),
                "t": self.t.numpy(),
                "as_strong": self.as_strong.numpy(),
                "adds_least": self.added.mean(dim=-1).amin(dim=1).numpy(),
                "as_needed": self.as_needed.numpy(),
                "general_loss": torch.nan if self.general is None else self.general.mean(dim=-1).numpy(),
                "matched": torch.isin(number, self.matched).numpy(),
            }
        )

    def _set(self, number: int) -> HeadSet:
        return tuple((layer, head) for layer, head in self.sets[number].tolist())

    @property
    def _ends(self) -> tuple[float, float]:
        low, high = self.interval()
        return float(low), float(high)

    @property
    def _sharing(self) -> Bool[Tensor, " set"]:
        """Which sets share a head with the tested one."""
        same = (self.sets[:, :, None] == self.sets[0]).all(dim=-1)
        return same.flatten(1).any(dim=1)

    # -- in words --------------------------------------------------------------------------------------------

    @property
    def lead(self) -> str:
        """What the numbers support, and no more."""
        told = [self._about_set, self._about_each, *map(self._about_other, self.others)]
        return with_minus_signs(" ".join(each for each in told if each))

    @property
    def _about_set(self) -> str:
        what, unit = _QUANTITY.get(self.metric, (self.metric, ""))
        (low, high), effect = self._ends, self.effect
        names, count = _listed([_named([head]) for head in self.heads]), len(self.groups)
        if low <= 0 <= high:
            return (
                f"Removing {names} has no clear effect on {self.task}: the {what} changes by {effect:+.2g}{_of(unit)} "
                f"({low:+.2g} to {high:+.2g} over {count} groups), and {self._stronger}."
            )
        done = "lowers" if effect < 0 else "raises"
        ends = sorted((abs(low), abs(high)))
        told = (
            f"Removing {names} {done} the {what} on {self.task} by {abs(effect):.2g}{_of(unit)} ({ends[0]:.2g} to "
            f"{ends[1]:.2g} over {count} groups)"
        )
        if (effect < 0) is not self.higher_is_better:
            return f"{told}: the model does better without {'it' if len(self.heads) == 1 else 'them'}."
        return f"{told}, {self._more_than}." if self.p <= ALPHA else f"{told}, but {self._stronger}."

    @property
    def _more_than(self) -> str:
        others, stronger = len(self.sets) - 1, int(self.as_strong.sum()) - 1
        larger = int((self.harm.mean(dim=-1) > self.harm[0].mean())[~self.as_strong].sum())
        beaten = f"all {others} {self._things}" if not stronger else f"{others - stronger} of {others} {self._things}"
        how = "more than" if not larger else "more consistently than"
        size = f"; {_sets(larger)} of these {_have(larger)} a larger effect" if larger else ""
        return f"{how} {beaten} {self._where} ({self._p_value(self.p)}{size})"

    @property
    def _stronger(self) -> str:
        """How many other sets do at least as much."""
        others, stronger = len(self.sets) - 1, int(self.as_strong.sum()) - 1
        which = self.as_strong & (torch.arange(len(self.sets)) > 0)
        shared = bool(self._sharing[which].all()) and stronger and len(self.heads) > 1
        all_share = f", {'which shares' if stronger == 1 else 'all of which share'} a head with it" if shared else ""
        hurt = "hurts" if stronger == 1 else "hurt"
        count = f"{stronger} of {others} {self._things} {self._where}"
        return f"{count} {hurt} at least as much{all_share} ({self._p_value(self.p)})"

    @property
    def _where(self) -> str:
        one = len({layer for layer, _ in self.heads}) == 1
        drawn = "" if len(self.sets) == self.possible else f"drawn from the {self.possible - 1:,} "
        return f"{drawn}in {'any' if self.wider else 'this' if one else 'these'} layer{'' if one else 's'}"

    @property
    def _things(self) -> str:
        return "other heads" if len(self.heads) == 1 else "other sets"

    def _p_value(self, p: float) -> str:
        least = ", the least possible" if p == self.least_p else ""
        few = "these layers have" if len({layer for layer, _ in self.heads}) > 1 else "this layer has"
        things = "heads" if len(self.heads) == 1 else "sets"
        wider = f"; controls come from other layers too, as {few} fewer than {FEWEST} {things}" if self.wider else ""
        return f"p = {p:.2g}{least}{wider}"

    @property
    def _about_each(self) -> str:
        """Whether every head of the set adds to it, in a sentence; empty for a single head."""
        if len(self.heads) == 1:
            return ""
        means = self._adds
        low, high = means.interval()
        if idle := self._idle:
            verb = "does" if len(idle) == 1 else "do"
            return f"{_listed([_named([head]) for head in idle])} {verb} not clearly add to this."
        least = int(means.mean.argmin())
        stronger, others = int(self.as_needed.sum()) - 1, len(self.sets) - 1
        told = (
            f"Each of them adds to this, {_named([self.heads[least]])} least: {float(means.mean[least]):.2g} "
            f"({float(low[least]):.2g} to {float(high[least]):.2g})"
        )
        rarely = f"in {stronger or 'none'} of the {others} other sets does every head add as much"
        return f"{told}; {rarely} (p = {self.p_each:.2g})."

    def _about_other(self, other: OtherTask) -> str:
        what, unit = _QUANTITY.get(other.metric, (other.metric, ""))
        means = TextMeans.of_values(other.effect)
        low, high = map(float, means.interval())
        effect = float(means.mean)
        if low > 0 or high < 0:
            ends = sorted((abs(low), abs(high)))
            moves = "falls" if effect < 0 else "rises"
            return (
                f"The {what} on {other.name} {moves} by {abs(effect):.2g}{_of(unit)} ({ends[0]:.2g} to {ends[1]:.2g})."
            )
        span = f", {low:+.2g} to {high:+.2g}" if low <= high else f" on {other.effect.shape[-1]} groups"
        return f"The {what} on {other.name} does not clearly change ({effect:+.2g}{_of(unit)}{span})."

    @property
    def about_matched(self) -> str:
        """How the sets nearest in their effect on general loss compare, in a sentence; empty without general texts."""
        if self.general is None:
            return ""
        mean, near = self.general.mean(dim=-1), self.matched
        sign = -1 if self.higher_is_better else 1
        count = int(self.as_strong[near].sum())
        stronger = "none of them hurts" if not count else f"{count} of them hurt{'s' if count == 1 else ''}"
        reach, effect = mean[near], sign * self.harm[near].mean(dim=-1)
        return with_minus_signs(
            f"The set changes the loss of {self.general.shape[1]} other texts by {float(mean[0]):+.2g} nats. The "
            f"{len(near)} sets nearest in this ({float(reach.min()):+.2g} to {float(reach.max()):+.2g} nats) change "
            f"the metric by {float(effect.mean()):+.2g} on average ({float(effect.min()):+.2g} to "
            f"{float(effect.max()):+.2g}), and {stronger} at least as much."
        )

    @property
    def about_restored(self) -> str:
        """What the set alone restores, in a sentence."""
        low, high = map(float, TextMeans.of_values(by_group(self.before - self.after_all, self.case_groups)).interval())
        if low <= 0 <= high:
            return "Removing every head does not clearly change the metric, so there is nothing for a set to restore."
        means = self.restored
        low, high = map(float, means.interval())
        return with_minus_signs(
            f"With no other head left, the set restores {float(means.mean):.2g} times what all heads together do "
            f"({low:.2g} to {high:.2g})."
        )

    @property
    def _title(self) -> str:
        return f"{_named(self.heads)} and {self.task}: {self.verdict}"

    def plot(self) -> "go.Figure":
        """The effect of every set, from the smallest to the largest, with the tested one's interval."""
        frame = self.to_frame()
        effect, low, high = (frame[name].to_numpy() for name in ("effect", "effect_low", "effect_high"))
        return null_sets(list(frame["heads"]), effect, low, high, self._sharing.numpy(), label=self._label)

    def plot_heads(self) -> "go.Figure":
        """What each head of the set does alone, what it adds after the others, and the mean of both, as harm."""
        alone, rest = self._harm(self.after_alone)[0], self._harm(self.after_rest)[0]
        shown = {"removed first": alone, "removed last": self.harm[0] - rest, "adds": self.added[0]}
        values = []
        for name, each in shown.items():
            means = TextMeans.of_values(each)
            low, high = means.interval()
            values.append((name, means.mean.numpy(), low.numpy(), high.numpy()))
        return interval_rows([_named([head]) for head in self.heads], values, label=f"harm: {self._label}")

    @property
    def _label(self) -> str:
        what, unit = _QUANTITY.get(self.metric, (self.metric, ""))
        return f"change of the {what}{f', {unit}' if unit else ''}"

    def _sections(self) -> "Sequence[Section]":
        drawn = "all" if len(self.sets) == self.possible else f"{len(self.sets):,} of all {self.possible:,}"
        found = [
            Section(
                "Against other sets",
                f"Each mark is one of {drawn} sets of the same shape: the change of the metric without it, mean over "
                f"{len(self.groups)} groups that did not choose the heads. The line is the 95 % interval over groups.",
                {"sets": self.plot()},
                "claim.plot()",
                finding=f"{self.about_matched} {self.about_restored}".strip(),
                caveat="p ranks sets by their effect studentised over groups, beyond a consistent t by size. Other "
                "heads may take over what removed heads did, so small effects do not show that heads are idle.",
            )
        ]
        if len(self.heads) > 1:
            found.append(
                Section(
                    "Head by head",
                    "How much worse the model does without each head: alone, once the set's other heads are gone, and "
                    "the mean of the two, which is what it adds to the set.",
                    {"heads": self.plot_heads()},
                    "claim.plot_heads()",
                    finding=with_minus_signs(self._about_each),
                )
            )
        return found


def _named(heads: Sequence[Head]) -> str:
    return " ".join(f"L{layer}H{head}" for layer, head in heads)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _of(unit: str) -> str:
    return f" {unit}" if unit else ""


def _sets(count: int) -> str:
    return "one" if count == 1 else str(count)


def _have(count: int) -> str:
    return "has" if count == 1 else "have"
