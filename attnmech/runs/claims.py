"""What can be said about the largest of many effects? Which are clear, and how many texts would show one."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..draw.text import with_minus_signs
from ..maths.intervals import LEAST_TEXTS, TextMeans

PALE: Final = "; pale where its effect is not clear among all shown"
"""What a map says about effects that are not clear, as the end of a sentence."""


def most_first(means: TextMeans) -> list[tuple[int, ...]]:
    """The places at which something was measured: clear ones first, then by size, largest first."""
    places = (means.texts > 0).nonzero()
    size, clear = means.mean[tuple(places.T)].abs(), means.clear[tuple(places.T)]
    order = sorted(range(len(places)), key=lambda each: (not clear[each], -float(size[each])))
    return [tuple(places[each].tolist()) for each in order]


def about_largest(
    means: TextMeans,
    named: Callable[[Sequence[int]], str],
    *,
    things: str,
    unit: str = "",
    what: str = "effect",
    signed: bool = True,
    group: float = 1.0,
) -> str:
    """The sentence about the largest, as one picked out of many; `group` is how many texts were summed into one.

    >>> import torch
    >>> steady = torch.tensor([[1.0, 1.2, 0.9, 1.1, 1.0, 0.8], [0.1, -0.2, 0.0, 0.1, 0.2, -0.1]])
    >>> about_largest(TextMeans.of_values(steady), lambda place: f"L0H{place[0]}", things="heads", unit="nats")
    '1 of 2 heads has a clear effect: L0H0, +1 nats (+0.817 to +1.18 with all 2 at once)'
    >>> about_largest(TextMeans.of_values(steady[1:, :3]), lambda place: "L0H1", things="heads")
    'L0H1 has an effect of −0.0333; 3 texts are too few for an interval, which needs 5 or more'
    """
    places = most_first(means)
    if not places:
        return "nothing was measured"
    top, count, sign = places[0], len(places), "+" if signed else ""
    name, texts = named(top), int(means.texts[top])
    value = f"{float(means.mean[top]):{sign}.3g}{f' {unit}' if unit else ''}"
    # One alone was not picked out of many: its interval is the one of the table.
    low, high = (float(end[top]) for end in (means.simultaneous() if count > 1 else means.interval()))
    known = not math.isnan(low)
    at_once = f" with all {count} at once" if count > 1 else ""
    span = f" ({low:{sign}.3g} to {high:{sign}.3g}{at_once})" if known else ""
    one = "one text carries" if group == 1 else "one group of texts carries"
    carried = f"; {one} more than half of it" if known and bool(means.one_text[top]) else ""
    if not signed or count == 1:
        told = f"{name} has {f'the largest {what},' if count > 1 else f'{_a(what)} of'} {value}{span}"
    elif not known:
        told = f"{name} has the largest {what}, {value}"
    elif clear := int(means.clear.sum()):
        has = "has a" if clear == 1 else "have a"
        largest = ":" if clear == 1 else "; the largest is that of"
        told = f"{clear} of {count} {things} {has} clear {what}{largest} {name}, {value}{span}"
    else:
        needed = means.texts_needed(top)
        # Half of all cases are clear on so many: these may be the other half.
        more = needed is not None and needed > texts
        enough = f"; about {round(needed * group)} texts would show one of that size" if needed and more else ""
        told = (
            f"none of {count} {things} has a clear {what} on {round(texts * group)} texts "
            f"(the largest, that of {name}, is {value}{enough})"
        )
    return with_minus_signs(f"{told}{carried}{no_interval(texts)}")


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeio' else 'a'} {what}"


def no_interval(texts: int) -> str:
    """Why there is no interval, as the end of a sentence; empty if there may be one."""
    if texts >= LEAST_TEXTS:
        return ""
    count = "1 text is" if texts == 1 else f"{texts} texts are"
    return f"; {count} too few for an interval, which needs {LEAST_TEXTS} or more"


def interval_note(texts: int) -> str:
    """What a table says about its intervals."""
    if texts < LEAST_TEXTS:
        return f"No intervals{no_interval(texts)}.".replace("; ", ": ", 1)
    return (
        "Intervals are pointwise 95 % t intervals over texts. Clear: the simultaneous 95 % interval over all shown "
        "(studentised max-T) excludes 0. One text: a single text carries more than half of the sum of sizes; no "
        "interval then has its nominal coverage."
    )


def for_map(means: TextMeans, rows: Sequence[int]) -> dict[str, Any]:
    """The means, both ends of their intervals, and which are clear (None without intervals), in some rows."""
    low, high = means.interval()
    found = {"effect": means.mean, "low": low, "high": high, "clear": means.clear}
    shown: dict[str, Any] = {name: value[list(rows)].numpy() for name, value in found.items()} | {"signed": True}
    return shown if bool((means.texts >= LEAST_TEXTS).any()) else shown | {"clear": None}
