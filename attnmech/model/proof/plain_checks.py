"""Checks that streams and patterns equal those of plain transformers."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ...maths.precision import score_rounding
from ..attention.local_global import patterns_of
from ..parts.certificate import Check
from .probe import FROM_STREAM, Compared, Probe, ProbeRun, Statement, by_row

_HANDED: Final = {  # the names under which transformers returns a stack's streams and patterns
    "": {"streams": "hidden_states", "attentions": "attentions"},
    "encoder": {"streams": "encoder_hidden_states", "attentions": "encoder_attentions"},
    "decoder": {"streams": "decoder_hidden_states", "attentions": "decoder_attentions"},
    "cross": {"streams": "", "attentions": "cross_attentions"},
}


_EAGER: Final = "attentions of plain transformers (eager)"


def same_streams(probe: Probe) -> Check | Statement:
    statement = "resid_pre = hidden states of plain transformers"
    handed = _handed(probe, "streams", probe.passes.states)
    if isinstance(handed, str):
        return Check.untried("streams", statement, handed)

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        states = handed if run is probe.short else _handed(probe, "streams", probe.passes.longer)
        if not isinstance(states, str):
            expected = states[probe.stack.running.index(layer)].to(probe.wide)
            keep = run.real(probe.stack.label) & comes_through(probe, expected)
            allowed = by_row(expected, probe.whole)
            yield probe.conditioned(run, layer, "resid_pre", probe.at(run, "resid_pre", layer), expected, allowed, keep)

    return Statement("streams", statement, FROM_STREAM, comparisons, probe.whole)


def same_patterns(probe: Probe) -> Check | Statement:
    statement = f"pattern = {'weights of nn.MultiheadAttention' if probe.model.is_own else _EAGER}"
    if probe.plan.trusted == "sdpa":
        return Check.untried("attentions", statement, "eager attention computes something else here")
    handed = _handed(probe, "attentions", probe.passes.eager)
    if isinstance(handed, str):
        return Check.untried("attentions", statement, handed)
    # A hybrid returns only the patterns of its layers with attention.
    if probe.plan.windows:
        rows = getattr(probe.passes.eager, f"{probe.stack.label}_global_attentions".lstrip("_"), None)
        handed = patterns_of(handed, rows, probe.batch, probe.plan.windows)
    whole = len(handed) == len(probe.layers)
    patterns = dict(zip(probe.layers, handed, strict=True)) if whole else handed
    real = probe.short.real(probe.stack.label)
    if probe.model.dtype == torch.float16 and not all(
        bool(patterns[layer].transpose(1, 2)[real].isfinite().all()) for layer in probe.layers
    ):
        detail = (
            "transformers returns NaN there, since its scores or streams exceed 65,504, the largest number of float16; "
            "load the model with dtype=torch.bfloat16 or dtype=torch.float32"
        )
        return Check("attentions", statement, ("pattern",), False, detail=detail)

    def comparisons(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
        if run is not probe.short:
            return
        ours = probe.at(run, "pattern", layer)
        keep = run.real(probe.stack.label)[:, None].expand(ours.shape[:3])
        theirs = patterns[layer].to(probe.wide)
        if probe.block(run, layer).sink is not None:
            # Some families return the row as it would be without its sink.
            ours, theirs = (rows / rows.sum(dim=-1, keepdim=True) for rows in (ours, theirs))
        # In the softmax, the rounding of a score is a factor.
        scores = probe.at(run, "scores", layer).masked_fill(~probe.block(run, layer).visible, 0.0)
        factor = torch.expm1(score_rounding(probe.model.dtype) * scores.abs().amax(dim=-1, keepdim=True))
        allowed = probe.whole * theirs.sum(dim=-1, keepdim=True) + factor * torch.maximum(ours, theirs)
        yield probe.conditioned(run, layer, "pattern", ours, theirs, allowed, keep)

    return Statement("attentions", statement, ("pattern",), comparisons, probe.whole)


def comes_through(probe: Probe, theirs: Tensor) -> Tensor:
    """True where transformers returns numbers: in float64, padding that sees no key is NaN from there on."""
    if probe.model.dtype != torch.float64:
        return torch.ones(theirs.shape[:2], dtype=torch.bool, device=theirs.device)
    return theirs.isfinite().all(dim=-1).all(dim=-1, keepdim=True).expand(theirs.shape[:2])


def _handed(probe: Probe, name: str, theirs: Any) -> Any:
    """The values that transformers returns layer by layer, or the reason why it returns none."""
    handed = getattr(theirs, _HANDED[probe.stack.label][name], None)
    if handed and len(handed) >= probe.stack.n_layers and all(value is not None for value in handed):
        return handed
    return str(theirs) if isinstance(theirs, Exception) else "transformers does not return them"
