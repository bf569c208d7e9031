"""A view, a result and pages in JupyterLab and Notebook: live, after a reload, and where they are not trusted."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from attnmech.pages.result import UNTRUSTED

pytestmark = pytest.mark.browser

CELLS = (
    "import attnmech as am; model = am.load(); text = 'When Anna and Tom came to the harbour, Tom gave a shell to'",
    "model.run(text, points=['pattern']).show('pattern', layer=2, head=6, view='sentence')",
    "am.attention_focus(model, text)",
    "am.report(model, text)",
    "view = am.explore(model, 'The keys to the old box'); view.edit = [(2, 6, 'zero')]; view",
)
REPORT = "iframe[title='attnmech report']"
LIVE = "iframe[title='attnmech explorer']"


@pytest.fixture(
    params=[("jupyterlab", "lab/tree"), pytest.param(("notebook", "notebooks"), marks=pytest.mark.slow)],
    ids=["JupyterLab", "Notebook"],
)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a folder's notebooks; the program keeps its own files in another folder."""
    module, pages = request.param
    home = {f"JUPYTER_{name}_DIR": str(tmp_path / "home" / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    (tmp_path / "notebooks").mkdir()
    options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *options, "--IdentityProvider.token=secret"],
        cwd=tmp_path / "notebooks",
        env=os.environ | home | {"IPYTHONDIR": str(tmp_path / "home" / "ipython")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        address = next(found for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        yield f"{address.group()}/{pages}"
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:  # on a busy machine, its kernels end slowly
            process.kill()
            process.communicate()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """A tab that reaches this machine and nothing else."""
    context = chromium.browser.new_context(viewport={"width": 1300, "height": 1000})
    context.route(re.compile(r"^https?://(?!127\.0\.0\.1)"), lambda route: route.abort())
    yield context.new_page()
    context.close()


def test_what_a_cell_returns_is_shown(server: str, browser: Any, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = tmp_path / "notebooks" / "live.ipynb"
    nbformat.write(notebook, path)

    browser.goto(f"{server}/live.ipynb?token=secret&reset")
    browser.click(".jp-Notebook .jp-Cell >> nth=0", timeout=60_000)
    browser.click("text=Run >> nth=0")
    browser.click("text=Run All Cells")
    assert_shown(browser)
    browser.frame_locator(REPORT).locator(".heads-cell >> nth=9").click()
    assert browser.frame_locator(REPORT).locator("#head-name").inner_text() == "L1H1"
    answer = browser.frame_locator(LIVE).locator("#edit-result .finding >> nth=0")
    assert answer.inner_text(timeout=60_000).startswith("If z of L2H6 becomes 0, the model writes")

    browser.keyboard.press("Escape")
    browser.click(".jp-Notebook .jp-Cell >> nth=0")
    browser.keyboard.press("Control+s")
    while (copied := whole(path)) is None or not all(cell.outputs for cell in copied.cells[1:]):
        browser.wait_for_timeout(200)
    browser.reload()
    assert_shown(browser)

    copied.cells[1].source += "  # changed outside the program, which trusts what it signed"
    nbformat.write(copied, tmp_path / "notebooks" / "copied.ipynb")
    browser.goto(f"{server}/copied.ipynb?reset")
    browser.wait_for_selector(f"text={UNTRUSTED}", timeout=60_000)
    assert browser.locator(REPORT).count() == 0
    outputs = " ".join(browser.locator(".jp-OutputArea-output").all_inner_texts())
    assert "This view needs JavaScript; in a notebook, run its cell." in outputs
    assert "the highest score of a row falls on" in outputs


def whole(path: Path) -> Any:
    """The notebook in a file; None while the file is being written."""
    try:
        return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except nbformat.reader.NotJSONError:
        return None


def assert_shown(browser: Any) -> None:
    """The view has lines, the result a drawn figure, and the report a page that is ready."""
    browser.wait_for_selector(REPORT, timeout=120_000)
    browser.frame_locator(REPORT).locator("html[data-ready]").wait_for(state="attached", timeout=60_000)
    browser.wait_for_selector(".attnmech-sentence .attnmech-finding:not(:empty)", state="attached")
    browser.wait_for_selector(".main-svg", state="attached")
