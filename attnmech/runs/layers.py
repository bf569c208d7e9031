"""How many layers does a model count?"""

from torch import nn

from ..model.architectures import submodule
from ..model.hooked import HookedModel
from ..model.stack import Stack


def count_layers(model: HookedModel, stack: Stack) -> int:
    """The number of layers of a stack, as the model numbers them: in a hybrid, including those without attention."""
    blocks = submodule(model.base, stack.architecture.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return len(blocks)
