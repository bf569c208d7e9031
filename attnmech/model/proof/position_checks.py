"""Checks that rotations and ALiBi equal their closed forms."""

from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from torch import Tensor

from ...maths.float64 import as_float64, float64_device
from ...maths.norms import FrozenNorm
from ...maths.precision import steps_rounding, table_tolerance
from ..parts.certificate import Check
from ..parts.position import rotary_tables
from ..stack.ledger import rotated_in
from .probe import Compared, Probe, ProbeRun, Statement, norm_of


def rotated(probe: Probe) -> Statement:
    """Rotated queries and keys are R q and R k."""

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        statement.tolerance = max(statement.tolerance, _rotated_to(probe, run, layer))
        yield from _rotary(probe, run, layer)

    statement = Statement("rotary", "q_rot, k_rot = R q, R k", ("q_rot", "k_rot"), comparisons, 0.0)
    return statement


def _rotated_to(probe: Probe, run: ProbeRun, layer: int) -> float:
    """The rounding of a layer's rotation; some families rotate in float32 even in a float64 model."""
    rotation = probe.stack.rotation(layer, probe.block(run, layer).notes)
    values = [run.values[probe.stack.point(f"{name}_rot"), layer] for name in "qk"]
    by_head = "batch position head d_head -> batch head position d_head"
    used = {rotated_in(rearrange(value, by_head), rotation) for value in values}
    return steps_rounding(torch.float32 if used == {torch.float32} else probe.model.dtype)


def _rotary(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    rotary = probe.plan.rotary
    assert rotary is not None
    notes = probe.block(run, layer).notes
    assert notes.rotary is not None
    cos, sin = (table[:, :, None].to(probe.wide) for table in notes.rotary)
    for name, norm in (("q", notes.query_norm), ("k", notes.key_norm)):
        value = probe.at(run, name, layer) * (probe.plan.key_scale if name == "k" else 1.0)
        after = probe.plan.norm_after_rotary
        expected = _normed(value, None if after else norm)
        expected = expected if layer in probe.plan.unrotated else rotary(expected, cos, sin)
        expected = _normed(expected, norm if after else None)
        allowed = _rotated_to(probe, run, layer) * norm_of(expected)[..., None]
        yield probe.compared(run, layer, probe.at(run, f"{name}_rot", layer), expected, allowed)


def _normed(value: Tensor, norm: FrozenNorm | None) -> Tensor:
    if norm is None:
        return value
    return norm(value) if norm.shift is None else norm(value) + norm.shift


def rotary_closed_form(probe: Probe) -> Check | Statement:
    """The rotary tables are cosine and sine of position · θ^(−2i/d); positions count from 0 or 1."""
    statement = "rotary tables = cos, sin of position · θ^(−2i/d)"
    rotary = probe.plan.rotary
    assert rotary is not None
    if not probe.model.reads_tokens:
        return Check("rotary tables", statement, (), None, detail="angles of rows and columns, not of one position")
    length = probe.passes.batches[-1].ids.shape[1]
    positions = torch.arange(length + 1, device=float64_device(probe.model.device))
    parameters = dict(getattr(probe.model.config.get_text_config(), "rope_parameters", None) or {})
    if rotary.theta is not None:
        parameters["rope_theta"] = rotary.theta
    expected = rotary_tables(parameters, round(probe.stack.d_head * rotary.share), positions)
    if expected is None:
        kind = parameters.get("rope_type", "that differs between layers")
        return Check("rotary tables", statement, (), None, detail=f"rope_type {kind!r} has no closed form here")

    # An angle is a position times a frequency, and a model may store frequencies in its own precision.
    frequency = torch.atan2(expected[1][1:2], expected[0][1:2])
    slack = torch.finfo(min(probe.model.dtype, torch.float32, key=lambda kind: kind.itemsize)).eps
    angles = rotary.spread(positions[:, None] * frequency)

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        tables = probe.block(run, layer).notes.rotary
        if layer in probe.plan.unrotated:
            return
        assert tables is not None
        cosine, length = rotary.spread(expected[0]), tables[0].shape[1]
        from_zero, from_one = ((as_float64(tables[0][-1, 0]) - cosine[first]).abs().amax() for first in (0, 1))
        places = slice(1, length + 1) if from_one < from_zero else slice(length)
        for table, by_position in zip(tables, expected, strict=True):
            closed = rotary.spread(by_position)[places]
            allowed = probe.tables * closed.abs().amax() + slack * angles[places]
            everywhere = torch.ones_like(closed, dtype=torch.bool)
            yield probe.compared(run, layer, as_float64(table[-1]), closed, allowed, everywhere)

    return Statement("rotary tables", statement, ("q_rot", "k_rot", "scores"), comparisons, probe.tables)


def alibi_terms(probe: Probe) -> Statement:
    """The position term is slope · key position."""
    alibi = probe.plan.alibi
    assert alibi is not None
    slopes = alibi.slopes(probe.stack.n_heads).to(probe.model.device) * alibi.factor
    tolerance = max(probe.tables, table_tolerance(alibi.rounded_to))

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        real = run.real_keys(probe.stack.label)
        place = (real.cumsum(dim=1) - 1) * real
        if alibi.from_end:
            length = real.shape[1]
            place = torch.arange(1 - length, 1, device=probe.model.device).expand(real.shape)
        expected = einsum(slopes, place.to(slopes.dtype), "head, batch key -> batch head key")
        position = probe.block(run, layer).position
        term = torch.zeros_like(expected) if position is None else position[:, :, -1].to(expected)
        everywhere = torch.ones_like(expected, dtype=torch.bool)
        allowed = tolerance * expected.abs().amax(dim=-1, keepdim=True)
        yield probe.compared(run, layer, term.expand_as(expected), expected, allowed, everywhere)

    return Statement("alibi", "position term = slope · key position", ("scores",), comparisons, tolerance)
