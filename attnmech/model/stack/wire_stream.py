"""Connects the points of the stream that runs through a block: `resid_pre`, `resid_mid` and `resid_post`."""

from typing import Any

from torch import Tensor, nn

from ..attention.identities import Kind
from ..attention.observed import Notes
from ..parts.modules import first_tensor, submodule, with_first, with_stream
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
