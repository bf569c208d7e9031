"""How do compiled loops run on torch's own threads? As a parallel region of the OpenMP library that torch has loaded.

Between two of torch's operations its threads wait actively for some milliseconds. On threads beside them a loop would
share the processor with those.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

_LOADED_IN: Final = os.getpid()
_CALL: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Team:
    """The threads of GNU's OpenMP library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes, self._parallel.restype = (_CALL, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def run(self, work: Callable[[None], Any]) -> None:
        """Calls `work(None)` on each of torch's threads, the caller's among them.

        No Python function: one could be interrupted (Ctrl-C) where nobody can catch it. As many threads as torch uses,
        since the library ends those that a smaller team leaves out.
        """
        self._parallel(_CALL(work), None, torch.get_num_threads(), 0)


def torch_team() -> Team | None:
    """torch's threads, where they are GNU OpenMP's; none in a forked process, whose parent keeps them."""
    return _team() if os.getpid() == _LOADED_IN else None


@cache
def _team() -> Team | None:
    if "parallel backend: OpenMP" not in torch.__config__.parallel_info() or not hasattr(os, "RTLD_NOLOAD"):
        return None
    folder = Path(torch.__file__).parent
    for path in (*folder.glob("lib/libgomp*.so*"), *folder.with_name("torch.libs").glob("libgomp*.so*")):
        try:
            return Team(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD))
        except (OSError, AttributeError):
            continue
    return None
