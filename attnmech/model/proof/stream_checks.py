"""Checks that the stream is the sum of what attention and MLP write."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...maths.precision import sum_rounding
from ...points import PointKey, full_name
from ..parts.certificate import Check
from ..stack.block import PostNormEnd
from .probe import Compared, Probe, ProbeRun, Statement, by_row


def sum_with_attention(probe: Probe) -> Check | Statement:
    """`resid_mid` is the stream plus what attention (and a mixer, if there is one) writes."""
    mixes = bool(probe.plan.mixer)
    statement = f"resid_pre + attn_out{' + mixer_out' if mixes else ''} = resid_mid"
    if probe.plan.mid_norm is None:
        return Check(
            "stream", statement, (), None, detail=probe.model.points[probe.stack.point("resid_mid")].absent or ""
        )
    adding = sum_rounding(probe.model.dtype)

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        terms = torch.stack([probe.at(run, point, layer) for point in summed])
        allowed = adding * terms.abs().sum(dim=0)
        yield probe.compared(run, layer, probe.at(run, "resid_mid", layer), terms.sum(dim=0), allowed)

    summed = ("resid_pre", "attn_out", *(["mixer_out"] if mixes else []))
    return Statement("stream", statement, (*summed, "resid_mid"), comparisons, adding)


def mlp_statement(probe: Probe) -> tuple[str, tuple[str, ...]]:
    """The statement that `resid_post` is a sum, and the points in it."""
    plan = probe.plan
    if plan.mlp_out is None:
        return "resid_post = resid_pre + attn_out", ("resid_pre", "attn_out", "resid_post")
    if plan.mid_norm is None:
        return "resid_post = resid_pre + attn_out + mlp_out", ("resid_pre", "attn_out", "mlp_out", "resid_post")
    between = f" + {plan.interposed}.attn_out" if plan.interposed else ""
    sum_ = f"resid_mid{between} + mlp_out"
    if plan.norm == "post":
        sum_ = f"N(N(N(resid_mid){between}) + mlp_out)" if between else "N(N(resid_mid) + mlp_out)"
    return f"resid_post = {sum_}", ("resid_mid", "mlp_out", "resid_post")


def sum_with_mlp(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """`resid_post` is the stream plus what the MLP writes."""
    if probe.plan.mid_norm is not None:
        middle = [probe.at(run, "resid_mid", layer)]
    else:
        middle = [probe.at(run, "resid_pre", layer), probe.at(run, "attn_out", layer)]
    ended, allowed = block_end(probe, layer, middle, run.values)
    yield probe.compared(run, layer, probe.at(run, "resid_post", layer), ended, allowed)


def block_end(
    probe: Probe, layer: int, terms: list[Tensor], values: Mapping[PointKey, Tensor]
) -> tuple[Tensor, Tensor]:
    """resid_post, computed from the stream before the MLP and the terms added to it, and its rounding error."""
    plan = probe.plan
    if plan.interposed:
        terms = [*terms, values[full_name(plan.interposed, "attn_out"), layer].to(probe.wide)]
    if plan.mlp_out is not None:
        terms = [*terms, values[probe.stack.point("mlp_out"), layer].to(probe.wide)]
    if plan.norm == "pre":
        stacked = torch.stack(terms)
        return stacked.sum(dim=0), sum_rounding(probe.model.dtype) * stacked.abs().sum(dim=0)
    assert plan.mid_norm is not None and plan.post_norm is not None
    mid_norm, post_norm = (probe.plain_module(layer, path) for path in (plan.mid_norm, plan.post_norm))
    middle, *crossed, added = (term.to(probe.model.dtype) for term in terms)
    with torch.no_grad():
        if crossed:
            assert plan.interposed_norm is not None
            cross_norm = probe.plain_module(layer, plan.interposed_norm)
            ended = post_norm(cross_norm(mid_norm(middle) + crossed[0]) + added)
        else:
            ended = PostNormEnd(mid_norm, post_norm)(middle, added)
    return ended, by_row(ended, probe.local)


def chained_layers(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """`resid_pre` is `resid_post` of the layer before."""
    before = probe.stack.before(layer)
    if before in run.layers[probe.stack.label]:
        left = probe.at(run, "resid_post", before)
        allowed = sum_rounding(probe.model.dtype) * left.abs()
        yield probe.compared(run, before, probe.at(run, "resid_pre", layer), left, allowed)
