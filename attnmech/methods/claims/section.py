"""The sentences that describe a claim about heads."""

from collections.abc import Sequence
from typing import Final

import torch

from ...draw.text import with_minus_signs
from ...maths.intervals import TextMeans
from ...results.sentences import in_words, interval_of
from .p_values import ALPHA, SetTest, named
from .set_effects import FEWEST, OtherTask
from .tasks import group_means

_UNITS: Final = {"logit_difference": "logits"} | dict.fromkeys(
    ("log_probability", "loss", "cross_entropy", "kl"), "nats"
)


def quantity_of(metric: str) -> tuple[str, str]:
    """The quantity that a metric measures, and its unit."""
    return in_words(metric), _UNITS.get(metric, "")


def about_set(test: SetTest) -> str:
    """Compares the effect of removing the tested set with the effects of removing the other sets."""
    what, unit = quantity_of(test.metric)
    (low, high), effect = test._ends, test.effect
    changing = _changing(test, _listed([named([head]) for head in test.heads]))
    count = len(test.groups)
    if low <= 0 <= high:
        return (
            f"{changing} has no clear effect on {test.task}: the {what} changes by {effect:+.2g}{_of(unit)} "
            f"({low:+.2g} to {high:+.2g} over {count} groups), and {_stronger(test)}."
        )
    done = "lowers" if effect < 0 else "raises"
    ends = sorted((abs(low), abs(high)))
    sentence = (
        f"{changing} {done} the {what} on {test.task} by {abs(effect):.2g}{_of(unit)} ({ends[0]:.2g} to "
        f"{ends[1]:.2g} over {count} groups)"
    )
    if (effect < 0) is not test.higher_is_better:
        them = "it" if len(test.heads) == 1 else "them"
        return f"{sentence}: the model does better {f'without {them}' if test._done == 'removed' else 'so'}."
    strongest = test.p <= max(ALPHA, test.least_p)
    return f"{sentence}, {_more_than(test)}." if strongest else f"{sentence}, but {_stronger(test)}."


def _more_than(test: SetTest) -> str:
    others, stronger = len(test.sets) - 1, int(test.as_strong.sum()) - 1
    larger = int((test.harm.mean(dim=-1) > test.harm[0].mean())[~test.as_strong].sum())
    beaten = f"all {others} {_things(test)}" if not stronger else f"{others - stronger} of {others} {_things(test)}"
    how = "more than" if not larger else "more consistently than"
    size = f"; {_sets(larger)} of these {'has' if larger == 1 else 'have'} a larger effect" if larger else ""
    return f"{how} {beaten} {_where(test)} ({_p_value(test, test.p)}{size})"


def _stronger(test: SetTest) -> str:
    others, stronger = len(test.sets) - 1, int(test.as_strong.sum()) - 1
    which = test.as_strong & (torch.arange(len(test.sets)) > 0)
    shared = bool(test._sharing[which].all()) and stronger and len(test.heads) > 1
    all_share = f", and {'it shares' if stronger == 1 else 'all of them share'} a head with the set" if shared else ""
    hurt = "hurts" if stronger == 1 else "hurt"
    count = f"{stronger} of {others} {_things(test)} {_where(test)}"
    return f"{count} {hurt} at least as much{all_share} ({_p_value(test, test.p)})"


def about_too_few(test: SetTest) -> str:
    """Says that no p-value could confirm the claim, and how many sets are needed. Empty if one could."""
    if test.least_p <= ALPHA:
        return ""
    return (
        f"This cannot confirm a claim: among {len(test.sets)} sets of this shape, p is {test.least_p:.2g} or more, and "
        f"p ≤ {ALPHA:g} needs at least {FEWEST}. Sets with another number of heads, or in more layers, may be more."
    )


def _where(test: SetTest) -> str:
    one = len({layer for layer, _ in test.heads}) == 1
    drawn = "" if len(test.sets) == test.possible else f"drawn from the {test.possible - 1:,} "
    return f"{drawn}in {'any' if test.wider else 'this' if one else 'these'} layer{'' if one else 's'}"


