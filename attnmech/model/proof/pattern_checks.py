"""Checks that scores are the sum of their terms, and that the pattern is the softmax of the scores."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from ...maths.float64 import as_float64
from ...maths.precision import sum_rounding
from ..stack.ledger import ScoreAudit
from .probe import Compared, Probe, ProbeRun, by_row

_ROWS: Final = 256
"""The rows of a pattern that are compared at a time."""


def sum_of_terms(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """Scores are the sum of the ledger's terms."""
    block = probe.block(run, layer)
    audit = ScoreAudit(probe.model.stacks, block, run.values[probe.stack.point("attn_in"), layer], block.visible)
    audit.add(block)
    worst = int(audit.excess.nan_to_num(torch.inf).argmax())
    yield Compared(f"layer {layer}, head {worst}", float(audit.excess[worst]))


def softmax_of_scores(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """The pattern is the softmax of the scores, and rows sum to 1 minus a sink's mass."""
    sink = probe.block(run, layer).sink
    whole_scores, whole_pattern = (probe.at(run, name, layer) for name in ("scores", "pattern"))
    for first in range(0, whole_pattern.shape[2], _ROWS):
        scores, pattern = (as_float64(x[:, :, first : first + _ROWS]) for x in (whole_scores, whole_pattern))
        highest = scores.amax(dim=-1, keepdim=True)
        expected = (scores - highest).exp_()
        total = expected.sum(dim=-1, keepdim=True)
        if sink is not None:
            total = total + (as_float64(sink)[:, None, None] - highest).exp()
        expected /= total
        everywhere = torch.ones_like(pattern[..., 0], dtype=torch.bool)
        yield probe.compared(run, layer, pattern, expected, by_row(expected, probe.local), everywhere)
        mass, summed = (x.sum(dim=-1, keepdim=True) for x in (expected, pattern))
        yield probe.compared(run, layer, summed, mass, by_row(mass, probe.local), everywhere)


def hidden_keys(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """The pattern is 0 where a key is hidden."""
    pattern, seen = probe.at(run, "pattern", layer), probe.block(run, layer).visible
    # Padding may see itself (XLNet).
    padding = ~run.real_keys(probe.stack.label)[:, None, None, :] & run.real(probe.stack.label)[:, None, :, None]
    hidden = ~seen | padding
    if probe.plan.causal and not probe.plan.within:
        tokens = pattern.shape[-2]
        later = torch.ones((tokens, tokens), dtype=torch.bool, device=pattern.device).triu(1)
        hidden = hidden | nn.functional.pad(later, (0, pattern.shape[-1] - tokens))
    # A row that sees no key is uniform, as in transformers; it is left out.
    leaked = pattern.masked_fill(~hidden | ~seen.any(dim=-1, keepdim=True), 0.0)
    everywhere = torch.ones_like(leaked[..., 0], dtype=torch.bool)
    # Relative to 1, the sum of a row.
    allowed = torch.full_like(leaked, sum_rounding(probe.model.dtype))
    yield probe.compared(run, layer, leaked, torch.zeros_like(leaked), allowed, everywhere)
