"""Checks paths, and writes files whole or not at all."""

import errno
import hashlib
import itertools
import os
import platform
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError

from ..errors import AttnmechError, InputError, OutputError
from .messages import first_line

_HOST: Final = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
"""Names this machine in the file names of drafts: on a shared disk, processes of two machines may have the same id."""

_DRAFT: Final = ".part"  # the suffix of drafts
_NUMBERS: Final = itertools.count()  # numbers the drafts of this process


def path_of(value: str | Path, error: type[AttnmechError] = InputError) -> Path:
    """Converts to a `Path`; raises `error` if the path is invalid (contains a NUL, say) or this user may not access it.

    The caller checks whether the file exists.

    >>> path_of("report.html")
    PosixPath('report.html')
    """
    try:
        path = Path(value)
    except TypeError:
        raise error(f"a path must be a string or a Path; got {type(value).__name__}.") from None
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as refused:
        name = repr(str(path))
        short = name if len(name) <= 80 else f"{name[:80]}…"
        reason = getattr(refused, "strerror", None) or str(refused)
        raise error(f"the path {short} cannot be used: {reason}.") from refused
    return path


def path_ending(value: str | Path, *suffixes: str, instead: str = "") -> Path:
    """Converts to the `Path` of a file to write; raises `OutputError` unless its suffix is one of `suffixes`."""
    path = path_of(value, OutputError)
    odd = path.exists() and not path.is_file()  # a folder or a pipe, which `writing` refuses
    if path.suffix.lower() not in (*suffixes, _DRAFT) and not odd:
        raise OutputError(f"the path must end in {suffixes[0]}; got {path.name or path}.{instead}")
    return path


def cache_folder(name: str) -> Path:
    """A folder for what can be made again: `attnmech/NAME` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "attnmech" / name


class writing:
    """Writes a file whole or not at all: the block writes a draft, which replaces the file if the block succeeds.

    >>> with writing(Path("report.html")) as draft:      # doctest: +SKIP
    ...     draft.write_text("...")

    A symbolic link stays a link: its target is written. The new file keeps the permissions of the old one. Blocks
    can be nested; nothing is replaced until the innermost block succeeds.

    Raises `OutputError` if the path is not writable (a folder, a device, a pipe, a file without write permission) or
    writing fails, for example on a full disk. The old file is then unchanged.
    """

    def __init__(self, target: Path) -> None:
        self._named = target

    def __enter__(self) -> Path:
        self._target, self._mode = _checked(self._named)
        self._draft = _draft_of(self._target)
        return self._draft

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                # safetensors makes its files unreadable by other users.
                self._draft.chmod(self._mode)
                self._draft.replace(self._target)
        except OSError as failed:
            raise _cannot_write(self._named, failed) from failed
        finally:
            with suppress(OSError):
                self._draft.unlink(missing_ok=True)
        if isinstance(error, OutputError) and str(self._draft) in str(error):
            # A nested block had the draft as its target: name the user's file.
            raise OutputError(str(error).replace(str(self._draft), str(self._named))) from error
        if isinstance(error, OSError | SafetensorError) and not isinstance(error, AttnmechError):
            raise _cannot_write(self._named, error) from error


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Makes a folder and its missing parents for a block; if the block fails, removes those that are empty again.

    Raises `OutputError` if the folder cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make the folder {folder}: {error.strerror or error}.") from error
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
        raise


def check_writable(target: Path) -> None:
    """Raises `OutputError` if a file cannot be written at this path; leaves nothing behind."""
    _checked(target)


def _checked(target: Path) -> tuple[Path, int]:
    """The file that a path resolves to, and the permissions that this file has or would get."""
    path_of(target, OutputError)
    try:
        held = _stat(target)
        if held is not None and stat.S_ISDIR(held.st_mode):
            raise OutputError(f"cannot write {target}: it is a folder; name a file in it.")
        if held is not None and not stat.S_ISREG(held.st_mode):
            raise OutputError(f"cannot write {target}: it is a device, a pipe or a socket; name a regular file.")
        real = Path(os.path.realpath(target))
        if not real.parent.is_dir():
            raise OutputError(f"cannot write {target}: there is no folder {real.parent}.")
        if held is not None and not os.access(real, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        _remove_abandoned_drafts(real)
        probe = _draft_of(real)
        probe.touch()
        made = probe.stat()
        probe.unlink()
    except OutputError:
        raise
    except OSError as error:
        raise _cannot_write(target, error) from error
    return real, stat.S_IMODE((held or made).st_mode)


def _stat(target: Path) -> os.stat_result | None:
    try:
        return target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _cannot_write(target: Path, error: BaseException) -> OutputError:
    # Where another library set `strerror`, the text may name a draft.
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number else first_line(error)
    return OutputError(f"cannot write {target}: {reason}.")


def _draft_of(target: Path) -> Path:
    """A name next to the file that no other writer uses."""
    return target.with_name(f".{target.name}.{_HOST}-{os.getpid()}-{next(_NUMBERS)}{_DRAFT}")


def _remove_abandoned_drafts(target: Path) -> None:
    """Removes the drafts of a file that killed processes on this machine left behind."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.{_HOST}-(\d+)-\d+\.part")
    with suppress(OSError):  # in a folder that cannot be listed, drafts stay
        for draft in target.parent.iterdir():
            if (match := ours.fullmatch(draft.name)) and not _runs(int(match[1])):
                draft.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if os.name != "posix":  # on Windows, signal 0 would end the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
