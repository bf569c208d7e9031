"""Distinguishes installed code, which its version identifies, from the user's own code."""

import os
import site
import sysconfig
import types
from pathlib import Path
from typing import Final

_FOLDERS: Final[tuple[str | Path, ...]] = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    Path(__file__).parents[1],
)
_INSTALLED: Final = tuple(f"{path}{os.sep}" for folder in _FOLDERS for path in (Path(folder), Path(folder).resolve()))
"""The folders that hold installed code, with symbolic links resolved and unresolved."""


def is_installed(module: types.ModuleType | None) -> bool:
    """Whether a module is built in or belongs to an installed package, so its version identifies its code."""
    if module is None or module.__name__ == "__main__":
        return False
    file: str | None = getattr(module, "__file__", None)
    return not hasattr(module, "__path__") if file is None else os.path.abspath(file).startswith(_INSTALLED)
