"""Is a head's attention to a sink null? Its mass, what the sink's value writes, and the verdict (formulas §5)."""

import math
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Verdict: TypeAlias = Literal["null", "active", "mixed", "undecided", "not attending"]

VERDICTS: Final[tuple[Verdict, ...]] = ("null", "active", "mixed", "undecided", "not attending")


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
    """The verdict on one head; `low` and `high` are the interval of the effect of zeroing the sink's value.

    "not attending"  sink_mass < least_mass
    "undecided"      there is no interval, or it crosses −delta or delta
    "null"           the whole interval lies in [−delta, delta], and value_ratio < least_ratio
    "active"         the whole interval lies outside, and value_ratio ≥ least_ratio
    "mixed"          the two disagree: little is written and it matters, or much and it does not

    >>> bounds = {"delta": 0.01, "least_mass": 0.3, "least_ratio": 0.5}
    >>> verdict_of(0.9, 0.02, -0.001, 0.004, **bounds), verdict_of(0.9, 0.02, -0.001, 0.04, **bounds)
    ('null', 'undecided')
    """
    if sink_mass < least_mass:
        return "not attending"
    inside = -delta <= low and high <= delta
    outside = low > delta or high < -delta
    # Numbers that are NaN are neither inside nor outside.
    if math.isnan(sink_mass) or math.isnan(value_ratio) or not (inside or outside):
        return "undecided"
    writes = value_ratio >= least_ratio
    if writes == inside:
        return "mixed"
    return "active" if writes else "null"


def most_attended(
    received: Float[Tensor, "batch head key"], real: Bool[Tensor, "batch key"]
) -> Int[Tensor, "batch head"]:
    """The real key that gets most from the other rows of its text; of equal ones, one of them."""
    return received.masked_fill(~real[:, None], -1.0).argmax(dim=-1)


def sink_mass(
    received: Float[Tensor, "batch head key"],
    sink: Bool[Tensor, "batch _ key"],
    others: Bool[Tensor, "batch _ key"],
) -> Float[Tensor, "batch head"]:
    """Σ_i p_i,sink / (number of rows i), over the rows that are no sink; `received` is Σ_i p_ij over these rows."""
    return received.masked_fill(~sink, 0.0).sum(dim=-1) / others.sum(dim=-1)


def value_ratio(
    written: Float[Tensor, "batch head key"],
    received: Float[Tensor, "batch head key"],
    sink: Bool[Tensor, "batch _ key"],
    others: Bool[Tensor, "batch _ key"],
) -> Float[Tensor, "batch head"]:
    """‖v_sink W_O‖ / median_j ‖v_j W_O‖, with `written` = ‖v W_O‖ of every key; 0 where the sink writes nothing.

    Of several sink tokens the mean is taken, weighted by the attention that each receives.
    """
    share = received.masked_fill(~sink, 0.0)
    total = share.sum(dim=-1, keepdim=True)
    alike = sink / sink.sum(dim=-1, keepdim=True)
    ours = (written * torch.where(total > 0, share / total, alike)).sum(dim=-1)
    typical = written.masked_fill(~others, torch.nan).nanquantile(0.5, dim=-1)
    return torch.where(ours == 0, 0.0, ours / typical)
