"""Sends a user's functions and classes to workers: Ray pickles them, by value if they come from the user's own files.

The pickles are never stored: journals and results are written as safetensors.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import cloudpickle as untyped

from ..basics.installed import is_installed
from ..basics.messages import first_line
from ..errors import EngineError

cloudpickle: Any = untyped


def shipped(thing: Any, what: str) -> bytes:
    """Turns an object into bytes that a worker can read; `what` names it in the error if that fails."""
    try:
        with _by_value():
            return bytes(cloudpickle.dumps(thing))
    except Exception as error:  # the contents of a user's object may raise anything
        raise EngineError(
            f"{what} cannot be sent to worker processes ({first_line(error)}). Keep models, open files and generators "
            'out of them, or use engine="local".'
        ) from error


def received(sent: bytes) -> Any:
    """The reverse of `shipped`, on a worker."""
    return cloudpickle.loads(sent)


@contextmanager
def _by_value() -> Iterator[None]:
    """Within the block, code of modules that are not installed, such as files beside a script, is pickled by value."""
    known = cloudpickle.list_registry_pickle_by_value()
    own = [module for module in list(sys.modules.values()) if _is_own(module) and module.__name__ not in known]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: object) -> bool:
    if not isinstance(module, types.ModuleType) or module.__name__.partition(".")[0] in ("__main__", "attnmech"):
        return False
    return getattr(module, "__file__", None) is not None and not is_installed(module)
