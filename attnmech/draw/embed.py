"""Self-contained views, which display themselves in a notebook or are written as a page.

In a notebook, the output of the first view that needs a script contains it, and later views use it from there; when
that cell runs again, its output contains the script again. A page contains each script once.

For papers and slides, a browser prints a view without its controls.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

import plotly.graph_objects as go  # type: ignore[import-untyped]
from markupsafe import Markup

from ..basics.arguments import string
from ..basics.lens_names import missing_name
from ..basics.messages import first_line
from ..basics.public import public
from ..errors import InputError, OutputError
from . import scripts
from .figure_files import PIXELS_PER_MM, Drawn, checked_target, html_document, save_figure, write_page
from .html_file import WritesHtml, returns_page
from .scripts import Script, boot, carriers, package_text
from .templates import rendered
from .text import html_text, json_for_script, short_name


def _svg_of(pdf: bytes, target: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "figure.pdf"), Path(folder, "figure.svg")
        source.write_bytes(pdf)
        done = subprocess.run(["pdftocairo", "-svg", str(source), str(made)], capture_output=True, check=False)
        if done.returncode or not made.is_file():
            reason = OSError(done.stderr.decode(errors="replace") or "no reason given")
            raise OutputError(f"pdftocairo failed while writing {target} ({first_line(reason)}).")
        return made.read_bytes()


MOST_BYTES: Final = 40_000_000  # the largest size of a view's numbers in a page, in bytes


@public
@dataclass(frozen=True, repr=False)
class View(WritesHtml):
    """One interactive view with its numbers."""

    kind: str
    """The function of attnmech's script that draws the view: "sentence", "plotly", "circuitsvis", …"""
    title: str
    reading: str
    """One or two sentences on how to read the view."""
    data: Mapping[str, Any]
    """The argument of that function, as JSON values."""
    libraries: tuple[Script, ...] = ()
    """The scripts that the view needs besides attnmech's own: those of libraries, and of its method."""
    finding: str = ""
    """The finding that the numbers support, in one sentence, if it does not depend on the reader's choices."""
    model: str = ""
    """The name of the model, for the title of a saved figure."""

    def __post_init__(self) -> None:
        string("title", self.title)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing_name("View", name, {}), name=name, obj=self)

    @cached_property
    def json(self) -> str:
        """The numbers as a page holds them."""
        text = json_for_script(self.data)
        if len(text) > MOST_BYTES:
            raise InputError(
                f"{self.title} would take {len(text) / 1e6:.0f} MB in a page; the limit is {MOST_BYTES / 1e6:.0f} "
                "MB. Select one layer or fewer heads, or shorten the text."
            )
        return text

    @property
    def scripts(self) -> tuple[Script, ...]:
        """The scripts, in the order in which they run."""
        return (scripts.views(), *self.libraries)

    def element(self, name: str) -> str:
        """The HTML of the view, with its numbers; `name` is the id of its element."""
        return (
            f'<div class="attnmech" id="{name}">This view needs JavaScript; in a notebook, run its cell.</div>'
            f'<script type="application/json" id="{name}-data">{self.json}</script>'
        )

    def start(self, name: str) -> str:
        """The line of script that draws the view."""
        carried = json.dumps([script.name for script in self.scripts])
        return f"attnmech.show({json.dumps(name)}, {json.dumps(self.kind)}, {carried});"

    @returns_page
    def to_html(self) -> str:
        """A page with this view, which opens without a network; `write_html(path)` writes it to a file."""
        section = {"anchor": "view", "reading": self.reading, "figures": ["view"]}
        blank = dict.fromkeys(("heading", "finding", "choices", "caveat", "call"), "")
        return page_of_views({"view": self}, [blank | section], title=self.title, lead=self.finding)

    def save_figure(self, path: str | Path, *, size: str = "column", title: str | None = None) -> Path:
        """Writes the view for a paper or a slide: as SVG, PDF or PNG, by the path's suffix, without its controls.

        >>> acts.show("pattern", layer=2, head=6).save_figure("L2H6.pdf")      # doctest: +SKIP

        Args:
            path: a file that ends with .pdf, .png or .svg; an existing file is replaced.
            size: "column", "double" or "slide", as in `attnmech.draw.save_figure`.
            title: the line above the view; by default the view's title with the model, the layer and the head.

        Returns:
            The path.

        Raises:
            InputError: for another size.
            OutputError: for another suffix, a path that is not writable, or if no browser is found; an SVG also needs
                poppler's `pdftocairo`.

        """
        named = self._full_title if title is None else title
        if "layout" in self.data:
            drawn = {name: self.data[name] for name in ("data", "layout")}
            return save_figure(go.Figure(drawn), path, size=size, title=named)
        return self._printed(path, size, named)

    def _printed(self, path: str | Path, size: str, title: str) -> Path:
        """Writes the view to a file: canvases as images, with four pixels per pixel of the screen along each side."""
        target, chosen = checked_target(path, size)
        string("title", title)
        if target.suffix.lower() == ".svg" and shutil.which("pdftocairo") is None:
            raise OutputError(
                f"poppler's pdftocairo is needed to write {target} (apt install poppler-utils); or write a .pdf file, "
                "which is vector graphics too."
            )
        heading = f'<p class="title">{html_text(title)}</p>' if title else ""
        shown = f"{heading}{self._finding_html}{self.element('view')}"
        main = f'<main class="view">{shown}</main>{carriers(self.scripts)}<script>{boot()}</script>'
        page_of_view = html_document(title, main, width=f"{chosen.pixels[0]}px", scale=str(chosen.scale))
        most = chosen.most * PIXELS_PER_MM

        def drawn(page: Any) -> Drawn:
            page.set_content(page_of_view)
            page.evaluate(f"() => {self.start('view').rstrip(';')}")
            page.emulate_media(media="print", color_scheme="light")
            page.add_script_tag(content=package_text("view_files.js"))
            high = page.evaluate("(most) => attnmechFit(most)", most if chosen.fixed else None)
            height = chosen.most if chosen.fixed else math.ceil(float(high) + 1) / PIXELS_PER_MM
            return height, lambda pdf: _svg_of(pdf, target)

        return write_page(target, chosen, drawn)

    @property
    def _finding_html(self) -> str:
        return f'<p class="attnmech-finding">{html_text(self.finding)}</p>' if self.finding else ""

    @property
    def _full_title(self) -> str:
        chosen = self.data.get("chosen", {})
        numbers = self.data.get("choices") or {"layer": self.data.get("layers", [])}
        place = [
            f"{name} {numbers[name][chosen[name]] if name in numbers else chosen[name]}"
            for name in dict.fromkeys(("layer", "head", *numbers))
            if name in chosen and f"{name} " not in self.title
        ]
        shown = ", ".join(place)
        named = (
            f"{self.title}, {shown}"
            if shown and "layer " in self.title
            else " · ".join(filter(None, (self.title, shown)))
        )
        return f"{named} · {short_name(self.model)}" if self.model else named

    def of_model(self, model: str) -> Self:
        """A copy of the view that names this model in the titles of saved figures."""
        return replace(self, model=model)

    def _repr_html_(self) -> str:
        return (
            f'<div class="attnmech"><p class="attnmech-title">{html_text(self.title)}</p>{self._finding_html}'
            f'<p class="attnmech-reading">{html_text(self.reading)}</p>{in_notebook([self])}</div>'
        )

    def __repr__(self) -> str:
        return f"View({self.title!r}, {len(self.json) / 1e6:.2f} MB; shows itself in a notebook, or .write_html(path))"


