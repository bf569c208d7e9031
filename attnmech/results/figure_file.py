"""Saves a figure of a result, with a title that names the model, the figure, the layer and the head."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..draw.figure_files import checked_target, save_figure
from ..errors import InputError


class SavesFigures:
    """Base of every class with `.plot(...)`: writes the same figure to a file."""

    FIGURES: ClassVar[Collection[str]] = ()
    """The names of the figures that `plot` draws, besides maps of a statistic; empty for a single figure."""

    def save_figure(
        self, path: str | Path, *figure: str, size: str = "column", title: str | None = None, **options: Any
    ) -> Path:
        """Writes a figure of this result for a paper or a slide: as SVG, PDF or PNG, by the path's suffix.

        >>> focus.save_figure("focus.pdf", "first_focus", layer=2, head=6)      # doctest: +SKIP
        >>> effects.save_figure("effects.svg", size="double")                   # doctest: +SKIP

        The text is sans-serif, 7 pt in print, and a PDF embeds the font. A browser draws the figure offline: `pip
        install 'attnmech[figures]'`.

        Args:
            path: a file that ends with .pdf, .png or .svg; an existing file is replaced.
            figure: the name of the figure, as in `plot`.
            size: "column" (85 mm wide), "double" (178 mm) or "slide" (16:9).
            title: the line above the figure; by default the result's heading with the model, the figure, the layer and
                the head. "" omits it, for use with a caption.
            options: the other arguments of `plot`: `layer`, `head`, …

        Returns:
            The path.

        Raises:
            InputError: for an unknown size, for arguments that `plot` refuses, and for a result without figures.
            OutputError: for another suffix, for a path that is not writable, or if no browser is found.

        """
        plot = getattr(self, "plot", None)
        if plot is None:
            raise InputError(f"{type(self).__name__} has no figure.")
        checked_target(path, size)
        drawn = plot(*figure, **options)
        named = self._figure_title(*figure, **options) if title is None else title
        return save_figure(drawn, path, size=size, title=named)

    def _figure_title(self, *figure: str, **options: Any) -> str:
        heading, model = self._heading, self._figure_model
        words = [word.replace("_", " ") for word in (*figure, options.get("figure")) if isinstance(word, str)]
        place = ", ".join(f"{name} {number}" for name, number in self._figure_place(*figure, **options).items())
        return " · ".join(filter(None, (heading, "" if model in heading else model, *words, place)))

    @property
    def _heading(self) -> str:
        """The part of the title that says what the figure shows."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).capitalize()

    @property
    def _figure_model(self) -> str:
        """The name of the model, if it is known."""
        return ""

    def _figure_place(self, *figure: str, **options: Any) -> Mapping[str, int]:
        """The layer and the head that a figure shows, if it shows one."""
        return {name: options[name] for name in ("layer", "head") if options.get(name) is not None}
