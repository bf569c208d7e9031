"""A real browser without a network, and a page opened in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")

WHOLE: dict[str, Any] = {"height": 24000, "address": "#tab=all", "ready": "html[data-whole]"}
"""A screen tall enough to show, and draw, every figure of a report with the sections of all tabs."""


class Chromium:
    """A browser that reuses its tabs: a warm tab opens a file in a third of the time."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.idle: list[Tab] = []

    @contextmanager
    def tab(self) -> Iterator["Tab"]:
        """A blank tab without a history; if the test fails, the tab is closed instead of reused."""
        tab = self.idle.pop() if self.idle else Tab(self.browser)
        try:
            yield tab
        except BaseException:
            tab.page.context.close()
            raise
        tab.clear()
        self.idle.append(tab)


class Tab:
    """A page of an offline browser that may request only one file."""

    def __init__(self, browser: Any) -> None:
        self.address = ""
        self.complaints: list[str] = []
        context = browser.new_context(offline=True)
        context.route("**/*", self._only_the_file)
        self.page = context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self._session = context.new_cdp_session(self.page)
        self.clear()

    def clear(self) -> None:
        """Resets a tab to a new one: no page, no emulation, no pointer position."""
        self.page.goto("about:blank")
        self.page.emulate_media(media="null", color_scheme="null")
        self.page.mouse.move(0, 0)
        self.page.set_default_timeout(30_000)
        self._session.send("Page.resetNavigationHistory")
        self.address, self.complaints = "", []

    def _only_the_file(self, route: Any) -> None:
        if self.address and route.request.url.startswith(self.address):
            route.continue_()
        else:
            self.complaints.append(f"request for {route.request.url}")
            route.abort()

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    missing = [
        name for name, there in (("playwright", find_spec("playwright")), (CHROMIUM, CHROMIUM.exists())) if not there
    ]
    if missing:
        # If the environment promises a browser, its absence is a failure.
        assert "ATTNMECH_NEEDS_BROWSER" not in os.environ, f"not installed: {missing}"
        pytest.skip(f"not installed: {missing}")
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        yield Chromium(browser)
        browser.close()


@contextmanager
def opening(
    chromium: Chromium,
    html: str,
    path: Path,
    *,
    width: int = 1280,
    height: int = 720,
    ready: str = "body",
    address: str = "",
) -> Iterator[Any]:
    """A page in an offline browser, once `ready` matches; fails if it logs an error, throws, or requests anything
    but itself."""
    path.write_text(html, "utf-8")
    with chromium.tab() as tab:
        tab.address = path.as_uri()
        tab.page.set_viewport_size({"width": width, "height": height})
        tab.page.goto(tab.address + address)
        tab.page.wait_for_selector(ready, state="attached")
        yield tab.page
        complaints = tab.complaints
    assert complaints == [], complaints
