"""How files are written: whole or not at all."""

from pathlib import Path
from typing import Any

from .errors import OutputError


class writing:
    """Writes a file whole or not at all: a draft beside it, put in its place when the block ends well.

    >>> with writing(Path("report.html")) as draft:      # doctest: +SKIP
    ...     draft.write_text("...")
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._draft = target.with_name(f".{target.name}.part")

    def __enter__(self) -> Path:
        check_writable(self._target)
        return self._draft

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self._draft.replace(self._target)
            return
        self._draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OutputError(f"cannot write {self._target}: {error.strerror or error}.") from error


def check_writable(target: Path) -> None:
    """Raises `OutputError` if a file cannot be written there; leaves nothing behind."""
    if target.is_dir():
        raise OutputError(f"cannot write {target}: it is a folder; name a file in it.")
    if not target.parent.is_dir():
        raise OutputError(f"cannot write {target}: there is no folder {target.parent}.")
    probe = target.with_name(f".{target.name}.part")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}.") from error
