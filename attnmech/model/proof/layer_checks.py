"""Lists the statements that must hold in every layer."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch

from ...maths.precision import step_tolerance, sum_rounding
from ..parts.certificate import Check
from ..parts.gates import Gate, HalfOfRow, NormGate
from .input_checks import crossed_queries, crossed_states, latent_values, normed_stream, projected
from .output_checks import gate_limit, gate_values, scaled_output, weighted_values, written_by_heads
from .pattern_checks import hidden_keys, softmax_of_scores, sum_of_terms
from .plain_checks import same_patterns, same_streams
from .position_checks import alibi_terms, rotary_closed_form, rotated
from .probe import Compared, LayerComparisons, Probe, Statement
from .relative_checks import relative_scores, relative_scores_beyond
from .stream_checks import chained_layers, mlp_statement, sum_with_attention, sum_with_mlp

_Checks: TypeAlias = dict[str, Callable[[], Check | Statement]]


def layer_checks(probe: Probe) -> _Checks:
    """The checks of a stack's layers, in order, each with the name under which it fails if it cannot be made."""
    return {
        **_of_inputs(probe),
        **_of_positions(probe),
        **_of_attention(probe),
        **(_of_stream(probe) if probe.plan.streams else {}),
        **(_of_crossing(probe) if probe.stack.label == "cross" else {}),
    }


def _stated(
    probe: Probe,
    name: str,
    statement: str,
    points: tuple[str, ...],
    comparisons: LayerComparisons,
    tolerance: float | None = None,
    further: Callable[[Probe], Iterable[Compared]] | None = None,
) -> _Checks:
    limit = probe.local if tolerance is None else tolerance
    return {name: partial(Statement, name, statement, points, comparisons, limit, further)}


def _of_inputs(probe: Probe) -> _Checks:
    """The statements about the inputs of a layer's attention."""
    plan, checks = probe.plan, _Checks()
    if plan.streams:
        checks["streams"] = partial(same_streams, probe)
    checks["attentions"] = partial(same_patterns, probe)
    if plan.streams:
        statement = "attn_in = the input norm of resid_pre, or resid_pre without one"
        checks |= _stated(probe, "attn_in", statement, ("resid_pre", "attn_in"), normed_stream)
    statement = "q, k, v = attn_in W + b" if plan.expanded is None else "q, k, v = (latent or attn_in) W + b"
    limit = probe.product(probe.model.d_model)
    checks |= _stated(probe, "projections", statement, ("attn_in", "q", "k", "v"), projected, limit)
    if plan.expanded is not None:
        statement = "latent = norm of columns of attn_in W + b; likewise the queries' latent"
        points, limit = ("attn_in", "latent", "q", "k", "v"), max(probe.local, step_tolerance(torch.float32))
        checks |= _stated(probe, "latent", statement, points, partial(latent_values, plan.expanded), limit)
    return checks


def _of_positions(probe: Probe) -> _Checks:
    """The statements about the effect of positions on scores."""
    plan, checks = probe.plan, _Checks()
    if plan.rotary is not None:
        checks |= {"rotation": partial(rotated, probe), "rotary_tables": partial(rotary_closed_form, probe)}
    if plan.alibi is not None:
        checks["alibi"] = partial(alibi_terms, probe)
    if plan.relative:
        statement = (
            "scores = (q·k + q·K + k·Q) / √(d_head · n), K and Q from the weights, row by distance"
            if plan.relative == "DeBERTa"
            else "scores = ((q + u)·k + (q + v)·r) / √d_head, r the projected sinusoids of the distance"
        )
        points, limit = ("q", "k", "scores"), probe.product(probe.model.d_model)
        checks |= _stated(
            probe, "relative positions", statement, points, relative_scores, limit, relative_scores_beyond
        )
    return checks


def _of_attention(probe: Probe) -> _Checks:
    """The statements about scores, pattern and their outputs."""
    plan, model, stack = probe.plan, probe.model, probe.stack
    statement, limit = "scores = Σ terms of the score ledger", probe.product(model.d_model)
    checks = _stated(probe, "ledger", statement, ("q", "k", "scores"), sum_of_terms, limit)
    statement, points = "pattern = softmax(scores); rows sum to 1 minus a sink's mass", ("scores", "pattern")
    checks |= _stated(probe, "softmax", statement, points, softmax_of_scores)
    statement, limit = "pattern = 0 where a key is hidden", sum_rounding(model.dtype)
    checks |= _stated(probe, "mask", statement, points, hidden_keys, limit)
    if plan.gate is not None:
        statement = _statement_of(plan.gate)
        checks |= _stated(probe, "gate", statement, ("gate", "z"), gate_values, gate_limit(probe))
    statement = "z = pattern v" if plan.gate is None else "z = gate ⊙ pattern v"
    limit = probe.product(len(probe.batch.ids[0]))
    checks |= _stated(probe, "z", statement, ("pattern", "v", "z"), weighted_values, limit)
    statement = "W_O reads z, and returns z W_O for each head alone; Σ_h z W_O + b_O = attn_raw"
    limit = probe.product(stack.n_heads * stack.d_value)
    return checks | _stated(probe, "heads", statement, ("z", "result", "attn_raw"), written_by_heads, limit)


def _of_stream(probe: Probe) -> _Checks:
    """The statements about the input and output of a block."""
    plan, adding = probe.plan, sum_rounding(probe.model.dtype)
    checks: _Checks = {"attn_out": partial(scaled_output, probe), "stream": partial(sum_with_attention, probe)}
    limit = adding if plan.norm == "pre" else None
    checks |= _stated(probe, "mlp", *mlp_statement(probe), sum_with_mlp, limit)
    if plan.chained and not plan.within:
        statement, points = "resid_post of a layer = resid_pre of the next", ("resid_pre", "resid_post")
        checks |= _stated(probe, "chain", statement, points, chained_layers, adding)
    return checks


def _of_crossing(probe: Probe) -> _Checks:
    """The statements about the inputs of cross-attention and the stream to which it writes."""
    plan, model, checks = probe.plan, probe.model, _Checks()
    decoder = model.output_stack.architecture
    if not model.is_own and decoder.streams and decoder.mid_norm is not None:
        statement = "attn_in = the middle norm of decoder.resid_mid"
        checks |= _stated(probe, "queries", statement, ("attn_in",), crossed_queries)
    if not model.is_own:
        statement = "keys and values are made from the encoder's final stream, normed"
        checks |= _stated(probe, "states", statement, ("k", "v"), crossed_states)
    if not plan.streams and plan.attn_out:
        checks["attn_out"] = partial(scaled_output, probe)
    return checks


def _statement_of(gate: Gate | NormGate | HalfOfRow) -> str:
    if isinstance(gate, NormGate):
        return "gate = γ / √(mean (pattern v)² + ε), over all heads"
    if isinstance(gate, HalfOfRow):
        return "gate = 1 in the half that a row uses, by the tokens that are global"
    return f"gate = {gate.function}(attn_in W + b)"
