"""Checks that rotations and ALiBi equal their closed forms, and scores of DeBERTa and XLNet their own tables."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...maths.float64 import as_float64, float64_device
from ...maths.norms import FrozenNorm
from ...maths.precision import steps_rounding, table_tolerance
from ..attention.in_force import Part
from ..attention.relative_positions import reach_of, row_of_distance
from ..parts.certificate import Check
from ..parts.position import rotary_tables
from ..stack.ledger import rotated_in
from .probe import Compared, Probe, ProbeRun, Statement, norm_of
from .texts import texts_of


def rotated(probe: Probe) -> Statement:
    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        rotary, notes, rounding = probe.plan.rotary, probe.block(run, layer).notes, _rotated_to(probe, run, layer)
        statement.tolerance = max(statement.tolerance or 0.0, rounding)
        assert rotary is not None and notes.rotary is not None
        cos, sin = (table[:, :, None].to(probe.wide) for table in notes.rotary)
        for name, norm in (("q", notes.query_norm), ("k", notes.key_norm)):
            value = probe.at(run, name, layer) * (probe.plan.key_scale if name == "k" else 1.0)
            after = probe.plan.norm_after_rotary
            expected = _normed(value, None if after else norm)
            expected = expected if layer in probe.plan.unrotated else rotary(expected, cos, sin)
            expected = _normed(expected, norm if after else None)
            allowed = rounding * norm_of(expected)[..., None]
            yield probe.compared(run, layer, probe.at(run, f"{name}_rot", layer), expected, allowed)

    statement = Statement("rotary", "q_rot, k_rot = R q, R k", ("q_rot", "k_rot"), comparisons, 0.0)
    return statement


def _rotated_to(probe: Probe, run: ProbeRun, layer: int) -> float:
    """The rounding of a layer's rotation; some families rotate in float32 even in a float64 model."""
    rotation = probe.stack.rotation(layer, probe.block(run, layer).notes)
    values = [run.values[probe.stack.point(f"{name}_rot"), layer] for name in "qk"]
    by_head = "batch position head d_head -> batch head position d_head"
    used = {rotated_in(rearrange(value, by_head), rotation) for value in values}
    return steps_rounding(torch.float32 if used == {torch.float32} else probe.model.dtype)


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
        return Check.untried("rotary tables", statement, "angles of rows and columns, not of one position")
    length = probe.passes.batches[-1].ids.shape[1]
    positions = torch.arange(length + 1, device=float64_device(probe.model.device))
    parameters = dict(getattr(probe.model.config.get_text_config(), "rope_parameters", None) or {})
    if rotary.theta is not None:
        parameters["rope_theta"] = rotary.theta
    expected = rotary_tables(parameters, round(probe.stack.d_head * rotary.share), positions)
    if expected is None:
        kind = parameters.get("rope_type", "that differs between layers")
        return Check.untried("rotary tables", statement, f"rope_type {kind!r} has no closed form here")

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
        real = run.real(probe.stack.label)[-1, :length].to(positions.device)
        first, counted = int(real.int().argmax()), (real.cumsum(0) - 1).clamp_min(0)
        begun = as_float64(tables[0][-1, first])
        # Some models count from 1, others leave padding out (Qwen2.5-Omni).
        ways = (positions[:length], positions[1 : length + 1], counted)
        places = min(ways, key=lambda places: float((begun - cosine[places[first]]).abs().amax()))
        for table, by_position in zip(tables, expected, strict=True):
            closed = rotary.spread(by_position)[places]
            allowed = probe.tables * closed.abs().amax() + slack * angles[places]
            yield probe.compared(run, layer, as_float64(table[-1]), closed, allowed, real[:, None].expand_as(closed))

    return Statement("rotary tables", statement, ("q_rot", "k_rot", "scores"), comparisons, probe.tables)


def alibi_terms(probe: Probe) -> Statement:
    alibi = probe.plan.alibi
    assert alibi is not None
    slopes = alibi.slopes(probe.stack.n_heads).to(probe.model.device) * alibi.factor
    tolerance = max(probe.tables, table_tolerance(alibi.rounded_to))

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        real = run.real_keys(probe.stack.label)
        place = (real.cumsum(dim=1) - 1) * real
        if alibi.from_end:
            place = torch.arange(1 - real.shape[1], 1, device=probe.model.device).expand(real.shape)
        expected = einsum(slopes, place.to(slopes.dtype), "head, batch key -> batch head key")
        position = probe.block(run, layer).position
        term = torch.zeros_like(expected) if position is None else position[:, :, -1].to(expected)
        everywhere = torch.ones_like(expected, dtype=torch.bool)
        allowed = tolerance * expected.abs().amax(dim=-1, keepdim=True)
        yield probe.compared(run, layer, term.expand_as(expected), expected, allowed, everywhere)

    return Statement("alibi", "position term = slope · key position", ("scores",), comparisons, tolerance)


_BEYOND: Final = 16  # the text reaches past the distances that have separate rows by this many tokens


