"""attnmech: where each head attends, why, what it writes, and whether that matters.

>>> import attnmech as am
>>> model = am.load()                                              # doctest: +SKIP
>>> am.decompose_scores(model, "The keys to the cabinet are here.")  # doctest: +SKIP

This module has the functions, and the classes that users pass to them. `am.results` has the classes of results,
`am.errors` the errors, `am.reducers` the parts of a reducer, `am.architecture` the parts of a model's description, and
`am.draw` figures of your own arrays. Each name is imported when it is first used, so `attnmech --help` does not load
torch.
"""

import sys
from os.path import basename

try:
    from importlib import import_module
    from typing import Any

    from .basics.lazy_names import from_stub, is_from_import

    _load, __dir__, __all__ = from_stub(__name__, __file__)
except KeyboardInterrupt:
    # The command imports its package before it can catch Ctrl-C itself; "-m" is what Python runs at that time.
    if sys.argv[0] != "-m" and basename(sys.argv[0]).partition(".")[0] != "attnmech":
        raise
    sys.stderr.write("\ninterrupted\n")
    sys.exit(130)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _load(name)
    if name == "__version__":
        from importlib.metadata import version

        return version("attnmech")
    from .basics.lens_names import OF_PACKAGE, missing_name
    from .basics.public import nearest

    for module in ("results", "errors", "reducers", "architecture"):
        if name in dir(import_module(f".{module}", __name__)):
            message = f"attnmech.{name} is now am.{module}.{name}"
            break
    else:
        message = missing_name("attnmech", name, OF_PACKAGE)
        message += "" if ";" in message else nearest(name, __all__)
        if ";" not in message:
            raise AttributeError(message, name=name)
    raise (ImportError if is_from_import() else AttributeError)(message, name=name)
