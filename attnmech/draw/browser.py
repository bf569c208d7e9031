"""Runs Chromium, or a browser based on it, to draw figures for files, without a window and without a network."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..basics.messages import first_line
from ..errors import AttnmechError, OutputError

VARIABLE: Final = "BROWSER_PATH"
"""The environment variable that names a browser; kaleido reads it too."""

NAMES: Final = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "msedge"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
"""The programs of Chromium and of browsers based on it, to search for in `PATH`."""

PATIENCE: Final = 120_000
"""The time that the browser may take for one step, in milliseconds."""


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
