"""Counts the layers of a model."""

from torch import nn

from ..model.parts.modules import submodule
from ..model.run.hooked import HookedModel
from ..model.stack.stack import Stack


def count_layers(model: HookedModel, stack: Stack) -> int:
    """The number of layers of a stack, as the model numbers them: in a hybrid, including those without attention."""
    blocks = submodule(model.base, stack.architecture.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return len(blocks)
