"""Pages as text and as files: `to_html()` returns a page, `write_html(path)` writes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from ..basics.files import check_writable, path_ending, writing
from ..basics.public import public
from ..errors import InputError

P = ParamSpec("P")


def returns_page(to_html: Callable[P, str]) -> Callable[P, str]:
    """Makes `to_html(path)` raise an `InputError` that names `write_html`."""
    made = public(to_html)

    @wraps(made)  # which marks it as public, so this check comes first
    def checked(*arguments: P.args, **options: P.kwargs) -> str:
        if len(arguments) > 1 or "path" in options:
            raise InputError("`to_html()` returns the page as text; use write_html(path) to write it to a file.")
        return made(*arguments, **options)

    return checked


def write_page(path: str | Path, page: Callable[[], str]) -> Path:
    """Writes a page completely or not at all; checks the path before making the page."""
    figure = " For a figure: save_figure(path), as .pdf, .png or .svg."
    target = path_ending(path, ".html", ".htm", instead=figure)
    check_writable(target)
    html = page()
    with writing(target) as draft:
        draft.write_text(html, encoding="utf-8")
    return target


class WritesHtml(ABC):
    """Gives `write_html` to a class that has `to_html`."""

    @abstractmethod
    def to_html(self) -> str:
        """The page as text."""

    def write_html(self, path: str | Path) -> Path:
        """Writes the page to a file, completely or not at all; an existing file is replaced.

        Returns:
            The path.

        Raises:
            OutputError: the path is not writable.

        """
        return write_page(path, self.to_html)