def relative_scores(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """score = (q·k + q·K + k·Q) / √(d_head · n) of every layer checked."""
    q, k = (rearrange(probe.at(run, name, layer), "b position head d -> b head position d") for name in "qk")
    sinusoidal = probe.plan.relative == "XLNet"
    # Tables have a row for each distance, from the least up; XLNet's are in float32 or in the model's precision.
    terms = list((_with_sinusoids if sinusoidal else _with_tables)(probe, layer, q, k))
    rounding = max(probe.product(probe.model.d_model), probe.tables if sinusoidal else 0.0)
    scale = (q.shape[-1] * (1 if sinusoidal else 1 + len(terms))) ** -0.5
    expected, size = q @ k.mT, q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    for product, bound in terms:
        expected, size = expected + product, size + bound
    scores = probe.at(run, "scores", layer)
    keep = probe.comparable(run, "scores", layer, scores)
    yield probe.compared(run, layer, scores, scale * expected, rounding * scale * size, keep)


def _with_tables(probe: Probe, layer: int, q: Tensor, k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """DeBERTa's products of queries and keys with rows of its tables, each with a bound of its sum of magnitudes."""
    attention = probe.plain_module(layer, probe.plan.attention)
    encoder, config = probe.model.plain.base_model.encoder, probe.model.config
    place, distances = _distances(q)
    row = torch.tensor([row_of_distance(config, distance) for distance in range(1 - len(place), len(place))])
    row = row.to(q.device)[distances]
    for kind in (kind for kind in config.pos_att_type or () if kind in ("c2p", "p2c")):
        table = _table(encoder, attention, kind, probe.stack.n_heads).to(probe.wide)
        content, at = (q, place[:, None].expand_as(row)) if kind == "c2p" else (k, place.expand_as(row))
        products = einsum(content, table, "b head i d, head p d -> b head i p")
        yield products[:, :, at, row], content.norm(dim=-1)[:, :, at] * table.norm(dim=-1)[:, row]


def _with_sinusoids(probe: Probe, layer: int, q: Tensor, _: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """XLNet's product (q − u + v)·r, where q includes u, and r is the projected sinusoid of the distance."""
    weights: Any = probe.plain_module(layer, probe.plan.replaced)
    u, v, r = (weight.detach().to(probe.wide) for weight in (weights.r_w_bias, weights.r_r_bias, weights.r))
    place, row = _distances(q)
    d_model, distance = len(r), torch.arange(1.0 - len(place), len(place), device=q.device)
    if probe.model.config.clamp_len > 0:
        distance = distance.clamp(-probe.model.config.clamp_len, probe.model.config.clamp_len)
    angle = distance[:, None] / 10_000 ** (torch.arange(0, d_model, 2, device=q.device) / d_model)
    made = torch.cat((angle.sin(), angle.cos()), dim=-1).to(probe.wide)
    table = einsum(made, r, "p d_model, d_model head d -> head p d")
    products = einsum(q + (v - u)[:, None], table, "b head i d, head p d -> b head i p")
    longest = made.norm(dim=-1)[row] * r.norm(dim=0).norm(dim=-1)[:, None, None]
    size = (q.norm(dim=-1) + u.norm(dim=-1)[:, None] + v.norm(dim=-1)[:, None])[..., None] * longest
    yield products[:, :, place[:, None].expand_as(row), row], size


def _distances(q: Tensor) -> tuple[Tensor, Tensor]:
    """The positions, and the place of each pair's distance i − j among all distances, from the least up."""
    place = torch.arange(q.shape[2], device=q.device)
    return place, place[:, None] - place + len(place) - 1


def _table(encoder: Any, attention: nn.Module, kind: str, heads: int) -> Float[Tensor, "head place d_head"]:
    """The projected embedding of relative positions, by transformers' own modules."""
    names = {"c2p": ("pos_proj", "pos_key_proj", "key_proj"), "p2c": ("pos_q_proj", "pos_query_proj", "query_proj")}
    projection = next(getattr(attention, name) for name in names[kind] if hasattr(attention, name))
    rows = encoder.rel_embeddings.weight
    norm = getattr(encoder, "LayerNorm", None)
    with torch.no_grad():
        made: Tensor = projection(rows if norm is None else norm(rows))
    return rearrange(made, "place (head d) -> head place d", head=heads)


def relative_scores_beyond(probe: Probe) -> Iterator[Compared]:
    """The same of the first layer in a text with distances that share a row, if the probe lacks them and a text can."""
    model, limit = probe.model, probe.plan.position_limit
    if probe.plan.relative == "XLNet":
        return
    length = reach_of(model.config) + _BEYOND
    if any(run.batch.ids.shape[1] >= length for run in probe.passes.runs):
        return
    length = length if limit is None else min(length, limit)
    batch, layer = texts_of(model, [length]), probe.layers[0]
    run = ProbeRun(batch, {probe.stack.label: [layer]})
    points = [(probe.stack.point(name), layer) for name in ("q", "k", "scores")]
    layers = [(probe.stack.label, layer)]
    run.values.update(model.forward(batch, captures=points, rows=[run.hold], layers=layers, part=Part(0, 1)))
    yield from relative_scores(probe, run, layer)
