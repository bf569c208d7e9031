"""Writes figures for papers and slides as SVG, PDF or PNG, in the width of a column, a page or a slide.

A figure is drawn as on the screen, on white, and scaled as a whole until its text has the size that a printed page
needs, so that marks, lines and words keep their proportions.

Chromium, or a browser based on it, draws the figures, without a window and without a network.
"""

import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

import plotly.graph_objects as go  # type: ignore[import-untyped]

from ..basics.arguments import option, string
from ..basics.files import check_writable, path_of, writing
from ..basics.messages import first_line
from ..basics.public import public
from ..errors import AttnmechError, InputError, OutputError
from .scripts import package_text, plotly_for
from .text import html_text, printable

VARIABLE: Final = "BROWSER_PATH"  # the environment variable that names a browser; kaleido reads it too

NAMES: Final = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "msedge"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
"""The programs of Chromium and of browsers based on it, to search for in `PATH`."""

PATIENCE: Final = 120_000  # the time that the browser may take for one step, in milliseconds


def in_browser(job: Callable[[Any], bytes], *, target: Path) -> bytes:
    """Returns the bytes that `job` makes with a browser (playwright's `Browser`), which is closed afterwards.

    The job runs in a separate thread: in a notebook, the main thread has an event loop, which playwright refuses.

    Raises `OutputError`, naming the file `target`, without playwright or a browser, and if the browser fails.
    """
    program = browser_program(target)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run, job, program, target).result()


def browser_program(target: Path) -> str | None:
    """Returns the browser's path; None for the browser that playwright installed."""
    if find_spec("playwright") is None:
        raise OutputError(
            f"a browser is needed to write {target}: pip install 'attnmech[figures]', and Chromium or Chrome (apt "
            "install chromium, or: playwright install chromium)."
        )
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise OutputError(f"{VARIABLE} must name a browser executable (needed to write {target}); got {named}.")
        return named
    return next((program for program in map(shutil.which, NAMES) if program), None)


def _run(job: Callable[[Any], bytes], program: str | None, target: Path) -> bytes:
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as driver:
        if program is None and not Path(driver.chromium.executable_path).exists():
            raise OutputError(
                f"no browser was found, which is needed to write {target}: install Chromium or Chrome (apt install "
                f"chromium, or: playwright install chromium), or set {VARIABLE} to its executable."
            )
        try:
            browser = driver.chromium.launch(executable_path=program, args=["--disable-gpu"], timeout=PATIENCE)
            try:
                return job(browser)
            finally:
                browser.close()
        except AttnmechError:
            raise
        except Error as error:
            name = program or driver.chromium.executable_path
            raise OutputError(f"the browser {name} failed while writing {target} ({first_line(error)}).") from error


TYPES: Final = (".pdf", ".png", ".svg")

FONTS: Final = "Arial, Helvetica, 'Liberation Sans', 'DejaVu Sans', sans-serif"
"""The fonts that journals ask for, and replacements for systems without them."""

INK: Final = "#1a1a1a"

_SCREEN_PT: Final = 9.0  # the text size of a figure on the screen, in pt: 12 pixels of 1/96 inch
_LEAST: Final = 10.5  # the smallest text size, in pixels of the screen: 6 pt if body text has 7 pt
_NARROW: Final = 600.0  # figures have two columns from this width on, in pixels of the screen

PIXELS_PER_MM: Final = 96 / 25.4

_DOTS: Final = 4  # the pixels of a canvas per pixel of the screen, along each side, in a PDF or an SVG


@dataclass(frozen=True)
class Size:
    """The size of a figure in a file."""

    width: float  # in mm
    most: float  # the greatest height, in mm; for a slide, the height
    points: float  # the size of body text, in pt
    dpi: int  # the resolution of a PNG
    fixed: bool = False  # whether the height is fixed, as for a slide

    @property
    def scale(self) -> float:
        """The factor from sizes on the screen to sizes in the file."""
        return self.points / _SCREEN_PT

    @property
    def pixels(self) -> tuple[float, float]:
        """Width and greatest height in pixels of the screen, before the scale."""
        return self.width * PIXELS_PER_MM / self.scale, self.most * PIXELS_PER_MM / self.scale


SIZES: Final = {
    "column": Size(85.0, 225.0, 7.0, 600),
    "double": Size(178.0, 225.0, 7.0, 600),
    "slide": Size(338.66, 190.49, 18.0, 144, fixed=True),
}
"""One column of a journal, two columns, and a slide of 16:9."""


