"""attnmech: where each attention head looks, why it looks there, what it writes, and whether that matters.

>>> import attnmech as am
>>> model = am.load()                                              # doctest: +SKIP
>>> am.decompose_scores(model, "The keys to the cabinet are here.")  # doctest: +SKIP

The public names stand in `__init__.pyi`, one line each; each is imported when first used, so that
`attnmech --help` need not wait for torch.
"""

from importlib.metadata import version
from typing import Any

import lazy_loader  # type: ignore[import-untyped]

__version__ = version("attnmech")

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    from .basics.lens_names import OF_PACKAGE, is_from_import, missing_name
    from .basics.signatures import readable

    if name in OF_PACKAGE:
        error = ImportError if is_from_import() else AttributeError
        raise error(missing_name("attnmech", name, OF_PACKAGE), name=name)
    return readable(_load(name))
