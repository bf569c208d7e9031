"""What results share."""

from .provenance import Provenance as Provenance
from .result import PagedResult as PagedResult
from .result import Result as Result
from .result import TextResult as TextResult
from .result import by_layer as by_layer
from .result import subtracted as subtracted
