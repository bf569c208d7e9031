"""The models that an agent may use, and the files that it may read and write."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError

if TYPE_CHECKING:
    from ...model.run.hooked import HookedModel

DEMO = "demo"
"""The name of the demo model."""


class Folders:
    """The folders that the user allows; without any, no file may be read or written."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise InputError(f"--folder must name a folder that exists; got {folder}.")
        self._roots = tuple(folder.resolve() for folder in folders)

    def file(self, name: str) -> Path:
        """Returns the path of a file, with links resolved; relative names begin in the first folder.

        Raises `InputError` for a path outside the folders, whether or not it exists.
        """
        if not self._roots:
            raise InputError("no file can be read or written; start the server with --folder.")
        if "\0" in name:
            raise InputError("a path must not contain a null character.")
        try:
            path = (self._roots[0] / name).resolve()
        except RuntimeError as error:  # a circle of links
            raise InputError(f"{name[:200]!r} is not a path.") from error
        if not any(path.is_relative_to(root) for root in self._roots):
            allowed = ", ".join(map(str, self._roots))
            raise InputError(f"files must be in {allowed}; got {name[:200]!r}.")
        try:
            path.stat()
        except FileNotFoundError:
            pass  # it may be written
        except OSError as error:  # a name that is too long, or a folder that cannot be entered
            raise InputError(f"{name[:200]!r} cannot be used: {error.strerror}.") from error
        return path

    def files(self) -> Iterator[tuple[str, int]]:
        """The names, as `file` takes them, and the sizes of the files that are not hidden."""
        for root in self._roots:
            for path in root.rglob("*"):
                name = path.relative_to(root)
                hidden = any(part.startswith(".") for part in name.parts)
                with suppress(InputError, OSError, UnicodeError):  # it leads outside, is gone, or has no address
                    if not hidden and self.file(str(path)).is_file() and str(path).encode():
                        yield str(name if root == self._roots[0] else path), path.stat().st_size


class Models:
    """The models by the names that the user gave; an agent cannot load others."""

    def __init__(self, names: Sequence[str], device: str | None, dtype: str | None) -> None:
        self.names = tuple(names) or (DEMO,)
        self._device, self._dtype = device, dtype
        self.loaded: tuple[str, HookedModel] | None = None
        """The model in memory, with its name."""

    def load(self, name: str | None) -> "HookedModel":
        """Returns a model, the first by default; the model loaded before is dropped."""
        name = self.names[0] if name is None else name
        if name not in self.names:
            raise InputError(f"`model` must be one of {', '.join(self.names)}; got {name[:200]!r}.")
        if self.loaded is None or self.loaded[0] != name:
            from ...model.files.load import load

            self.loaded = None
            loaded = load(None if name == DEMO else name, device=self._device, dtype=self._dtype)
            self.loaded = name, loaded
        return self.loaded[1]
