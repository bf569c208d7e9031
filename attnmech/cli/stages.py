"""Shows on stderr which stage a command has reached."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def stages(first: str, total: int) -> Iterator["Stage"]:
    """Shows a progress bar on stderr that names the current stage and disappears at the end."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield Stage(bar, first, total)


class Stage:
    """A function to call with the name of the next stage."""

    def __init__(self, bar: Progress, first: str, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task(first, total=total)

    def __call__(self, description: str) -> None:
        self._bar.update(self._task, advance=1, description=description)
