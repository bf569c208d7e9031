"""Makes `report.png`, the picture in the README: a head of the demo model on the report's page.

Needs playwright and Chromium: `python examples/report_picture.py`.
"""

import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import attnmech as am
from attnmech.demo.text import PARAGRAPH

CHROMIUM = "/usr/bin/chromium"
LAYER, HEAD, QUERY = 2, 6, 60

with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    page_file = am.report(am.load(), PARAGRAPH).write_html(Path(folder) / "report.html")
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(f"{page_file.as_uri()}#layer={LAYER}&head={HEAD}&rank=0&query={QUERY}")
    page.wait_for_selector("html[data-whole]", state="attached")
    page.wait_for_load_state("networkidle")
    page.screenshot(path=Path(__file__).with_name("report.png"))
