"""Checks the inputs of attention: `attn_in`, latents, q, k and v."""

from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from torch import Tensor

from ...maths.precision import step_tolerance, steps_rounding
from ..parts.modules import submodule
from ..parts.weights import Expanded, bias_of, matrix_of, select
from .probe import Compared, Probe, ProbeRun, by_row, norm_of, plain_module


def normed_stream(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """`attn_in` is the input norm of `resid_pre`."""
    norm = probe.plan.attn_norm
    stream = run.values[probe.stack.point("resid_pre"), layer]
    expected = stream if norm is None else probe.plain_module(layer, norm)(stream)
    yield probe.compared(run, layer, probe.at(run, "attn_in", layer), expected, by_row(expected, probe.local))


def crossed_queries(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """Cross-attention's `attn_in` is the middle norm of the decoder's `resid_mid`."""
    decoder = probe.model.output_stack
    norm = decoder.architecture.mid_norm
    assert norm is not None
    middle = run.values[decoder.point("resid_mid"), layer]
    expected = plain_module(probe.model, decoder, layer, norm)(middle)
    yield probe.compared(run, layer, probe.at(run, "attn_in", layer), expected, by_row(expected, probe.local))


def crossed_states(probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """Keys and values of cross-attention come from the encoder's final stream, normed."""
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
    """q, k and v are W times their input, plus b."""
    steps = steps_rounding(probe.model.dtype)
    w, notes = probe.stack.weights(layer), probe.block(run, layer).notes
    inputs = notes.inputs(probe.at(run, "attn_in", layer))
    parts = zip("qkv", inputs, (w.W_Q, w.W_K, w.W_V), (w.b_Q, w.b_K, w.b_V), strict=True)
    for name, source, weight, b in parts:
        W, rounding = weight.to(probe.wide), probe.weighted(source.shape[-1])
        product = einsum(source, W, "batch position d_in, head d_in d_head -> batch position head d_head")
        bias = product.new_zeros(()) if b is None else b.to(probe.wide)
        summed = norm_of(source)[..., None, None] * norm_of(W, 1) + bias.abs()
        allowed = rounding * summed + steps * (product.abs() + bias.abs())
        keep = probe.comparable(run, name, layer, product)
        if name == "v" and probe.plan.v_norm:
            yield _normed_values(probe, run, layer, product + bias, keep)
            continue
        yield probe.compared(run, layer, probe.at(run, name, layer), product + bias, allowed, keep)


def _normed_values(probe: Probe, run: ProbeRun, layer: int, value: Tensor, keep: Tensor) -> Compared:
    """Compares v with the norm, without hooks, of each head's attn_in W_V + b_V."""
    norm = probe.plain_module(layer, f"{probe.plan.attention}.{probe.plan.v_norm}")
    by_head = "batch position head d_head"
    values = rearrange(value.to(probe.model.dtype), f"{by_head} -> {probe.plan.v_norm_axes}")
    made = norm.forward(values).to(probe.wide)
    expected = rearrange(made, f"{probe.plan.v_norm_axes} -> {by_head}", head=probe.stack.n_kv_heads)
    # Even in a float64 model, norms compute in float32.
    limit = max(probe.local, step_tolerance(torch.float32))
    return probe.compared(run, layer, probe.at(run, "v", layer), expected, by_row(expected, limit), keep)


def latent_values(layout: Expanded, probe: Probe, run: ProbeRun, layer: int) -> Iterator[Compared]:
    """Latents are norms of columns of `attn_in` W + b."""
    notes = probe.block(run, layer).notes
    for latent, captured in ((layout.latent, notes.latent), (layout.query_latent, notes.query_latent)):
        if latent is None:
            continue
        assert captured is not None
        path = f"{probe.plan.attention}."
        projection = probe.stack.module(layer, path + latent.projection)
        made, bias = probe.at(run, "attn_in", layer) @ matrix_of(projection).to(probe.wide), bias_of(projection)
        made = select(made if bias is None else made + bias.to(probe.wide), latent.columns)
        # The norm's formula, since calling the module would run a user's hooks.
        norm = probe.plain_module(layer, path + latent.norm)
        expected = norm.forward(made.to(probe.model.dtype)).to(probe.wide)
        # Even in a float64 model, norms of these families compute in float32.
        limit = max(probe.local, step_tolerance(torch.float32))
        yield probe.compared(run, layer, captured.to(probe.wide), expected, by_row(expected, limit))
