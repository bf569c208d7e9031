"""States in a sentence the largest of many effects, how many are clear, and the texts needed to make one clear."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..draw.text import with_minus_signs
from ..maths.intervals import LEAST_TEXTS, TextMeans

PALE: Final = "; pale where its effect is not clear among all shown"
"""The end of a sentence that explains how a map shows effects that are not clear."""

_METRICS: Final = {  # the words for each metric and for its unit
    "loss": ("loss", "nats of loss"),
    "kl": ("KL divergence from the clean output", "nats of KL"),
    "logit_difference": ("logit difference", "logit difference"),
    "log_probability": ("log probability of the answer", "nats of log-probability"),
    "cross_entropy": ("cross-entropy", "nats of cross-entropy"),
    "mse": ("squared error", "squared error"),
}


def in_words(metric: str) -> str:
    """A metric as titles and sentences call it; a user's own function keeps its name."""
    return _METRICS.get(metric, (metric, ""))[0]


def unit_of(metric: str) -> str:
    return _METRICS.get(metric, ("", metric))[1]


def most_first(means: TextMeans) -> list[tuple[int, ...]]:
    """The places that were measured, sorted: clear effects first, then by size."""
    places = (means.texts > 0).nonzero()
    size, clear = means.mean[tuple(places.T)].abs(), means.clear[tuple(places.T)]
    order = sorted(range(len(places)), key=lambda number: (not clear[number], -float(size[number])))
    return [tuple(places[number].tolist()) for number in order]


def about_largest(
    means: TextMeans,
    named: Callable[[Sequence[int]], str],
    *,
    things: str,
    unit: str = "",
    what: str = "effect",
    signed: bool = True,
    group: float = 1.0,
    sample: str = "text",
    no_interval_as: str | None = None,
) -> str:
    """The sentence about the largest effect, corrected for the choice; `group` is the number of texts summed into one,
    and `sample` says what the means are taken over.

    `no_interval_as` is the end of a sentence that gives the reason for a missing interval, if it is not too few texts.

    >>> import torch
    >>> steady = torch.tensor([[1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.0], [0.1, -0.2, 0.0, 0.1, 0.2, -0.1, 0.1]])
    >>> about_largest(TextMeans.of_values(steady), lambda place: f"L0H{place[0]}", things="heads", unit="nats")[:71]
    '1 of 2 heads has a clear effect: L0H0, +1 nats, above 0 on 7 of 7 texts'
    >>> about_largest(TextMeans.of_values(steady[1:, :3]), lambda place: "L0H1", things="heads")
    'L0H1 has an effect of −0.0333; 3 texts are too few for an interval, which needs 5 or more'
    """
    places = most_first(means)
    if not places:
        return f"no {what} could be measured"
    top, count, sign = places[0], len(places), "+" if signed else ""
    name, texts = named(top), int(means.texts[top])
    value = f"{float(means.mean[top]):{sign}.3g}{f' {unit}' if unit else ''}"
    # A single effect was not chosen among many, so its interval is the pointwise one of the table.
    ends = tuple(float(end[top]) for end in (means.simultaneous() if count > 1 else means.interval()))
    known = not math.isnan(ends[0])
    shown = interval_of(ends, f"{sign}.3g", count, things)
    one = f"one {sample} carries" if group == 1 else f"one group of {sample}s carries"
    carried = f"; {one} more than half of it" if known and bool(means.one_text[top]) else ""
    counted = f", {_same_sign(means, top, group, sample)}" if signed and known else ""
    if not signed or count == 1:
        sentence = (
            f"{name} has {f'the largest {what},' if count > 1 else f'{a_or_an(what)} of'} {value}{counted}{shown}"
        )
    elif not known:
        sentence = f"{name} has the largest {what}, {value}"
    elif clear := int(means.clear.sum()):
        has = "has a" if clear == 1 else "have a"
        largest = ":" if clear == 1 else "; the largest is that of"
        finding = f"{counted}{shown}"
        if signed and ends[0] < 0 < ends[1]:
            direction = _same_sign(means, top, group, sample)
            finding = f"; its direction is certain ({direction}), its size is not{shown}"
        sentence = f"{clear} of {count} {things} {has} clear {what}{largest} {name}, {value}{finding}"
    else:
        needed = means.texts_needed(top)
        enough = f"; if that share holds, about {round(needed * group)} {sample}s would make it clear" if needed else ""
        sentence = (
            f"none of {count} {things} has a clear {what} on {round(texts * group)} {sample}s "
            f"(the largest, that of {name}, is {value}{counted}{enough})"
        )
    return with_minus_signs(
        f"{sentence}{carried}{no_interval(texts, sample) if no_interval_as is None else no_interval_as}"
    )


