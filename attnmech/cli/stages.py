"""Shows on stderr which stage a command has reached, and ends commands at Ctrl-C."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def stages(first: str, total: int) -> Iterator["Stage"]:
    """Shows a progress bar on stderr that names the current stage and disappears at the end."""
    console = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield Stage(bar, first, total)


@contextmanager
def importing() -> Iterator[None]:
    """Lets Ctrl-C end the process at once during the block, which imports torch and transformers and does nothing else.

    An exception would not always arrive: torch may abort, and transformers raises another error in its place.
    """
    before = signal.getsignal(signal.SIGINT)
    with stages("importing torch and transformers", total=1) as step:

        def end(*_: Any) -> NoReturn:
            step.clear()
            sys.stderr.write("interrupted\n")
            sys.stderr.flush()
            os._exit(130)

        handled = callable(before) and threading.current_thread() is threading.main_thread()
        if handled:
            signal.signal(signal.SIGINT, end)
        try:
            yield
        finally:
            if handled:
                signal.signal(signal.SIGINT, before)


def interrupt_in(error: BaseException | None) -> KeyboardInterrupt | None:
    """Ctrl-C, if it is the error or its cause: imports within a library may raise their own error from it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


class Stage:
    """A function to call with the name of the next stage."""

    def __init__(self, bar: Progress, first: str, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task(first, total=total)

    def clear(self) -> None:
        """Removes the bar."""
        self._bar.stop()

    def say(self, line: str) -> None:
        """Prints a line that stays, above the bar."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __call__(self, description: str) -> None:
        self._bar.update(self._task, advance=1, description=description)
