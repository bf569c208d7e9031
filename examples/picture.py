"""Makes a picture of a page; needs playwright and Chromium.

python examples/picture.py report.html examples/report.png
python examples/picture.py atlas/index.html docs/_static/atlas.png '#layer=18&head=6'
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"

if __name__ == "__main__":
    page_file, picture, *address = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(f"{Path(page_file).resolve().as_uri()}{''.join(address)}")
        page.wait_for_selector("html[data-whole]", state="attached")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=picture)
