"""Lists the statements that must hold in every layer."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, TypeAlias

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from ...maths.float64 import as_float64
from ...maths.precision import steps_rounding, sum_rounding
from ...points import PointKey, full_name
from ..parts.certificate import Check
from ..parts.gates import Gate, HalfOfRow, NormGate
from ..parts.modules import submodule
from ..parts.weights import Expanded, select
from ..stack.block import PostNormEnd
from ..stack.ledger import ScoreAudit
from ..stack.stack import Stack
from .output_checks import gate_limit, gate_values, scaled_output, weighted_values, written_by_heads
from .plain_checks import same_patterns, same_streams
from .position_checks import alibi_terms, relative_scores, relative_scores_beyond, rotary_closed_form, rotated
from .probe import Compared, Probe, ProbeRun, Statement, by_row, norm_of, plain_module


def sum_with_attention(probe: Probe) -> Check | Statement:
    mixes = bool(probe.plan.mixer)
    statement = f"resid_pre + attn_out{' + mixer_out' if mixes else ''} = resid_mid"
    if probe.plan.mid_norm is None:
        return Check.untried("stream", statement, probe.model.points[probe.stack.point("resid_mid")].absent or "")
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
            ended = post_norm(probe.plain_module(layer, plan.interposed_norm)(mid_norm(middle) + crossed[0]) + added)
        else:
            ended = PostNormEnd(mid_norm, post_norm)(middle, added)
    return ended, by_row(ended, probe.local)


def chained_layers(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    before = probe.stack.before(layer)
    if before in run.layers[probe.stack.label]:
        left = probe.at(run, "resid_post", before)
        allowed = sum_rounding(probe.model.dtype) * left.abs()
        yield probe.compared(run, before, probe.at(run, "resid_pre", layer), left, allowed)


_ROWS: Final = 256  # the rows of a pattern that are compared at a time


def sum_of_terms(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    block = probe.block(run, layer)
    audit = ScoreAudit(probe.model.stacks, block, run.values[probe.stack.point("attn_in"), layer], block.visible)
    audit.add(block)
    worst = int(audit.excess.nan_to_num(torch.inf).argmax())
    yield Compared(f"layer {layer}, head {worst}", float(audit.excess[worst]))


def softmax_of_scores(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
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
    pattern, seen = probe.at(run, "pattern", layer), probe.block(run, layer).visible
    # Padding may see itself (XLNet).
    padding = ~run.real_keys(probe.stack.label)[:, None, None, :] & run.real(probe.stack.label)[:, None, :, None]
    hidden = ~seen | padding
    if probe.plan.causal and not probe.plan.within:
        tokens = pattern.shape[-2]
        later = torch.ones((tokens, tokens), dtype=torch.bool, device=pattern.device).triu(1)
        if run.batch.senses:  # the tokens of a picture may all see each other
            held = run.batch.is_sensed
            later = later & ~(held[:, None, :, None] & held[:, None, None, :])
        hidden = hidden | nn.functional.pad(later, (0, pattern.shape[-1] - tokens))
    # A row that sees no key is uniform, as in transformers; it is left out.
    leaked = pattern.masked_fill(~hidden | ~seen.any(dim=-1, keepdim=True), 0.0)
    everywhere = torch.ones_like(leaked[..., 0], dtype=torch.bool)
    # Relative to 1, the sum of a row.
    allowed = torch.full_like(leaked, sum_rounding(probe.model.dtype))
    yield probe.compared(run, layer, leaked, torch.zeros_like(leaked), allowed, everywhere)


def normed_stream(
    stack: Stack, point: str, norm: str | None, probe: Probe, run: ProbeRun, layer: int
) -> Iterator[Compared]:
    """`attn_in` is a norm of the stream at a point of a stack, or that stream."""
    stream = run.values[stack.point(point), layer]
    expected = stream if norm is None else plain_module(probe.model, stack, layer, norm)(stream)
    yield probe.compared(run, layer, probe.at(run, "attn_in", layer), expected, by_row(expected, probe.local))


def crossed_states(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    encoder = probe.model.stacks["encoder"]
    norm = encoder.architecture.final_norm
    if "encoder" not in run.layers:  # a run of recordings that were encoded before
        return
    last = run.values[encoder.point("resid_post"), encoder.layers[-1]]
    if norm is not None:
        last = submodule(probe.model.plain.base_model, norm)(last)
    states = probe.block(run, layer).notes.key_input
    assert states is not None
    keep = run.real_keys(probe.stack.label)
    yield probe.compared(run, layer, states.to(probe.wide), last, by_row(last, probe.local), keep)


def projected(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    steps = steps_rounding(probe.model.dtype)
    w, notes = probe.stack.weights(layer), probe.block(run, layer).notes
    inputs = notes.inputs(probe.at(run, "attn_in", layer))
    for name, source, weight, b in zip("qkv", inputs, (w.W_Q, w.W_K, w.W_V), (w.b_Q, w.b_K, w.b_V), strict=True):
        W, rounding = weight.to(probe.wide), probe.weighted(source.shape[-1])
        product = einsum(source, W, "batch position d_in, head d_in d_head -> batch position head d_head")
        bias = product.new_zeros(()) if b is None else b.to(probe.wide)
        summed = norm_of(source)[..., None, None] * norm_of(W, 1) + bias.abs()
        allowed = rounding * summed + steps * (product.abs() + bias.abs())
        keep, expected = probe.comparable(run, name, layer, product), product + bias
        if name == "v" and probe.plan.v_norm:
            # The norm, without hooks, of each head's attn_in W_V + b_V.
            norm = probe.plain_module(layer, f"{probe.plan.attention}.{probe.plan.v_norm}")
            axes, by_head = probe.plan.v_norm_axes, "batch position head d_head"
            made = norm.forward(rearrange(expected.to(probe.model.dtype), f"{by_head} -> {axes}")).to(probe.wide)
            expected = rearrange(made, f"{axes} -> {by_head}", head=probe.stack.n_kv_heads)
            allowed = by_row(expected, probe.of_norms)
        yield probe.compared(run, layer, probe.at(run, name, layer), expected, allowed, keep)


def latent_values(layout: Expanded, probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    notes = probe.block(run, layer).notes
    for latent, captured in ((layout.latent, notes.latent), (layout.query_latent, notes.query_latent)):
        if latent is None:
            continue
        assert captured is not None
        made = select(probe.projected(run, layer, latent.projection), latent.columns)
        # The norm's formula, since calling the module would run a user's hooks.
        norm = probe.plain_module(layer, f"{probe.plan.attention}.{latent.norm}")
        expected = norm.forward(made.to(probe.model.dtype)).to(probe.wide)
        yield probe.compared(run, layer, captured.to(probe.wide), expected, by_row(expected, probe.of_norms))


_Checks: TypeAlias = Iterator[Statement | tuple[str, Callable[[], Check | Statement]]]
"""Statements, and functions that make one, each with the name under which it fails if it cannot be made."""


def layer_checks(probe: Probe) -> _Checks:
    yield from _of_inputs(probe)
    yield from _of_positions(probe)
    yield from _of_attention(probe)
    if probe.plan.streams:
        yield from _of_stream(probe)
    if probe.stack.label == "cross":
        yield from _of_crossing(probe)


def _of_inputs(probe: Probe) -> _Checks:
    plan = probe.plan
    if plan.streams:
        yield "streams", partial(same_streams, probe)
    yield "attentions", partial(same_patterns, probe)
    if plan.streams:
        statement = "attn_in = the input norm of resid_pre, or resid_pre without one"
        compare = partial(normed_stream, probe.stack, "resid_pre", plan.attn_norm)
        yield Statement("attn_in", statement, ("resid_pre", "attn_in"), compare)
    statement = "q, k, v = attn_in W + b" if plan.expanded is None else "q, k, v = (latent or attn_in) W + b"
    yield Statement("projections", statement, ("attn_in", "q", "k", "v"), projected, probe.product(probe.model.d_model))
    if plan.expanded is not None:
        statement = "latent = norm of columns of attn_in W + b; likewise the queries' latent"
        points, latents = ("attn_in", "latent", "q", "k", "v"), partial(latent_values, plan.expanded)
        yield Statement("latent", statement, points, latents, probe.of_norms)


def _of_positions(probe: Probe) -> _Checks:
    plan = probe.plan
    if plan.rotary is not None:
        yield "rotation", partial(rotated, probe)
        yield "rotary_tables", partial(rotary_closed_form, probe)
    if plan.alibi is not None:
        yield "alibi", partial(alibi_terms, probe)
    if plan.relative:
        statement = (
            "scores = (q·k + q·K + k·Q) / √(d_head · n), K and Q from the weights, row by distance"
            if plan.relative == "DeBERTa"
            else "scores = ((q + u)·k + (q + v)·r) / √d_head, r the projected sinusoids of the distance"
        )
        points, limit = ("q", "k", "scores"), probe.product(probe.model.d_model)
        yield Statement("relative positions", statement, points, relative_scores, limit, relative_scores_beyond)


def _of_attention(probe: Probe) -> _Checks:
    plan, model, stack = probe.plan, probe.model, probe.stack
    statement, limit = "scores = Σ terms of the score ledger", probe.product(model.d_model)
    yield Statement("ledger", statement, ("q", "k", "scores"), sum_of_terms, limit)
    statement, points = "pattern = softmax(scores); rows sum to 1 minus a sink's mass", ("scores", "pattern")
    yield Statement("softmax", statement, points, softmax_of_scores)
    yield Statement("mask", "pattern = 0 where a key is hidden", points, hidden_keys, sum_rounding(model.dtype))
    if plan.gate is not None:
        yield Statement("gate", _statement_of(plan.gate), ("gate", "z"), gate_values, gate_limit(probe))
    statement = "z = pattern v" if plan.gate is None else "z = gate ⊙ pattern v"
    yield Statement("z", statement, ("pattern", "v", "z"), weighted_values, probe.product(len(probe.batch.ids[0])))
    statement = "W_O reads z, and returns z W_O for each head alone; Σ_h z W_O + b_O = attn_raw"
    limit = probe.product(stack.n_heads * stack.d_value)
    yield Statement("heads", statement, ("z", "result", "attn_raw"), written_by_heads, limit)


def _of_stream(probe: Probe) -> _Checks:
    plan, adding = probe.plan, sum_rounding(probe.model.dtype)
    yield "attn_out", partial(scaled_output, probe)
    yield "stream", partial(sum_with_attention, probe)
    yield Statement("mlp", *mlp_statement(probe), sum_with_mlp, adding if plan.norm == "pre" else None)
    if plan.chained and not plan.within:
        statement, points = "resid_post of a layer = resid_pre of the next", ("resid_pre", "resid_post")
        yield Statement("chain", statement, points, chained_layers, adding)


def _of_crossing(probe: Probe) -> _Checks:
    plan, model, decoder = probe.plan, probe.model, probe.model.output_stack.architecture
    if not model.is_own and decoder.streams and decoder.mid_norm is not None:
        statement = "attn_in = the middle norm of decoder.resid_mid"
        compare = partial(normed_stream, model.output_stack, "resid_mid", decoder.mid_norm)
        yield Statement("queries", statement, ("attn_in",), compare)
    if not model.is_own:
        statement = "keys and values are made from the encoder's final stream, normed"
        yield Statement("states", statement, ("k", "v"), crossed_states)
    if not plan.streams and plan.attn_out:
        yield "attn_out", partial(scaled_output, probe)


def _statement_of(gate: Gate | NormGate | HalfOfRow) -> str:
    if isinstance(gate, NormGate):
        return "gate = γ / √(mean (pattern v)² + ε), over all heads"
    if isinstance(gate, HalfOfRow):
        return "gate = 1 in the half that a row uses, by the tokens that are global"
    return f"gate = {gate.function}(attn_in W + b)"
