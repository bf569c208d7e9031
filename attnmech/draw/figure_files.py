"""How does a figure get into a paper? As SVG, PDF or PNG, in the width of a column, of a page or of a slide.

A figure is drawn as on the screen, on white, and scaled as a whole until its text has the size that a printed page
needs; so its marks, lines and words keep their proportions.
"""

import math
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go  # type: ignore[import-untyped]

from attnmech.arguments import option, string
from attnmech.draw.browser import PATIENCE, in_browser
from attnmech.draw.scripts import Script, boot, carriers, package_text, plotly_for
from attnmech.draw.text import printable
from attnmech.errors import InputError, OutputError, first_line
from attnmech.files import check_writable, path_of, writing

TYPES: Final = (".pdf", ".png", ".svg")

FONTS: Final = "Arial, Helvetica, 'Liberation Sans', 'DejaVu Sans', sans-serif"
"""What journals ask for, and what has the same widths where these are not installed."""

INK: Final = "#1a1a1a"

_SCREEN_PT: Final = 9.0
"""The text of a figure on the screen: 12 pixels of 1/96 inch."""

_LEAST: Final = 10.5
"""No text is smaller, in pixels of the screen: 6 pt where the usual text has 7."""

_PIXELS_PER_MM: Final = 96 / 25.4


@dataclass(frozen=True)
class Size:
    """The size of a figure in a file."""

    width: float
    """In mm."""
    most: float
    """Its greatest height, in mm; of a slide, its height."""
    points: float
    """The size of its usual text, in pt."""
    dpi: int
    """The resolution of a PNG."""
    fixed: bool = False
    """Whether the height is given, too."""

    @property
    def scale(self) -> float:
        """How much larger than on the screen everything is drawn."""
        return self.points / _SCREEN_PT

    @property
    def pixels(self) -> tuple[float, float]:
        """Width and greatest height in pixels of the screen, before the scale."""
        return self.width * _PIXELS_PER_MM / self.scale, self.most * _PIXELS_PER_MM / self.scale


SIZES: Final = {
    "column": Size(85, 225, 7, 600),
    "double": Size(178, 225, 7, 600),
    "slide": Size(338.67, 190.5, 18, 144, fixed=True),
}
"""One column of a journal, two columns, and a slide of 16:9."""


def save_figure(figure: go.Figure, path: str | Path, *, size: str = "column", title: str = "") -> Path:
    """Writes a plotly figure for a paper or a slide: as SVG, PDF or PNG, by the path's suffix.

    On white, in a sans-serif font that a PDF embeds, with the cells of heat maps as shapes that stay sharp. Chromium
    or Chrome draws it, without a network: `pip install 'attnmech[figures]'`; the environment variable `BROWSER_PATH`
    names a browser that is not found by itself.

    >>> save_figure(acts_figure, "attention.pdf", title="demo, layer 2, head 6")      # doctest: +SKIP

    Args:
        figure: any plotly figure, of attnmech or not.
        path: a file that ends with .pdf, .png or .svg; an existing file is replaced.
        size: "column" (85 mm wide, text of 7 pt), "double" (178 mm, 7 pt) or "slide" (16:9, 13.33 × 7.5 inches, 18 pt).
            A PNG has 600 dpi, of a slide 1920 × 1080 pixels.
        title: a line above the figure, wrapped where it is longer.

    Returns:
        The path.

    Raises:
        InputError: for a figure that is not plotly's, and for another size.
        OutputError: for another suffix, a path that is not writable, and where there is no browser.

    """
    if not isinstance(figure, go.Figure):
        kind = type(figure).__name__
        raise InputError(f"`figure` must be a plotly figure; got a {kind}. Views have .save_figure(path) themselves.")
    target, chosen = checked_target(path, size)
    string("title", title)
    script = plotly_for({str(trace.type) for trace in figure.data}).text
    width, most = chosen.pixels
    given = {
        "figure": _on_paper(figure.to_plotly_json()),
        "title": printable(title),
        "width": width,
        "height": most if chosen.fixed else None,
        "most": most,
        "size": 12,
        "family": FONTS,
    }

    def drawn(page: Any) -> float:
        page.set_content(_document(title, "<main></main>"))
        page.add_script_tag(content=script)
        page.add_script_tag(content=package_text("figure_files.js"))
        found = page.evaluate("(given) => attnmechSvg(given)", given)
        height = float(found["height"]) * chosen.scale / _PIXELS_PER_MM
        svg = str(found["svg"]).replace("<svg ", f'<svg width="{chosen.width:g}mm" height="{height:.2f}mm" ', 1)
        page.evaluate("(svg) => { document.querySelector('main').innerHTML = svg; }", svg)
        pictures["svg"] = svg
        return height

    pictures: dict[str, str] = {}
    return _write(target, chosen, drawn, lambda: f'<?xml version="1.0" encoding="UTF-8"?>\n{pictures["svg"]}\n'.encode())


