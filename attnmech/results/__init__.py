"""What all results have in common."""

from .by_layer import by_layer as by_layer
from .by_layer import shared_layers as shared_layers
from .by_layer import subtracted as subtracted
from .over_texts import OverTexts as OverTexts
from .over_texts import clarity_of as clarity_of
from .provenance import Provenance as Provenance
from .result import PagedResult as PagedResult
from .result import Result as Result
from .result import TextResult as TextResult
