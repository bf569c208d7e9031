"""The classes that the methods of a reducer, or a metric of your own, receive (`am.Reducer`, `am.stream`).

`TextMeans` gives the means over texts with their intervals.
"""

from .basics.lazy_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