def interval_of(ends: Sequence[float], spec: str, count: int = 1, things: str = "") -> str:
    """The end of a sentence that gives an interval; empty if there is none. `count` is the number of things measured
    together.

    >>> interval_of((0.04, 0.6), "+.3g", 32, "heads"), interval_of((0.1, 0.2), ".3g")
    (' (95 % interval, corrected for 32 heads: +0.04 to +0.6)', ' (95 % interval: 0.1 to 0.2)')
    """
    low, high = ends
    if math.isnan(low):
        return ""
    corrected = f", corrected for {count:,} {things}" if count > 1 else ""
    return with_minus_signs(f" (95 % interval{corrected}: {low:{spec}} to {high:{spec}})")


def _same_sign(means: TextMeans, place: tuple[int, ...], group: float, sample: str) -> str:
    """The number of texts on which a value has the sign of its mean, and on which it is 0."""
    side = "below" if float(means.mean[place]) < 0 else "above"
    texts = f"{sample}s" if group == 1 else f"groups of {sample}s"
    ties = int(means.ties[place])
    equal = f" and 0 on {ties}" if ties else ""
    return f"{side} 0 on {int(means.agreeing[place])}{equal} of {int(means.texts[place])} {texts}"


def a_or_an(what: str) -> str:
    return f"{'an' if what[0] in 'aeio' else 'a'} {what}"


def no_interval(texts: int, sample: str = "text") -> str:
    """The end of a sentence that says why there is no interval; empty if there can be one."""
    if texts >= LEAST_TEXTS:
        return ""
    count = f"1 {sample} is" if texts == 1 else f"{texts} {sample}s are"
    return f"; {count} too few for an interval, which needs {LEAST_TEXTS} or more"


def interval_note(texts: int, copies: int = 0, sample: str = "text") -> str:
    """The note below a table about its intervals, over distinct texts and some copies of them.

    >>> interval_note(3, 1)[-82:]
    'which needs 5 or more. 1 text is a copy of another; copies of a text count as one.'
    """
    are = f"{sample} is a copy of another" if copies == 1 else f"{sample}s are copies of others"
    counted_once = f" {copies:,} {are}; copies of {a_or_an(sample)} count as one." if copies else ""
    if texts < LEAST_TEXTS:
        return f"No intervals{no_interval(texts, sample)}.".replace("; ", ": ", 1) + counted_once
    return (
        f"Intervals are pointwise 95 % t intervals over {sample}s. Agreeing: the number of {sample}s with the sign of "
        f"the mean. Clear: more {sample}s than chance allows have one sign, that of the mean (exact sign test at 5 %, "
        "corrected for all shown by Holm's procedure). Clear size: the simultaneous 95 % interval over all shown "
        f"excludes 0. One {sample}: a single {sample} carries more than half of the sum of sizes, and the size is not "
        f"called clear.{counted_once}"
    )


def for_map(means: TextMeans, rows: Sequence[int]) -> dict[str, Any]:
    """The means in some rows, both ends of their intervals, and whether they are clear (None without intervals)."""
    low, high = means.interval()
    columns = {"effect": means.mean, "low": low, "high": high, "clear": means.clear}
    shown: dict[str, Any] = {name: value[list(rows)].numpy() for name, value in columns.items()} | {"signed": True}
    return shown if bool((means.texts >= LEAST_TEXTS).any()) else shown | {"clear": None}
