"""Makes a picture of a page; needs playwright and Chromium.

python examples/picture.py report.html examples/report.png
python examples/picture.py atlas/index.html docs/_static/atlas.png '#layer=18&head=6'
"""

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"


def small(picture: bytes, *, width: int | None = None, height: int | None = None, colours: int = 256) -> bytes:
    """A PNG in a few colours, scaled down to a width and cut at a height."""
    image, written = Image.open(io.BytesIO(picture)).convert("RGB"), io.BytesIO()
    image.thumbnail((width or image.width, image.height), Image.Resampling.LANCZOS)
    image = image.crop((0, 0, image.width, min(image.height, height or image.height)))
    few = image.quantize(colours, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(written, "PNG", optimize=True)
    return written.getvalue()


if __name__ == "__main__":
    page_file, target, *address = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(f"{Path(page_file).resolve().as_uri()}{''.join(address)}")
        page.wait_for_selector("html[data-whole]", state="attached")
        page.wait_for_load_state("networkidle")
        Path(target).write_bytes(small(page.screenshot()))
