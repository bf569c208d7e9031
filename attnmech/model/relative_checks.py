"""Are the scores of a DeBERTa what its config and its raw weights say? Each table and each distance made anew."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..maths.precision import product_rounding, steps_rounding
from .disentangled import reach_of, row_of_distance
from .in_force import Part
from .observed import RowBlock
from .probe import Compared, Probe, Run, text_of

_BEYOND: Final = 16
"""How many tokens a text has beyond those whose distances have a row each."""


def relative_scores(probe: Probe) -> Iterator[Compared]:
    """score = (q·k + q·K + k·Q) / √(d_head · n) of every layer checked, and of the first in a text that is long enough
    for distances that share a row of the tables.
    """
    for run, layer in probe.places():
        yield _compared(probe, run, layer)
    longer = _beyond_linear(probe)
    if longer is not None:
        yield _compared(probe, longer, probe.layers[0])


def _compared(probe: Probe, run: Run, layer: int) -> Compared:
    q, k = (rearrange(probe.at(run, name, layer), "b position head d -> b head position d") for name in "qk")
    attention = probe.model.plain_module(probe.stack, layer, probe.plan.attention)
    encoder, config = probe.model.plain.base_model.encoder, probe.model.config
    kinds = [kind for kind in config.pos_att_type or () if kind in ("c2p", "p2c")]
    scale = (q.shape[-1] * (1 + len(kinds))) ** -0.5
    expected = q @ k.mT
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    if probe.plan.relative:
        length = q.shape[2]
        row = torch.tensor([row_of_distance(config, each) for each in range(1 - length, length)], device=q.device)
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


def _table(encoder: Any, attention: nn.Module, kind: str, heads: int) -> Float[Tensor, "head place d_head"]:
    """The projected embedding of relative positions, by transformers' own modules."""
    names = {"c2p": ("pos_proj", "pos_key_proj", "key_proj"), "p2c": ("pos_q_proj", "pos_query_proj", "query_proj")}
    projection = next(getattr(attention, name) for name in names[kind] if hasattr(attention, name))
    rows = encoder.rel_embeddings.weight
    norm = getattr(encoder, "LayerNorm", None)
    with torch.no_grad():
        made: Tensor = projection(rows if norm is None else norm(rows))
    return rearrange(made, "place (head d) -> head place d", head=heads)


def _beyond_linear(probe: Probe) -> Run | None:
    """The first layer on one text in which distances share a row; None if the probe's texts do, or none can be."""
    config, model = probe.model.config, probe.model
    length = reach_of(config) + _BEYOND
    limit = probe.plan.position_limit
    if not probe.plan.relative or any(run.batch.ids.shape[1] >= length for run in probe.passes.runs):
        return None
    length = length if limit is None else min(length, limit)
    batch, layer, blocks = text_of(model, length), probe.layers[0], dict[tuple[str, int], RowBlock]()

    def keep(block: RowBlock) -> None:
        blocks.setdefault((block.stack, block.layer), block)

    points = [(probe.stack.point(name), layer) for name in ("q", "k", "scores")]
    values = model.forward(batch, captures=points, rows=[keep], layers=[(probe.stack.label, layer)], part=Part(0, 1))
    return Run(batch, {probe.stack.label: [layer]}, values, blocks, {})