def save_view(
    element: str, start: str, scripts: tuple[Script, ...], path: str | Path, *, size: str, title: str
) -> Path:
    """Writes a view of HTML, given by its `element` with the id "view" and the line of script that draws it.

    Its controls are left out. What it draws on canvases are images in the file, of four pixels for each of the
    screen's; an SVG is made of the PDF by poppler's `pdftocairo`.
    """
    target, chosen = checked_target(path, size)
    string("title", title)
    if target.suffix.lower() == ".svg" and shutil.which("pdftocairo") is None:
        raise OutputError(
            f"to write {target}, poppler's pdftocairo makes the SVG of a view (apt install poppler-utils); or name a "
            ".pdf file, which has the same vectors."
        )
    heading = f'<p class="title">{escape(printable(title))}</p>' if title else ""
    main = f"<main>{heading}{element}</main>{carriers(scripts)}<script>{boot()}</script>"

    def drawn(page: Any) -> float:
        page.set_content(_document(title, main, chosen))
        page.evaluate(f"() => {start.rstrip(';')}")
        page.emulate_media(media="print", color_scheme="light")
        # Two frames: views draw anew, with all that they have, once they are printed.
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.evaluate("() => document.fonts.ready")
        high = float(page.evaluate("() => document.querySelector('main').getBoundingClientRect().height"))
        most = chosen.most * _PIXELS_PER_MM
        if chosen.fixed and high > most:
            page.evaluate(
                "(by) => { const { style } = document.querySelector('main'); style.zoom *= by; style.margin = '0 auto'; }",
                most / high * 0.995,
            )
        return chosen.most if chosen.fixed else math.ceil(high + 1) / _PIXELS_PER_MM

    return _write(target, chosen, drawn, None)


def checked_target(path: str | Path, size: str) -> tuple[Path, Size]:
    """The file and the size, or `OutputError` and `InputError` for what cannot be written."""
    target = path_of(path, OutputError)
    if target.suffix.lower() not in TYPES:
        raise OutputError(f"a figure is saved as {', '.join(TYPES)}; got {target.name or target}.")
    chosen = SIZES[option("size", size, SIZES)]
    check_writable(target)
    return target, chosen


def _write(target: Path, size: Size, drawn: Callable[[Any], float], svg: Callable[[], bytes] | None) -> Path:
    """Opens a page, lets `drawn` fill it and say its height in mm, and writes it; `svg` gives an SVG, if there is one."""
    kind = target.suffix.lower()

    def job(browser: Any) -> bytes:
        dots = size.dpi / 96 if kind == ".png" else 4
        width, most = (math.ceil(side * _PIXELS_PER_MM) for side in (size.width, size.most))
        context = browser.new_context(
            offline=True, viewport={"width": width, "height": most}, device_scale_factor=dots, color_scheme="light"
        )
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        height = drawn(page)
        if kind == ".png":
            high = math.ceil(height * _PIXELS_PER_MM)
            page.set_viewport_size({"width": width, "height": high})
            return _with_dpi(page.screenshot(), size.dpi)
        if kind == ".svg" and svg is not None:
            return svg()
        pdf: bytes = page.pdf(width=f"{size.width}mm", height=f"{height}mm", print_background=True)
        return pdf if kind == ".pdf" else _svg_of(pdf, target)

    made = in_browser(job, target=target)
    with writing(target) as draft:
        draft.write_bytes(made)
    return target


def _document(title: str, main: str, size: Size | None = None) -> str:
    """The page that the browser draws; its title becomes the PDF's."""
    placed = "" if size is None else f"main {{ width: {size.pixels[0]}px; zoom: {size.scale}; }}"
    style = (
        "html, body { margin: 0; background: #ffffff; overflow: hidden; } svg { display: block; }"
        "@page { margin: 0; }"
        f"main {{ margin: 0; color: {INK}; font-family: {FONTS}; }} main .attnmech {{ font-family: {FONTS}; }}"
        "main .title { margin: 0 0 6px; font-size: 13px; font-weight: bold; }"
        "main .attnmech-controls :is(button, select, input, label, .attnmech-control), main .attnmech-reading"
        f" {{ display: none !important; }} {placed}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(printable(title))}</title>'
        f"<style>{style}</style></head><body>{main}</body></html>"
    )


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
        found = {key: _on_paper(value, key) for key, value in figure.items()}
        if name.endswith("font") and isinstance(found.get("size"), int | float):
            found["size"] = max(_LEAST, found["size"])
        return found
    return [_on_paper(each, name) for each in figure] if isinstance(figure, list | tuple) else figure


def _svg_of(pdf: bytes, target: Path) -> bytes:
    """A page of PDF as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "figure.pdf"), Path(folder, "figure.svg")
        source.write_bytes(pdf)
        done = subprocess.run(["pdftocairo", "-svg", str(source), str(made)], capture_output=True, check=False)
        if done.returncode or not made.is_file():
            said = OSError(done.stderr.decode(errors="replace") or "no reason given")
            raise OutputError(f"to write {target}: pdftocairo failed ({first_line(said)}).")
        return made.read_bytes()


def _with_dpi(png: bytes, dpi: int) -> bytes:
    """A PNG that says how large it is (its chunk pHYs), so that a page takes it in its size."""
    head = 33  # the signature and the chunk IHDR
    per_metre = round(dpi / 0.0254)
    body = b"pHYs" + struct.pack(">IIB", per_metre, per_metre, 1)
    return png[:head] + struct.pack(">I", 9) + body + struct.pack(">I", zlib.crc32(body)) + png[head:]
