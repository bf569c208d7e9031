"""The classes of results; `am.load_result` reads their files."""

from ..basics.lazy_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
