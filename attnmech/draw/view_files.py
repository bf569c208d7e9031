"""Writes HTML views for papers and slides, as a browser prints them, without their controls."""

import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..basics.arguments import string
from ..basics.messages import first_line
from ..errors import OutputError
from .figure_files import PIXELS_PER_MM, Drawn, checked_target, html_document, write_page
from .scripts import Script, boot, carriers, package_text
from .text import html_text


def save_view(
    element: str, start: str, scripts: tuple[Script, ...], path: str | Path, *, size: str, title: str
) -> Path:
    """Writes a view from its `element` and the line of script, `start`, that draws it; see `View.save_figure`.

    Canvases become images in the file, with four pixels per pixel of the screen along each side. Poppler's `pdftocairo`
    makes an SVG from the PDF.
    """
    target, chosen = checked_target(path, size)
    string("title", title)
    if target.suffix.lower() == ".svg" and shutil.which("pdftocairo") is None:
        raise OutputError(
            f"poppler's pdftocairo is needed to write {target} (apt install poppler-utils); or write a .pdf file, "
            "which is vector graphics too."
        )
    heading = f'<p class="title">{html_text(title)}</p>' if title else ""
    main = f'<main class="view">{heading}{element}</main>{carriers(scripts)}<script>{boot()}</script>'
    page_of_view = html_document(title, main, width=f"{chosen.pixels[0]}px", scale=str(chosen.scale))
    most = chosen.most * PIXELS_PER_MM

    def drawn(page: Any) -> Drawn:
        page.set_content(page_of_view)
        page.evaluate(f"() => {start.rstrip(';')}")
        page.emulate_media(media="print", color_scheme="light")
        page.add_script_tag(content=package_text("view_files.js"))
        high = page.evaluate("(most) => attnmechFit(most)", most if chosen.fixed else None)
        height = chosen.most if chosen.fixed else math.ceil(float(high) + 1) / PIXELS_PER_MM
        return Drawn(height, svg=lambda pdf: _svg_of(pdf, target))

    return write_page(target, chosen, drawn)


def _svg_of(pdf: bytes, target: Path) -> bytes:
    """The SVG of a one-page PDF."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "figure.pdf"), Path(folder, "figure.svg")
        source.write_bytes(pdf)
        done = subprocess.run(["pdftocairo", "-svg", str(source), str(made)], capture_output=True, check=False)
        if done.returncode or not made.is_file():
            reason = OSError(done.stderr.decode(errors="replace") or "no reason given")
            raise OutputError(f"pdftocairo failed while writing {target} ({first_line(reason)}).")
        return made.read_bytes()
