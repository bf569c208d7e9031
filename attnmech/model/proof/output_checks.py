"""Checks the outputs of attention, from pattern and v: the gate, z, `result`, `attn_raw` and `attn_out`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from ...maths.precision import steps_rounding, sum_rounding
from ..attention.local_global import halves_of, sum_of_halves
from ..parts.certificate import Check
from ..parts.gates import HalfOfRow, NormGate
from ..parts.norms import epsilon_of, weight_of
from .probe import Compared, Probe, ProbeRun, Statement, by_row, norm_of

_ALONE: Final = 4  # at this many tokens, each head goes through W_O by itself


def gate_values(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    gate = probe.plan.gate
    assert gate is not None
    if isinstance(gate, NormGate):
        norm = probe.plain_module(layer, f"{probe.plan.attention}.{gate.path}")
        ungated = _pattern_v(probe, run, layer, probe.at(run, "v", layer))
        weight = weight_of(norm, rearrange(ungated, "batch position head d -> batch position (head d)"))
        expected = gate.of(weight, epsilon_of(norm), ungated)
        yield probe.compared(run, layer, probe.at(run, "gate", layer), expected, by_row(expected, gate_limit(probe)))
        return
    if isinstance(gate, HalfOfRow):
        gate_value = probe.at(run, "gate", layer)
        yield probe.compared(run, layer, gate_value, halves_of(run.batch, gate_value), torch.zeros_like(gate_value))
        return
    expected = gate.of(probe.projected(run, layer, gate.path), probe.stack.n_heads)
    yield probe.compared(run, layer, probe.at(run, "gate", layer), expected, by_row(expected, probe.local))


def gate_limit(probe: Probe) -> float:
    return probe.of_norms if isinstance(probe.plan.gate, NormGate) else probe.local


def weighted_values(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    pattern, v = probe.at(run, "pattern", layer), probe.at(run, "v", layer)
    expected, summed = (_pattern_v(probe, run, layer, v, size=size) for size in (False, True))
    if probe.plan.gate is not None:
        gate = probe.at(run, "gate", layer)
        expected, summed = expected * gate, summed * gate.abs()
    allowed = probe.product(pattern.shape[-1]) * summed
    if isinstance(probe.plan.gate, NormGate):
        # The norm computes in float32 even in a float64 model.
        allowed = allowed + max(steps_rounding(kind) for kind in (probe.model.dtype, torch.float32)) * summed
    everywhere = torch.ones_like(expected[..., 0], dtype=torch.bool)
    yield probe.compared(run, layer, probe.at(run, "z", layer), expected, allowed, everywhere)


def _pattern_v(probe: Probe, run: ProbeRun, layer: int, v: Tensor, *, size: bool = False) -> Tensor:
    """Σ_j p_ij v_j of each head, or Σ_j p_ij |v_j|."""
    values = with_further(by_head(probe, v), probe.block(run, layer).notes.further_values)
    return einsum(
        probe.at(run, "pattern", layer),
        values.abs() if size else values,
        "batch head query key, batch key head d -> batch query head d",
    )


def with_further(values: Tensor, further: Tensor | None) -> Tensor:
    """Values by position, followed by the values that belong to no token."""
    if further is None:
        return values
    return torch.cat((values, rearrange(further, "batch head key d -> batch key head d").to(values)), dim=1)


def by_head(probe: Probe, value: Tensor) -> Tensor:
    """Values repeated for the query heads that share them."""
    group = probe.stack.n_heads // probe.stack.n_kv_heads
    return repeat(value, "batch position kv d_head -> batch position (kv group) d_head", group=group)


def written_by_heads(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    dtype, d_value = probe.model.dtype, probe.stack.d_value
    steps = steps_rounding(dtype)
    weights, z = probe.stack.weights(layer), probe.at(run, "z", layer)
    read = run.out_inputs[probe.stack.label, layer].to(probe.wide).reshape(z.shape)
    yield probe.compared(run, layer, read, z, sum_rounding(dtype) * z.abs())
    W_O = weights.W_O.to(probe.wide)
    pattern = "batch position head d_head, head d_head d_model -> batch position head d_model"
    result = einsum(z, W_O, pattern)
    summed = norm_of(z)[..., None] * norm_of(W_O, 1)
    allowed = probe.weighted(d_value) * summed + steps * result.abs()
    yield probe.compared(run, layer, probe.at(run, "result", layer), result, allowed)
    bias = result.new_zeros(result.shape[-1]) if weights.b_O is None else weights.b_O.to(probe.wide)
    product = result.sum(dim=2)
    rounding = probe.weighted(probe.stack.n_heads * d_value)
    allowed = rounding * (summed.sum(dim=2) + bias.abs()) + steps * (product.abs() + bias.abs())
    yield probe.compared(run, layer, probe.at(run, "attn_raw", layer), product + bias, allowed)
    if run is probe.short:
        yield _alone(probe, layer, z, W_O, bias)


def _alone(probe: Probe, layer: int, z: Tensor, W_O: Tensor, bias: Tensor) -> Compared:
    """Sends the z of each head through W_O's module by itself, scaled to one size, so that no head hides another."""
    dtype = probe.model.dtype
    rows = z[probe.short.real(probe.stack.label)][:_ALONE]
    # Scaling by a power of two is exact.
    largest = rows.abs().amax(dim=(0, 2), keepdim=True)
    rows = rows * torch.where(largest > 0, torch.exp2(-largest.log2().round()), 1.0)
    rows = rows.to(dtype).to(probe.wide)
    heads = torch.eye(len(W_O), device=z.device, dtype=probe.wide)
    alone = einsum(rows, heads, "row head d_head, head other -> head row other d_head")
    rows_alone = rearrange(alone, "head row other d_head -> head row (other d_head)")
    alone = sum_of_halves(rows_alone, probe.stack.n_heads) if probe.plan.windows else rows_alone
    written = probe.plain_module(layer, probe.plan.out)(alone.to(dtype).contiguous())
    product = einsum(rows, W_O, "row head d_head, head d_head d_model -> head row d_model")
    summed = rearrange(norm_of(rows), "row head -> head row")[..., None] * norm_of(W_O, 1)[:, None]
    rounding = probe.weighted(rows_alone.shape[-1])
    allowed = rounding * (summed + bias.abs()) + steps_rounding(dtype) * (product.abs() + bias.abs())
    everywhere = torch.ones(product.shape[:2], dtype=torch.bool, device=z.device)
    compared = probe.compared(probe.short, layer, written, product + bias, allowed, everywhere)
    return replace(compared, where=f"layer {layer}, a head alone")


def scaled_output(probe: Probe) -> Check | Statement:
    factor, architecture = probe.plan.attn_scale, probe.plan
    statement = "attn_out = attn_raw" if factor == 1 else f"attn_out = {factor:.4g} attn_raw"
    if architecture.attn_out not in ("", architecture.out):
        return Check.untried("attn_out", statement, "a norm comes between them")
    adding = sum_rounding(probe.model.dtype)

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        raw = factor * probe.at(run, "attn_raw", layer)
        yield probe.compared(run, layer, probe.at(run, "attn_out", layer), raw, adding * raw.abs())

    return Statement("attn_out", statement, ("attn_raw", "attn_out"), comparisons, adding)
