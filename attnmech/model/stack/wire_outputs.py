"""Connects the outputs of attention and MLP: gate, z, `result`, `attn_raw`, `attn_out`, `mixer_out` and `mlp_out`."""

from collections.abc import Callable
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from ..attention.identities import Kind
from ..parts.gates import Gate, NormGate
from ..parts.modules import first_tensor, submodule, with_first
from ..parts.norms import epsilon_of, weight_of
from .stack import Stack


def wire_output(stack: Stack, layer: int, block: nn.Module) -> None:
    """Connects the outputs of attention, from the gate to `attn_out`, and the additions of other modules."""
    in_force, plan = stack.in_force, stack.architecture

    def at_attn_raw(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if in_force.wants(stack.point("result"), layer):
            output = _through_results(stack, layer, args[0], output)
        if (balance := in_force.under_way.balance) is not None:
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
    """Connects the gate, and z after the gate."""
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
        in_force.hold_z(stack.label, layer, z)
        return (z.reshape(gated.shape), *args[1:])

    if isinstance(plan.gate, NormGate):
        submodule(block, f"{plan.attention}.{plan.gate.path}").register_forward_pre_hook(at_norm_of_z)
    elif isinstance(plan.gate, Gate):
        submodule(block, f"{plan.attention}.{plan.gate.path}").register_forward_hook(at_gate)
    submodule(block, plan.out).register_forward_pre_hook(at_z)


def _wire_added(stack: Stack, layer: int, block: nn.Module) -> None:
    """Connects what the MLP and a mixer add to the stream."""
    in_force, plan, point = stack.in_force, stack.architecture, stack.point("mlp_out")

    def at_written(name: str, kind: Kind, factor: float) -> Callable[..., Any]:
        def at_module(module: nn.Module, args: Any, output: Any) -> Any:
            value = first_tensor(output)
            added = _times(factor, stack.by_token(value))
            visited = in_force.visit(stack.point(name), layer, added)
            in_force.hold(kind, stack.label, layer, visited)
            if visited is added:
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

    def at_last(module: nn.Module, args: Any, output: Any) -> Any:
        value, further = first_tensor(output), in_force.under_way.notes.mlp_part
        assert further is not None
        total = stack.by_token(value) + further
        visited = in_force.visit(point, layer, _times(plan.mlp_scale, total))
        in_force.hold("mlp", stack.label, layer, visited)
        if not in_one():
            return None
        return with_first(output, stack.as_given(_times(1 / plan.mlp_scale, visited), value))

    if plan.mixer:
        at_mixer = at_written("mixer_out", "mixer", plan.mixer_scale)
        submodule(block, plan.mixer).register_forward_hook(at_mixer)
    for path in plan.mlp_further:
        submodule(block, path).register_forward_hook(at_further)
    if plan.mlp_out is not None:
        at_mlp = at_last if plan.mlp_further else at_written("mlp_out", "mlp", plan.mlp_scale)
        submodule(block, plan.mlp_out).register_forward_hook(at_mlp)


def _times(factor: float, value: Tensor) -> Tensor:
    return value if factor == 1 else factor * value
