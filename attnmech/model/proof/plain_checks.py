"""Checks that streams and patterns equal those of plain transformers."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ...maths.precision import (
    steps_rounding,
)
from ..attention.local_global import patterns_of
from ..parts.certificate import Check
from .probe import (
    FROM_STREAM,
    Compared,
    Probe,
    by_row,
)

_HANDED: Final = {
    "": {"streams": "hidden_states", "attentions": "attentions"},
    "encoder": {"streams": "encoder_hidden_states", "attentions": "encoder_attentions"},
    "decoder": {"streams": "decoder_hidden_states", "attentions": "decoder_attentions"},
    "cross": {"streams": "", "attentions": "cross_attentions"},
}
"""The names under which transformers returns a stack's streams and patterns."""


_EAGER: Final = "attentions of plain transformers (eager)"


def same_streams(probe: Probe) -> Check:
    """`resid_pre` is transformers' hidden state."""
    trusted = probe.plan.trusted == "sdpa"
    theirs = probe.passes.in_attention("sdpa") if trusted else probe.passes.eager
    statement = "resid_pre = hidden states of plain transformers"
    handed = _handed(probe, "streams", theirs)
    if isinstance(handed, str):
        return Check("streams", statement, (), None, detail=handed)
    by_run = {probe.short: handed}
    if len(probe.passes.runs) > 1:
        longer = _handed(probe, "streams", probe.passes.longer)
        by_run |= {} if isinstance(longer, str) else {probe.passes.runs[-1]: longer}

    def comparisons() -> Iterator[Compared]:
        for run, states in by_run.items():
            for layer in run.layers[probe.stack.label]:
                expected = states[layer].to(probe.wide)
                keep = run.real(probe.stack.label) & comes_through(probe, expected)
                yield probe.compared(
                    run, layer, probe.at(run, "resid_pre", layer), expected, by_row(expected, probe.whole), keep
                )

    return probe.by_layer("streams", statement, FROM_STREAM, comparisons(), probe.whole)


def same_patterns(probe: Probe) -> Check:
    """The pattern is what transformers' eager attention returns."""
    statement = f"pattern = {'weights of nn.MultiheadAttention' if probe.model.is_own else _EAGER}"
    if probe.plan.trusted == "sdpa":
        return Check("attentions", statement, (), None, detail="eager attention computes something else here")
    handed = _handed(probe, "attentions", probe.passes.eager)
    if isinstance(handed, str):
        return Check("attentions", statement, (), None, detail=handed)
    # A hybrid returns only the patterns of its layers with attention.
    if probe.plan.windows:
        rows = getattr(probe.passes.eager, f"{probe.stack.label}_global_attentions".lstrip("_"), None)
        handed = patterns_of(handed, rows, probe.batch, probe.plan.windows)
    whole = len(handed) == len(probe.layers)
    patterns = dict(zip(probe.layers, handed, strict=True)) if whole else handed

    def comparisons() -> Iterator[Compared]:
        for layer in probe.layers:
            ours = probe.at(probe.short, "pattern", layer)
            keep = probe.short.real(probe.stack.label)[:, None].expand(ours.shape[:3])
            theirs = patterns[layer].to(probe.wide)
            if probe.block(probe.short, layer).sink is not None:
                # Some families return the row as it would be without its sink.
                ours, theirs = (rows / rows.sum(dim=-1, keepdim=True) for rows in (ours, theirs))
            # Eager attention rounds queries, keys and scores to the model's precision; in the softmax, that is a
            # factor.
            scores = probe.at(probe.short, "scores", layer).masked_fill(~probe.block(probe.short, layer).visible, 0.0)
            largest = scores.abs().amax(dim=-1, keepdim=True)
            factor = torch.expm1(steps_rounding(probe.model.dtype) * largest)
            yield probe.compared(
                probe.short,
                layer,
                ours,
                theirs,
                probe.whole * theirs.sum(dim=-1, keepdim=True) + factor * torch.maximum(ours, theirs),
                keep,
            )

    return probe.by_layer("attentions", statement, ("pattern",), comparisons(), probe.whole)


def comes_through(probe: Probe, theirs: Tensor) -> Tensor:
    """True where transformers returns numbers: in float64, padding that sees no key is NaN there and in all layers
    above.
    """
    if probe.model.dtype != torch.float64:
        return torch.ones(theirs.shape[:2], dtype=torch.bool, device=theirs.device)
    return theirs.isfinite().all(dim=-1).all(dim=-1, keepdim=True).expand(theirs.shape[:2])


def _handed(probe: Probe, name: str, theirs: Any) -> Any:
    """The values that transformers returns layer by layer, or the reason why it returns none."""
    handed = getattr(theirs, _HANDED[probe.stack.label][name], None)
    if handed and len(handed) >= probe.stack.n_layers and all(value is not None for value in handed):
        return handed
    return str(theirs) if isinstance(theirs, Exception) else "transformers does not return them"
