"""Describes attention in a model of your own: where its projections are and how their axes are laid out."""

from .basics.lazy_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
