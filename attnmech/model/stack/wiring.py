"""Makes a stack and connects its activation points to `in_force`."""

from torch import nn

from ..attention.in_force import InForce
from ..parts.modules import submodule
from ..structure.architecture import Architecture
from .skipping import wire_end, wire_part
from .stack import Stack
from .wire_inputs import wire_projections, wire_qk_norm, wire_v_norm
from .wire_outputs import wire_output
from .wire_stream import wire_stream


def wired_stack(base: nn.Module, architecture: Architecture, in_force: InForce) -> Stack:
    """A stack with every point of every block connected to `in_force`.

    In each pass, `in_force` decides whether a value is edited or captured.
    """
    stack = Stack(base, architecture, in_force)
    if not architecture.within:
        for place, block in enumerate(stack.places):
            wire_part(stack, place, block)
    for layer, block in stack.blocks.items():
        wire_stream(stack, layer, block)
        wire_projections(stack, layer, block)
        wire_qk_norm(stack, layer, block)
        wire_v_norm(stack, layer, submodule(block, architecture.attention))
        wire_output(stack, layer, block)
    if not architecture.within:
        wire_end(stack)
    return stack
