"""How many layers a model counts."""

from torch import nn

from ..model.architectures import submodule
from ..model.hooked import HookedModel
from ..model.stack import Stack


def count_layers(model: HookedModel, stack: Stack) -> int:
    """The layers of a stack as the model numbers them: of a hybrid, those without attention too."""
    blocks = submodule(model.base, stack.architecture.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return len(blocks)