def _things(test: SetTest) -> str:
    return "other heads" if len(test.heads) == 1 else "other sets"


def _p_value(test: SetTest, p: float) -> str:
    least = ", the smallest possible" if p == test.least_p else ""
    few = "these layers have" if len({layer for layer, _ in test.heads}) > 1 else "this layer has"
    things = "heads" if len(test.heads) == 1 else "sets"
    wider = f"; controls also come from other layers because {few} fewer than {FEWEST} {things}" if test.wider else ""
    return f"p = {p:.2g}{least}{wider}"


def about_each(test: SetTest) -> str:
    """Says in one sentence whether every head of the set contributes to its effect. Empty for a single head."""
    if len(test.heads) == 1:
        return ""
    means = test._adds
    low, high = means.interval()
    if idle := test._idle:
        verb = "does" if len(idle) == 1 else "do"
        return f"{_listed([named([head]) for head in idle])} {verb} not clearly contribute to this effect."
    least = int(means.mean.argmin())
    stronger, others = int(test._as_needed.sum()) - 1, len(test.sets) - 1
    return (
        f"Every head contributes, {named([test.heads[least]])} the least: {float(means.mean[least]):.2g} "
        f"({float(low[least]):.2g} to {float(high[least]):.2g}). All heads of "
        f"{stronger or 'none'} of the {others} other sets contribute as much (p = {test.p_each:.2g})."
    )


def about_other(other: OtherTask) -> str:
    """Describes the effect of removing the tested set on another task."""
    what, unit = quantity_of(other.metric)
    means = TextMeans.of_values(other.effect)
    low, high = map(float, means.interval())
    effect = float(means.mean)
    if low > 0 or high < 0:
        ends = sorted((abs(low), abs(high)))
        moves = "falls" if effect < 0 else "rises"
        return f"The {what} on {other.name} {moves} by {abs(effect):.2g}{_of(unit)} ({ends[0]:.2g} to {ends[1]:.2g})."
    span = f", {low:+.2g} to {high:+.2g}" if low <= high else f" on {other.effect.shape[-1]} groups"
    return f"The {what} on {other.name} does not clearly change ({effect:+.2g}{_of(unit)}{span})."


def about_matched(test: SetTest) -> str:
    """Compares the set with the sets nearest in their effect on general loss. Empty without general texts."""
    if test.general is None:
        return ""
    mean, near = test.general.mean(dim=-1), test._matched
    sign = -1 if test.higher_is_better else 1
    count = int(test.as_strong[near].sum())
    stronger = "none of them hurts" if not count else f"{count} of them hurt{'s' if count == 1 else ''}"
    reach, effect = mean[near], sign * test.harm[near].mean(dim=-1)
    return with_minus_signs(
        f"{_changing(test, 'the set')} changes the loss on {test.general.shape[1]} other texts by "
        f"{float(mean[0]):+.2g} nats. The {len(near)} sets with the nearest change ({float(reach.min()):+.2g} to "
        f"{float(reach.max()):+.2g} nats) change the metric by {float(effect.mean()):+.2g} on average "
        f"({float(effect.min()):+.2g} to {float(effect.max()):+.2g}), and {stronger} at least as much."
    )


def about_restored(test: SetTest) -> str:
    """Says in one sentence how much of the metric the set alone restores."""
    low, high = map(float, TextMeans.of_values(group_means(test.before - test.after_all, test.case_groups)).interval())
    if low <= 0 <= high:
        every = _changing(test, "every head")
        return f"{every} does not clearly change the metric, so there is nothing for a set to restore."
    means = test.restored
    ends = tuple(map(float, means.interval()))
    return with_minus_signs(
        f"With all other heads {test._done}, the set restores {float(means.mean):.2g} times what all heads together "
        f"contribute{interval_of(ends, '.2g')}."
    )


def _changing(test: SetTest, heads: str) -> str:
    return f"Removing {heads}" if test._done == "removed" else f"Changing {heads} ({test.method})"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _of(unit: str) -> str:
    return f" {unit}" if unit else ""


def _sets(count: int) -> str:
    return "one" if count == 1 else str(count)
