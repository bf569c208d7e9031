"""Checks the scores of DeBERTa and XLNet against config and raw weights, with tables and distances computed anew."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...maths.precision import product_rounding, steps_rounding
from ..attention.disentangled import reach_of, row_of_distance
from ..attention.in_force import Part
from .probe import Compared, Probe, ProbeRun
from .texts import texts_of

_BEYOND: Final = 16
"""The text reaches past the distances that have separate rows by this many tokens."""


def relative_scores(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """score = (q·k + q·K + k·Q) / √(d_head · n) of every layer checked."""
    yield _compared(probe, run, layer)


def relative_scores_beyond(probe: Probe) -> Iterator[Compared]:
    """The same of the first layer in a text that is long enough for distances that share a row of the tables."""
    longer = _beyond_linear(probe)
    if longer is not None:
        yield _compared(probe, longer, probe.layers[0])


def _compared(probe: Probe, run: ProbeRun, layer: int) -> Compared:
    q, k = (rearrange(probe.at(run, name, layer), "b position head d -> b head position d") for name in "qk")
    if probe.plan.relative == "XLNet":
        return _compared_sinusoids(probe, run, layer, q, k)
    attention = probe.plain_module(layer, probe.plan.attention)
    encoder, config = probe.model.plain.base_model.encoder, probe.model.config
    kinds = [kind for kind in config.pos_att_type or () if kind in ("c2p", "p2c")]
    scale = (q.shape[-1] * (1 + len(kinds))) ** -0.5
    expected = q @ k.mT
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    if probe.plan.relative:
        length = q.shape[2]
        row = torch.tensor(
            [row_of_distance(config, distance) for distance in range(1 - length, length)], device=q.device
        )
        place = torch.arange(length, device=q.device)
        row = row[place[:, None] - place + length - 1]
        for kind in kinds:
            table = _table(encoder, attention, kind, probe.stack.n_heads).to(probe.wide)
            content, at = (q, place[:, None].expand_as(row)) if kind == "c2p" else (k, place.expand_as(row))
            products = einsum(content, table, "b head i d, head p d -> b head i p")
            expected = expected + products[:, :, at, row]
            size = size + content.norm(dim=-1)[:, :, at] * table.norm(dim=-1)[:, row]
    rounding = product_rounding(probe.model.dtype, probe.model.d_model) + steps_rounding(probe.model.dtype)
    scores = probe.at(run, "scores", layer)
    keep = probe.comparable(run, "scores", layer, scores)
    return probe.compared(run, layer, scores, scale * expected, rounding * scale * size, keep)


def _compared_sinusoids(probe: Probe, run: ProbeRun, layer: int, q: Tensor, k: Tensor) -> Compared:
    """XLNet: score = (q·k + (q − u + v)·r) / √d_head, where q includes u, and r is the projected sinusoid of the
    distance.
    """
    weights: Any = probe.plain_module(layer, probe.plan.replaced)
    u, v, r = (weight.detach().to(probe.wide) for weight in (weights.r_w_bias, weights.r_r_bias, weights.r))
    length, d_model = q.shape[2], len(r)
    distance = torch.arange(1.0 - length, length, device=q.device)
    if probe.model.config.clamp_len > 0:
        distance = distance.clamp(-probe.model.config.clamp_len, probe.model.config.clamp_len)
    angle = distance[:, None] / 10_000 ** (torch.arange(0, d_model, 2, device=q.device) / d_model)
    made = torch.cat((angle.sin(), angle.cos()), dim=-1).to(probe.wide)
    table = einsum(made, r, "p d_model, d_model head d -> head p d")
    place = torch.arange(length, device=q.device)
    row = place[:, None] - place + length - 1
    shifted = q + (v - u)[:, None]
    products = einsum(shifted, table, "b head i d, head p d -> b head i p")[:, :, place[:, None].expand_as(row), row]
    scale, scores = q.shape[-1] ** -0.5, probe.at(run, "scores", layer)
    longest = made.norm(dim=-1)[row] * r.norm(dim=0).norm(dim=-1)[:, None, None]
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    size = size + (q.norm(dim=-1) + u.norm(dim=-1)[:, None] + v.norm(dim=-1)[:, None])[..., None] * longest
    rounding = product_rounding(probe.model.dtype, probe.model.d_model) + steps_rounding(probe.model.dtype)
    keep = probe.comparable(run, "scores", layer, scores)
    # The sinusoids are in float32 or in the model's precision.
    allowed = scale * max(rounding, probe.tables) * size
    return probe.compared(run, layer, scores, scale * (q @ k.mT + products), allowed, keep)


def _table(encoder: Any, attention: nn.Module, kind: str, heads: int) -> Float[Tensor, "head place d_head"]:
    """The projected embedding of relative positions, by transformers' own modules."""
    names = {"c2p": ("pos_proj", "pos_key_proj", "key_proj"), "p2c": ("pos_q_proj", "pos_query_proj", "query_proj")}
    projection = next(getattr(attention, name) for name in names[kind] if hasattr(attention, name))
    rows = encoder.rel_embeddings.weight
    norm = getattr(encoder, "LayerNorm", None)
    with torch.no_grad():
        made: Tensor = projection(rows if norm is None else norm(rows))
    return rearrange(made, "place (head d) -> head place d", head=heads)


def _beyond_linear(probe: Probe) -> ProbeRun | None:
    """The first layer on a text with distances that share a row; None if the probe's texts have them, or no text
    can.
    """
    config, model = probe.model.config, probe.model
    if probe.plan.relative == "XLNet":
        return None
    length = reach_of(config) + _BEYOND
    limit = probe.plan.position_limit
    if not probe.plan.relative or any(run.batch.ids.shape[1] >= length for run in probe.passes.runs):
        return None
    length = length if limit is None else min(length, limit)
    batch, layer = texts_of(model, [length]), probe.layers[0]
    run = ProbeRun(batch, {probe.stack.label: [layer]})
    points = [(probe.stack.point(name), layer) for name in ("q", "k", "scores")]
    layers = [(probe.stack.label, layer)]
    run.values.update(model.forward(batch, captures=points, rows=[run.hold], layers=layers, part=Part(0, 1)))
    return run