def plotly_view(figure: go.Figure, *, title: str = "", reading: str = "") -> View:
    """Returns a plotly figure as a view, which needs no network in a notebook."""
    named = {"title": title} if title else {}
    types = {str(trace.type) for trace in figure.data}
    return View("plotly", title, reading, json.loads(figure.to_json()) | named, (scripts.plotly_for(types),))


def page_of_views(
    views: Mapping[str, View],
    sections: Sequence[Any],
    *,
    title: str,
    lead: str,
    table: str = "",
    provenance: Mapping[str, str] | None = None,
) -> str:
    """The HTML of a page that opens from a file without a network; `sections` refer to the views by name."""
    carried = {script.name: script for view in views.values() for script in view.scripts}
    places = {name: f"figure-{number}" for number, name in enumerate(views)}
    starts = "\n".join(view.start(places[name]) for name, view in views.items())
    boot = f"{scripts.boot()}\n{starts}\n{scripts.package_text('theme.js')}"
    return str(
        rendered(
            "page.html",
            policy=scripts.content_policy(boot, *(script.text for script in carried.values())),
            style=Markup(scripts.package_text("page.css")),
            title=title,
            lead=lead,
            sections=sections,
            elements={name: Markup(view.element(places[name])) for name, view in views.items()},
            table=Markup(table),
            provenance=provenance or {},
            carriers=Markup(scripts.carriers(carried.values())),
            boot=Markup(boot),
            **dict.fromkeys(("answers", "awaited", "data", "explorer", "live", "renewal", "script"), ""),
        )
    )


def in_notebook(views: Iterable[View]) -> str:
    """Returns the elements of views as a notebook's output, with the scripts that no earlier output contains."""
    named = [(f"attnmech-{uuid4().hex[:12]}", view) for view in views]
    needed = {script.name: script for _, view in named for script in view.scripts}
    elements = "".join(view.element(name) for name, view in named)
    starts = "\n".join(view.start(name) for name, view in named)
    return f"{elements}{scripts.carriers(_not_carried(needed))}<script>{scripts.boot()}\n{starts}</script>"


_carried: Final[dict[str, tuple[str | None, int]]] = {}
"""For each script, by name: the notebook cell whose output contains it, and the number of that execution."""


def _not_carried(needed: Mapping[str, Script]) -> list[Script]:
    """The scripts that this output must contain: all of them if outputs cannot see each other."""
    shell = _shell()
    if shell is None or "google.colab" in sys.modules:
        return list(needed.values())
    here = (_cell(shell), int(shell.execution_count))
    missing = []
    for name, script in needed.items():
        holder = _carried.get(name)
        runs_again = holder is not None and holder[0] is not None and holder[0] == here[0] and holder[1] != here[1]
        if holder is None or runs_again:
            missing.append(script)
            _carried[name] = here
    return missing


def _shell() -> Any:
    """The notebook's kernel; None in a script or a terminal."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None


def _cell(shell: Any) -> str | None:
    """The id of the running cell; None if the front end does not provide it."""
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell = parent.get("metadata", {}).get("cellId")
    return None if cell is None else str(cell)
