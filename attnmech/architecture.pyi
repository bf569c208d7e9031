from .model.parts.weights import Columns as Columns
from .model.parts.weights import Fused as Fused
from .model.parts.weights import Separate as Separate
from .model.structure.architecture import Architecture as Architecture
