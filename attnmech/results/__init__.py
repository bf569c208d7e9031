"""What results share."""

from .by_layer import by_layer as by_layer
from .by_layer import subtracted as subtracted
from .provenance import Provenance as Provenance
from .result import PagedResult as PagedResult
from .result import Result as Result
from .result import TextResult as TextResult
