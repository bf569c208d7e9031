"""Serves the live page over HTTP, behind a token in its address."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from threading import Event
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..errors import AttnmechError, InputError
from .edits import Edits
from .session import Session
from .work import Busy, Stopped, Work

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_ASKED: Final = ("edit", "save")
MOST_BYTES: Final = 100_000
"""The largest question."""
_ALIVE: Final = 2.0
"""The seconds after which a stream of events shows that it is alive, and learns whether its reader is."""
_KEPT: Final = "private, max-age=86400, immutable"
"""What the browser may do with a script, whose name has its hash."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Pages:
    """The page and its questions, under /TOKEN/."""

    def __init__(self, session: Session, token: str) -> None:
        self._session, self._token, self._work = session, token.encode(), Work()
        self._measuring = set[asyncio.Task[None]]()

    def routes(self) -> list[Route]:
        answered = {
            "": self._page,
            "events": self._events,
            "edit": self._edit,
            "save": self._save,
            "scripts/{name}": self._script,
        }
        return [
            Route(f"/{{token}}/{name}", self._guarded(handler), methods=["POST" if name in _ASKED else "GET"])
            for name, handler in answered.items()
        ]

    def _guarded(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            if not hmac.compare_digest(request.path_params["token"].encode(), self._token):
                return _refusal(404, "there is nothing here; use the whole address that attnmech serve printed.")
            origin = request.headers.get("origin")
            if origin is not None and origin != f"http://{request.headers.get('host')}":
                return _refusal(403, "questions must come from the page itself.")
            try:
                response = await handler(request)
            except Busy:
                return _refusal(503, "busy: other questions are being answered; ask again in a moment.")
            except AttnmechError as error:
                return _refusal(400, str(error))
            except (Stopped, ClientDisconnect):
                return Response(status_code=204)
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return checked

    async def _page(self, request: Request) -> Response:
        text = self._text_of(request)
        page = await self._work.answer(request, lambda step: self._session.page(text, "server", step=step))
        return HTMLResponse(page)

    async def _script(self, request: Request) -> Response:
        script = self._session.scripts.get(request.path_params["name"])
        if script is None:
            return _refusal(404, "there is no such script; load the page again.")
        return Response(script, media_type="text/javascript", headers={"Cache-Control": _KEPT})

    async def _edit(self, request: Request) -> Response:
        asked = await _asked(request)
        text, edits = asked.get("text"), Edits.of(asked)
        return JSONResponse(await self._work.answer(request, lambda step: self._session.compare(text, edits, step)))

    async def _save(self, request: Request) -> Response:
        asked = await _asked(request)
        text, start = asked.get("text"), str(asked.get("start", ""))
        edits = Edits.of(asked["edit"]) if asked.get("edit") else None
        saved = await self._work.answer(request, lambda step: self._session.saved(text, start, edits, step))
        return JSONResponse({"html": saved})

    async def _events(self, request: Request) -> Response:
        """What is being measured, as server-sent events; it is measured while somebody listens."""
        return StreamingResponse(self._stages(self._text_of(request)), media_type="text/event-stream")

    async def _stages(self, text: str) -> AsyncIterator[str]:
        messages, gone, loop = asyncio.Queue[dict[str, Any]](), Event(), asyncio.get_running_loop()

        def tell(step: str) -> None:
            loop.call_soon_threadsafe(messages.put_nowait, {"step": step})

        async def measure() -> None:
            try:
                await self._work.measure(lambda step: self._session.measure(text, step), tell, gone)
                messages.put_nowait({"whole": True})
            except AttnmechError as error:
                messages.put_nowait({"error": str(error)})

        task = asyncio.create_task(measure())
        self._measuring.add(task)
        task.add_done_callback(self._measuring.discard)
        message: dict[str, Any] = {"step": "waiting"}
        try:
            while "step" in message:
                try:
                    message = await asyncio.wait_for(messages.get(), _ALIVE)
                    yield f"data: {json.dumps(message)}\n\n"
                except TimeoutError:
                    yield ": alive\n\n"
        finally:
            gone.set()

    def _text_of(self, request: Request) -> str:
        return request.query_params.get("text", self._session.first).replace("\r\n", "\n")


async def _asked(request: Request) -> dict[str, Any]:
    """The JSON object of a question."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise InputError(f"a question has at most {MOST_BYTES:,} bytes.")
    try:
        asked = json.loads(content)
    except ValueError as error:
        raise InputError("a question is a JSON object.") from error
    if not isinstance(asked, dict):
        raise InputError("a question is a JSON object.")
    return asked


def _refusal(status: int, error: str) -> Response:
    return JSONResponse({"error": error}, status_code=status, headers=_HEADERS)


def app_of(session: Session, token: str, hosts: Sequence[str]) -> Starlette:
    """The server's application; requests must name one of the hosts."""
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return Starlette(routes=_Pages(session, token).routes(), middleware=[guard])


def serve(session: Session, token: str, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves http://HOST:PORT/TOKEN/ until Ctrl-C; `ready` is told the address."""
    hosts = ["127.0.0.1", "localhost", "[::1]"] if host in LOOPBACK else ["*"]
    config = uvicorn.Config(app_of(session, token, hosts), host=host, port=port, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    socket.listen()
    ready(f"http://{host}:{socket.getsockname()[1]}/{quote(token)}/")
    server.run(sockets=[socket])
