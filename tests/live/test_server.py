"""The live page's server: who may ask, one computation at a time, and a page that reads, edits and saves."""

import json
import re
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
import torch
import uvicorn
from browser import opening

import attnmech as am
from attnmech.live.server import MOST_BYTES, app_of
from attnmech.live.session import Session

FIRST = "Anna gave an old anchor to Tom."
SECOND = "The keys to the old box"
TOKEN = "token-of-the-test"
ZERO = {"text": FIRST, "heads": [[2, 6, "zero"]]}


@pytest.fixture
def url(demo: am.HookedModel) -> Iterator[str]:
    with serving(Session(demo, FIRST)) as address:
        yield address


@contextmanager
def serving(session: Session) -> Iterator[str]:
    config = uvicorn.Config(app_of(session, TOKEN, ["127.0.0.1"]), port=0, log_level="warning")
    server, socket = uvicorn.Server(config), config.bind_socket()
    socket.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{socket.getsockname()[1]}/{TOKEN}/"
    server.should_exit = True
    thread.join(30)


def asked(url: str, kind: str = "", body: Any = None, **headers: str) -> tuple[int, str]:
    address = urlsplit(url)
    connection = HTTPConnection(address.netloc, timeout=120)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", address.path + kind, content, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_only_the_page_may_ask(url: str) -> None:
    assert asked(url.replace(TOKEN, "token-of-another"))[0] == 404 and asked(url, Host="evil.example")[0] == 400
    assert asked(url, "edit", ZERO, Origin="http://evil.example")[0] == 403
    bodies: list[Any] = [b"no JSON", b"[1]", b"{}", b'{"text": "\\ud800", "heads": [[2, 6, "zero"]]}']
    for body in [*bodies, {**ZERO, "text": "x" * 5000}, {**ZERO, "heads": [[2, 99, "zero"]]}, b" " * (MOST_BYTES + 1)]:
        status, error = asked(url, "edit", body)
        assert status == 400 and json.loads(error)["error"].endswith(".")
    assert asked(url, "?" + urlencode({"text": "x" * 5000}))[0] == 400
    status, answer = asked(url, "edit", ZERO, Origin=url.removesuffix(f"/{TOKEN}/"))
    assert status == 200 and json.loads(answer)["sentences"][0].startswith("If z of L2H6 becomes 0, the model writes")


def test_the_page_links_to_its_scripts_which_a_browser_may_keep(url: str) -> None:
    links = re.findall(r'data-attnmech="([\w-]+)" href="(scripts/[\w-]+)" integrity="sha256-([^"]+)"', asked(url)[1])
    assert [name.split("-")[0] for name, *_ in links] == ["attnmech", "heads", "plotly", "circuitsvis"]
    for name, address, digest in links:
        status, script = asked(url, address)
        assert status == 200 and address.endswith(name)
        assert b64encode(sha256(script.encode()).digest()).decode() == digest
    assert asked(url, "scripts/plotly-00000000")[0] == 404


def test_many_clients_are_answered_or_refused_once(url: str, demo: am.HookedModel) -> None:
    before, answers = demo.run(FIRST).logits, list[int]()
    clients = [threading.Thread(target=lambda: answers.append(asked(url, "edit", ZERO)[0])) for _ in range(30)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    assert len(answers) == 30 and set(answers) == {200, 503}
    assert torch.equal(demo.run(FIRST).logits, before) and demo.interventions == ()


class Slow(Session):
    """A session that measures for ever, and says when it stopped."""

    def __init__(self, model: am.HookedModel) -> None:
        super().__init__(model, FIRST)
        self.begun, self.stopped = list[str](), list[str]()

    def measure(self, text: str, step: Any = None) -> None:
        self.begun.append(text)
        try:
            while True:
                time.sleep(0.02)
                step("measuring")
        finally:
            self.stopped.append(text)


def test_work_makes_way_and_ends_with_its_tab(demo: am.HookedModel) -> None:
    session = Slow(demo)
    with serving(session) as url:
        address = urlsplit(url)
        tab = HTTPConnection(address.netloc, timeout=30)
        tab.request("GET", address.path + "events")
        events = tab.getresponse()
        assert b"measuring" in events.readline()
        assert asked(url, "edit", ZERO)[0] == 200 and session.stopped == [FIRST]
        while not session.begun[1:]:
            time.sleep(0.02)
        events.close()
        tab.close()
        while not session.stopped[1:]:
            time.sleep(0.02)


@pytest.mark.browser
def test_a_reader_types_a_text_and_clicks_a_head_away(url: str, chromium: Any, tmp_path: Path) -> None:
    context = chromium.browser.new_context(accept_downloads=True)
    page, wanted, complaints = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: wanted.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.fill("#live-text", SECOND)
    page.press("#live-text", "Enter")
    page.wait_for_url("**text=The+keys**")
    page.wait_for_selector("html[data-ready]")
    assert page.inner_text("#tokens").split()[1:4] == ["The", "·keys", "·to"]
    page.click(".heads-cell >> nth=9")
    page.click("#edit-head [data-way=zero]")
    page.wait_for_selector("#edit-result table")
    told = page.inner_text("#edit-result .finding >> nth=0")
    assert told.startswith("If z of L1H1 becomes 0, ") and "edit=L1H1-zero" in page.url
    page.reload()
    page.wait_for_selector("#edit-result table")
    assert page.inner_text("#edit-result .finding >> nth=0") == told
    with page.expect_download() as saved:
        page.click("#live-save")
    html = Path(saved.value.path()).read_text("utf-8")
    page.click("#edit-head [data-way=patch]")
    page.wait_for_selector("#edit-status:has-text('Type another prompt')")
    page.fill("#edit-prompt", "The keys to the new box")
    page.press("#edit-prompt", "Tab")
    page.wait_for_selector("#edit-result p:has-text('becomes that of')")
    page.go_back()
    page.go_back()
    page.wait_for_selector("#edit-heads:has-text('zero')")
    page.wait_for_selector("#awaited", state="detached", timeout=120_000)
    page.wait_for_selector("html[data-ready]")
    assert page.inner_text("#head-name") == "L1H1"
    assert complaints == [] and all(one.startswith(("http://127.0.0.1", "blob:", "data:")) for one in wanted)
    context.close()
    with opening(chromium, html, tmp_path / "saved.html", ready="#edit-result table") as offline:
        assert offline.inner_text("#head-name") == "L1H1" and told in offline.inner_text("#edit-result")
