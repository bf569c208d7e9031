"""Connects the outputs of attention and MLP: gate, z, `result`, `attn_raw`, `attn_out`, `mixer_out` and `mlp_out`.

Also connects the points of the stream that runs through a block: `resid_pre`, `resid_mid` and `resid_post`.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from ..attention.identities import Kind
from ..attention.observed import Notes
from ..parts.gates import Gate, NormGate
from ..parts.modules import first_tensor, submodule, with_first, with_stream
from ..parts.norms import epsilon_of, weight_of
from .stack import Stack


def wire_stream(stack: Stack, layer: int, block: nn.Module) -> None:
    """Connects the stream where it enters a block, between attention and MLP, and where it leaves."""
    in_force = stack.in_force

    def at_resid_pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_force.passes_by(layer):
            return None
        in_force.under_way.notes = Notes()
        if not streams:
            return None
        return with_stream(args, kwargs, lambda x: _visit(stack, "resid_pre", layer, x, "pre_in", "pre"))

    def at_resid_post(module: nn.Module, args: Any, output: Any) -> Any:
        if in_force.passes_by(layer):
            return None
        value = first_tensor(output)
        visited = _visit(stack, "resid_post", layer, value, "post_in", "post") if streams else value
        in_force.end_layer(stack.label, layer)
        return None if visited is value else with_first(output, visited)

    def at_resid_mid(module: nn.Module, args: Any) -> None:
        value = args[0]
        by_token = stack.by_token(value)
        visited = by_token
        if in_force.wants(stack.point("resid_mid"), layer):
            visited = in_force.visit(stack.point("resid_mid"), layer, by_token)
        if visited is not by_token:
            in_force.hold("mid_in", stack.label, layer, by_token.detach().clone())
            in_force.hold("mid", stack.label, layer, visited)
            # The block continues with the same tensor as its stream, so replacing only the norm's input is not enough.
            value.copy_(stack.as_given(visited, value))
        elif post_norm is not None:
            in_force.hold("mid_in", stack.label, layer, by_token)

    def at_mid_normed(module: nn.Module, args: Any, output: Tensor) -> None:
        by_token = stack.by_token(output)
        in_force.hold("mid_normed", stack.label, layer, by_token)
        if stack.architecture.interposed:
            in_force.note(before_mlp=by_token)

    def at_end(module: nn.Module, args: Any) -> None:
        in_force.hold("end_in", stack.label, layer, stack.by_token(args[0]))

    streams = stack.architecture.streams
    mid_norm, post_norm = stack.architecture.mid_norm, stack.architecture.post_norm
    block.register_forward_pre_hook(at_resid_pre, with_kwargs=True)
    block.register_forward_hook(at_resid_post)
    if mid_norm is not None:
        submodule(block, mid_norm).register_forward_pre_hook(at_resid_mid)
    if mid_norm is not None and post_norm is not None:
        submodule(block, stack.architecture.interposed_norm or mid_norm).register_forward_hook(at_mid_normed)
        submodule(block, post_norm).register_forward_pre_hook(at_end)


def _visit(stack: Stack, name: str, layer: int, value: Tensor, before: Kind | None, after: Kind) -> Tensor:
    """Passes a value through a point of the stream, and shows it, before and after, to the running certificate."""
    by_token = value if stack.architecture.batch_first and value.ndim == 3 else stack.by_token(value)
    visited = stack.in_force.visit(stack.point(name), layer, by_token)
    if before is not None and visited is not by_token:
        stack.in_force.hold(before, stack.label, layer, by_token)
    stack.in_force.hold(after, stack.label, layer, visited)
    return value if visited is by_token else stack.as_given(visited, value)


def wire_output(stack: Stack, layer: int, block: nn.Module) -> None:
    """Connects the outputs of attention, from the gate to `attn_out`, and the additions of other modules."""
    in_force, plan = stack.in_force, stack.architecture

    def at_attn_raw(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if in_force.wants(stack.point("result"), layer):
            output = _through_results(stack, layer, args[0], output)
        if (balance := in_force.balance) is not None:
            if in_force.edits(stack.point("result"), layer):
                balance.skip("heads", stack.label, layer, "an edit of `result` comes between them")
            else:
                balance.hold_written(stack.label, layer, module, output)
        return in_force.visit(stack.point("attn_raw"), layer, output)

    def at_attn_out(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        added = _times(plan.attn_scale, output)
        visited = in_force.visit(stack.point("attn_out"), layer, added)
        if separate or in_force.wants(stack.point("attn_raw"), layer) or visited is not output:
            in_force.hold("out", stack.label, layer, visited)
        return output if visited is added else _times(1 / plan.attn_scale, visited)

    separate = plan.attn_out not in ("", plan.out)
    submodule(block, plan.out).register_forward_hook(at_attn_raw)
    submodule(block, plan.attn_out or plan.out).register_forward_hook(at_attn_out)
    _wire_gate(stack, layer, block)
    _wire_added(stack, layer, block)


def _through_results(stack: Stack, layer: int, merged: Tensor, output: Tensor) -> Tensor:
    """Connects `result`; if it was edited or will be differentiated, attn_raw is computed from it."""
    weights = stack.weights(layer)
    z = rearrange(merged, "batch position (head d_head) -> batch position head d_head", head=stack.architecture.n_heads)
    result = einsum(
        z, weights.W_O.to(z), "batch position head d_head, head d_head d_model -> batch position head d_model"
    )
    visited = stack.in_force.visit(stack.point("result"), layer, result, owned=True)
    if not (stack.in_force.under_way.gradients or stack.in_force.edits(stack.point("result"), layer)):
        return output
    total = visited.sum(dim=2)
    return total if weights.b_O is None else total + weights.b_O


def _wire_gate(stack: Stack, layer: int, block: nn.Module) -> None:
    in_force, plan = stack.in_force, stack.architecture
    if plan.gate is None:
        return

    def at_gate(module: nn.Module, args: Any, output: Tensor) -> None:
        assert isinstance(plan.gate, Gate)
        if in_force.wants(stack.point("gate"), layer) or in_force.under_way.gradients:
            in_force.note(gate=plan.gate.of(stack.by_token(output), plan.n_heads))

    def at_norm_of_z(module: nn.Module, args: Any) -> None:
        ungated = in_force.under_way.notes.ungated
        assert isinstance(plan.gate, NormGate) and ungated is not None
        if in_force.wants(stack.point("gate"), layer) or in_force.under_way.gradients:
            in_force.note(gate=plan.gate.of(weight_of(module, args[0]), epsilon_of(module), ungated))

    def at_z(module: nn.Module, args: Any) -> Any:
        gated, notes, gate = args[0], in_force.under_way.notes, stack.point("gate")
        assert notes.ungated is not None
        z = gated.reshape(notes.ungated.shape)
        if in_force.wants(gate, layer):
            assert notes.gate is not None
            visited = in_force.visit(gate, layer, notes.gate)
            if in_force.under_way.gradients or in_force.edits(gate, layer):
                z = (visited * notes.ungated).to(z.dtype)
        z = in_force.visit(stack.point("z"), layer, z)
        if (balance := in_force.balance) is not None:
            balance.hold_z(stack.label, layer, z)
        return (z.reshape(gated.shape), *args[1:])

    if isinstance(plan.gate, NormGate):
        submodule(block, f"{plan.attention}.{plan.gate.path}").register_forward_pre_hook(at_norm_of_z)
    elif isinstance(plan.gate, Gate):
        submodule(block, f"{plan.attention}.{plan.gate.path}").register_forward_hook(at_gate)
    submodule(block, plan.out).register_forward_pre_hook(at_z)


def _wire_added(stack: Stack, layer: int, block: nn.Module) -> None:
    in_force, plan, point = stack.in_force, stack.architecture, stack.point("mlp_out")

    def at_written(name: str, kind: Kind, factor: float) -> Callable[..., Any]:
        def at_module(module: nn.Module, args: Any, output: Any) -> Any:
            value, further = first_tensor(output), in_force.under_way.notes.mlp_part if kind == "mlp" else None
            total = stack.by_token(value) if further is None else stack.by_token(value) + further
            added = _times(factor, total)
            visited = in_force.visit(stack.point(name), layer, added)
            in_force.hold(kind, stack.label, layer, visited)
            if visited is added and (further is None or not in_one()):
                return None
            return with_first(output, stack.as_given(_times(1 / factor, visited), value))

        return at_module

    def in_one() -> bool:
        """Whether the last of several modules returns the sum of all additions, and the others return nothing."""
        return in_force.under_way.gradients or in_force.edits(point, layer)

    def at_further(module: nn.Module, args: Any, output: Any) -> Any:
        value = first_tensor(output)
        before, by_token = in_force.under_way.notes.mlp_part, stack.by_token(value)
        in_force.note(mlp_part=by_token if before is None else before + by_token)
        return with_first(output, torch.zeros_like(value)) if in_one() else None

    if plan.mixer:
        submodule(block, plan.mixer).register_forward_hook(at_written("mixer_out", "mixer", plan.mixer_scale))
    for path in plan.mlp_further:
        submodule(block, path).register_forward_hook(at_further)
    if plan.mlp_out is not None:
        submodule(block, plan.mlp_out).register_forward_hook(at_written("mlp_out", "mlp", plan.mlp_scale))


def _times(factor: float, value: Tensor) -> Tensor:
    return value if factor == 1 else factor * value
