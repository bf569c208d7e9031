"""Stores the outputs of the notebooks: text and tables as they are, views and figures as pictures without scripts.

python examples/notebook_outputs.py                    # all of them; or a few: quickstart ablation
"""

import base64
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from picture import CHROMIUM, small
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notebooks import NOTEBOOKS, digest, executed, stored

DRAWN = "[...document.querySelectorAll('div.attnmech[id]')].every(stage => 'control' in stage)"
WIDTH, TALLEST, COLOURS = 640, 560, 32
STILL = ".attnmech-reading, label.attnmech-control { display: none }"  # a picture has no use for them
FOLDER = f"{sysconfig.get_path('purelib')}/"
"""Where packages with models are; left out of names."""


def store(path: Path, page: Page) -> None:
    """Runs a notebook, and writes it with its outputs."""
    notebook = nbformat.reads(nbformat.writes(executed(path.stem)).replace(FOLDER, ""), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs if "<script" in _html(output)]
    for number, output in enumerate(outputs):
        output.data["text/html"] = f'<div id="output-{number}">{output.data["text/html"]}</div>'
    export = HTMLExporter(template_name="lab", mathjax_url="", require_js_url="")
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "notebook.html"
        whole.write_text(export.from_notebook_node(notebook)[0], "utf-8")
        page.goto(whole.as_uri())
        page.wait_for_function(DRAWN)
        page.add_style_tag(content=STILL)
        for number, output in enumerate(outputs):
            picture = small(page.locator(f"#output-{number}").screenshot(), height=TALLEST, colours=COLOURS)
            output.data = {"image/png": base64.b64encode(picture).decode(), "text/plain": output.data["text/plain"]}
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata = {**stored(path.stem).metadata, "attnmech": {"code": digest(notebook)}}
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {len(outputs)} pictures")


def _html(output: Any) -> str:
    return str(output.get("data", {}).get("text/html", ""))


if __name__ == "__main__":
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": 900})
        for notebook in NOTEBOOKS:
            if notebook.stem in (sys.argv[1:] or [path.stem for path in NOTEBOOKS]):
                store(notebook, tab)
