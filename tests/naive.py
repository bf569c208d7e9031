"""Intervals over texts, written out text by text."""

import math
from collections.abc import Sequence

from scipy.stats import t


def t_interval(above: Sequence[float], below: Sequence[float] | None = None) -> tuple[float, float]:
    """Σ above / Σ below ± t · standard error: leaving each text out in turn."""
    below = [1.0] * len(above) if below is None else list(below)
    pairs = [(float(y), float(n)) for y, n in zip(above, below, strict=True) if (y, n) != (0.0, 0.0)]
    count, total = len(pairs), sum(n for _, n in pairs)
    mean = sum(y for y, _ in pairs) / total
    left_out = [(y - mean * n) / (total - n) for y, n in pairs]
    error = math.sqrt((count - 1) / count * sum(each**2 for each in left_out))
    freedom = max(1.0, total**2 / sum(n**2 for _, n in pairs) - 1)
    half = t.ppf(0.975, freedom) * error
    return mean - half, mean + half


def difference_interval(
    one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float]:
    """The interval of the difference of two ratios Σ above / Σ below over the same texts."""
    means, moved = [], []
    for above, below in (one, other):
        total, mean = sum(below), sum(above) / sum(below)
        means.append(mean)
        moved.append([float((y - mean * n) / (total - n)) for y, n in zip(above, below, strict=True)])
    count = len(moved[0])
    apart = [a - b for a, b in zip(*moved, strict=True)]
    centre = sum(apart) / count
    error = math.sqrt((count - 1) / count * sum((each - centre) ** 2 for each in apart))
    half = t.ppf(0.975, count - 1) * error
    return float(means[0] - means[1]) - half, float(means[0] - means[1]) + half
