"""A real browser without a network, and a page opened in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")

WHOLE: dict[str, Any] = {"height": 24000, "ready": "html[data-whole]"}
"""A screen so high that every figure of a report is in sight, and drawn."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    missing = [
        name for name, there in (("playwright", find_spec("playwright")), (CHROMIUM, CHROMIUM.exists())) if not there
    ]
    if missing:
        # Where the checks promise a browser, its absence is a failure.
        assert "ATTNMECH_NEEDS_BROWSER" not in os.environ, f"not installed: {missing}"
        pytest.skip(f"not installed: {missing}")
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(CHROMIUM),
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
            ],
        )
        yield browser
        browser.close()


@contextmanager
def opening(
    chromium: Any,
    html: str,
    path: Path,
    *,
    width: int = 1280,
    height: int = 720,
    ready: str = "body",
    address: str = "",
) -> Iterator[Any]:
    """A page in an offline browser, once `ready` matches; fails where it logs an error, throws, or asks for anything
    but itself."""
    path.write_text(html, "utf-8")
    complaints: list[str] = []
    context = chromium.new_context(offline=True, viewport={"width": width, "height": height})

    def only_the_file(route: Any) -> None:
        if route.request.url.startswith(path.as_uri()):
            route.continue_()
        else:
            complaints.append(f"request for {route.request.url}")
            route.abort()

    context.route("**/*", only_the_file)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri() + address)
    page.wait_for_selector(ready, state="attached")
    yield page
    context.close()
    assert complaints == [], complaints