@public
def save_figure(figure: go.Figure, path: str | Path, *, size: str = "column", title: str = "") -> Path:
    """Writes a plotly figure for a paper or a slide: as SVG, PDF or PNG, by the path's suffix.

    The figure is on white, in a sans-serif font that a PDF embeds; the cells of heat maps are shapes that stay sharp.
    Chromium or Chrome draws it, without a network: `pip install 'attnmech[figures]'`. The environment variable
    `BROWSER_PATH` names a browser that attnmech does not find.

    >>> save_figure(acts_figure, "attention.pdf", title="demo, layer 2, head 6")      # doctest: +SKIP

    Args:
        figure: any plotly figure, of attnmech or not.
        path: a file that ends with .pdf, .png or .svg; an existing file is replaced.
        size: "column" (85 mm wide, text of 7 pt), "double" (178 mm, 7 pt) or "slide" (16:9, 13.33 × 7.5 inches, 18 pt).
            A PNG has 600 dpi; for a slide it has 1920 × 1080 pixels.
        title: the line above the figure; a long title is wrapped.

    Returns:
        The path.

    Raises:
        InputError: for a figure that is not plotly's, and for another size.
        OutputError: for another suffix, a path that is not writable, or if no browser is found.

    """
    if not isinstance(figure, go.Figure):
        kind = type(figure).__name__
        raise InputError(f"`figure` must be a plotly figure; got a {kind}. Views have .save_figure(path) themselves.")
    target, chosen = checked_target(path, size)
    string("title", title)
    script = plotly_for({str(trace.type) for trace in figure.data}).text
    width, most = chosen.pixels
    options = {
        "figure": _on_paper(json.loads(_fitted(figure, width).to_json())),
        "title": printable(title),
        "width": width,
        "height": most if chosen.fixed else None,
        "most": most,
        "size": 12,
        "family": FONTS,
    }

    def drawn(page: Any) -> Drawn:
        page.set_content(html_document(title, "<main></main>"))
        page.add_script_tag(content=script)
        page.add_script_tag(content=package_text("figure_files.js"))
        measured = page.evaluate("(options) => attnmechSvg(options)", options)
        height = float(measured["height"]) * chosen.scale / PIXELS_PER_MM
        svg = str(measured["svg"]).replace("<svg ", f'<svg width="{chosen.width:g}mm" height="{height:.2f}mm" ', 1)
        page.evaluate("(svg) => { document.querySelector('main').innerHTML = svg; }", svg)
        return height, lambda _: f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}\n'.encode()

    return write_page(target, chosen, drawn)


def checked_target(path: str | Path, size: str) -> tuple[Path, Size]:
    """The file and the size; raises `OutputError` for a path that is not writable, `InputError` for an unknown size."""
    target = path_of(path, OutputError)
    if target.suffix.lower() not in TYPES:
        raise OutputError(f"a figure is saved as {', '.join(TYPES)}; got {target.name or target}.")
    chosen = SIZES[option("size", size, SIZES)]
    check_writable(target)
    return target, chosen


Drawn: TypeAlias = tuple[float, Callable[[bytes], bytes]]
"""The height of a page's content in mm, and the function that turns the page's PDF into an SVG."""


def write_page(target: Path, size: Size, draw: Callable[[Any], Drawn]) -> Path:
    """Writes a playwright page to a file, after `draw` has drawn on it."""
    kind = target.suffix.lower()

    def job(browser: Any) -> bytes:
        width, most = (math.ceil(side * PIXELS_PER_MM) for side in (size.width, size.most))
        context = browser.new_context(
            offline=True,
            viewport={"width": width, "height": most},
            device_scale_factor=size.dpi / 96 if kind == ".png" else _DOTS,
            color_scheme="light",
        )
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        height, svg_of = draw(page)
        if kind == ".png":
            page.set_viewport_size({"width": width, "height": math.ceil(height * PIXELS_PER_MM)})
            return _with_dpi(page.screenshot(), size.dpi)
        pdf: bytes = page.pdf(width=f"{size.width}mm", height=f"{height}mm", print_background=True)
        return pdf if kind == ".pdf" else svg_of(pdf)

    made = in_browser(job, target=target)
    with writing(target) as draft:
        draft.write_bytes(made)
    return target


def html_document(title: str, main: str, **properties: str) -> str:
    """The page that the browser draws; its title becomes the PDF's, and figure_files.css uses the `properties`."""
    variables = {"ink": INK, "fonts": FONTS, **properties}
    style = ":root {" + "".join(f"--{name}: {value};" for name, value in variables.items()) + "}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html_text(title)}</title>'
        f"<style>{style}{package_text('figure_files.css')}</style></head><body>{main}</body></html>"
    )


def _fitted(figure: go.Figure, width: float) -> go.Figure:
    """The figure, with its layout for narrow widths (`layout.meta["narrow"]`) if it has one and `width` is narrow."""
    meta = figure.layout.meta
    if width >= _NARROW or not isinstance(meta, Mapping) or "narrow" not in meta:
        return figure
    return go.Figure(figure).update_layout({place.replace(".", "_"): value for place, value in meta["narrow"].items()})


def _on_paper(figure: Any, name: str = "") -> Any:
    """A figure's JSON with readable text in print: no font below `_LEAST`, grey text as ink, white paper."""
    if not name:
        figure = _on_paper(figure, "figure")
        layout = figure["layout"]
        font = {**layout.get("font", {}), "family": FONTS, "color": INK, "size": 12}
        height = layout.get("height") or 320
        figure["layout"] = {**layout, "font": font, "height": height, "paper_bgcolor": "#ffffff"}
        return figure
    if isinstance(figure, Mapping):
        entries = {key: _on_paper(value, key) for key, value in figure.items()}
        if name.endswith("font") and isinstance(entries.get("size"), int | float):
            entries["size"] = max(_LEAST, entries["size"])
        return entries
    return [_on_paper(entry, name) for entry in figure] if isinstance(figure, list | tuple) else figure


def _with_dpi(png: bytes, dpi: int) -> bytes:
    """A PNG that states its resolution (chunk pHYs), so that a document shows it at the right size."""
    head = 33  # the signature and the chunk IHDR
    per_metre = round(dpi / 0.0254)
    body = b"pHYs" + struct.pack(">IIB", per_metre, per_metre, 1)
    return png[:head] + struct.pack(">I", 9) + body + struct.pack(">I", zlib.crc32(body)) + png[head:]
