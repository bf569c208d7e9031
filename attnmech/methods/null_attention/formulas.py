"""Formulas of null attention: the sink's mass, what the sink's value writes, and the verdict on a head.

Formulas: docs/formulas.md#null-attention.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Verdict: TypeAlias = Literal["resting", "active", "unused", "subtle", "undecided", "not attending"]

VERDICTS: Final[Mapping[Verdict, str]] = {
    "resting": "it attends and writes little, and removing what it writes changes nothing",
    "active": "it attends and writes much, and removing what it writes changes the metric",
    "unused": "it attends and writes much, but removing what it writes changes nothing",
    "subtle": "it attends and writes little, but removing what it writes changes the metric",
    "undecided": "it attends; these texts do not show whether the change is small enough to ignore or large enough to "
    "matter",
    "not attending": "its mean attention to the sink is low",
}
"""Each verdict and what it says about a head."""


def verdict_of(
    sink_mass: float,
    value_ratio: float,
    low: float,
    high: float,
    *,
    delta: float,
    least_mass: float,
    least_ratio: float,
) -> Verdict:
    """Judges one head; `low` and `high` are the ends of the interval of the effect of zeroing the sink's value.

    "not attending"  sink_mass < least_mass
    "undecided"      there is no interval, or it crosses −delta or delta
    "resting"        the whole interval lies in [−delta, delta], and value_ratio < least_ratio
    "active"         the whole interval lies outside [−delta, delta], and value_ratio ≥ least_ratio
    "unused"         the whole interval lies in [−delta, delta], and value_ratio ≥ least_ratio
    "subtle"         the whole interval lies outside [−delta, delta], and value_ratio < least_ratio

    >>> bounds = {"delta": 0.01, "least_mass": 0.3, "least_ratio": 0.5}
    >>> verdict_of(0.9, 0.02, -0.001, 0.004, **bounds), verdict_of(0.9, 0.02, -0.001, 0.04, **bounds)
    ('resting', 'undecided')
    """
    if sink_mass < least_mass:
        return "not attending"
    inside = -delta <= low and high <= delta
    outside = low > delta or high < -delta
    # NaN is neither inside nor outside.
    if math.isnan(sink_mass) or math.isnan(value_ratio) or not (inside or outside):
        return "undecided"
    writes = value_ratio >= least_ratio
    if inside:
        return "unused" if writes else "resting"
    return "active" if writes else "subtle"


def texts_to_decide(mean: float, ends: tuple[float, float], texts: int, delta: float) -> float:
    """Estimates how many texts bring an effect's interval clear of the bounds ±delta, if its mean and spread stay the
    same.

    n · (half-width / distance from the mean to the nearer bound)², because the half-width falls with √n; infinite if
    the mean lies at a bound, NaN without an interval.

    >>> texts_to_decide(0.004, (-0.008, 0.016), texts=20, delta=0.01)
    80.0
    """
    distance, half = abs(abs(mean) - delta), (ends[1] - ends[0]) / 2
    return math.nan if math.isnan(half) else texts * (half / distance) ** 2 if distance > 0 else math.inf


def most_attended(
    received: Float[Tensor, "batch head key"], real: Bool[Tensor, "batch key"]
) -> Int[Tensor, "batch head"]:
    """The real key that receives most attention from the other rows of its text; any one of equal keys."""
    return received.masked_fill(~real[:, None], -1.0).argmax(dim=-1)


def sink_mass(
    received: Float[Tensor, "batch head key"], sink: Bool[Tensor, "batch _ key"], others: Bool[Tensor, "batch _ key"]
) -> Float[Tensor, "batch head"]:
    """Σ_i p_i,sink / (number of rows i) over the rows outside the sink; `received` is Σ_i p_ij over these rows."""
    return received.masked_fill(~sink, 0.0).sum(dim=-1) / others.sum(dim=-1)


def value_ratio(
    written: Float[Tensor, "batch head key"],
    received: Float[Tensor, "batch head key"],
    sink: Bool[Tensor, "batch _ key"],
    others: Bool[Tensor, "batch _ key"],
) -> Float[Tensor, "batch head"]:
    """Returns ‖v_sink W_O‖ / median_j ‖v_j W_O‖ with `written` = ‖v W_O‖ of every key; 0 where the sink writes nothing.

    With several sink tokens, their norms are averaged, weighted by the attention that each token receives.
    """
    share = received.masked_fill(~sink, 0.0)
    total = share.sum(dim=-1, keepdim=True)
    alike = sink / sink.sum(dim=-1, keepdim=True)
    ours = (written * torch.where(total > 0, share / total, alike)).sum(dim=-1)
    typical = written.masked_fill(~others, torch.nan).nanquantile(0.5, dim=-1)
    return torch.where(ours == 0, 0.0, ours / typical)
