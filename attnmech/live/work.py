"""Runs one computation at a time in a thread, and ends those whose answer nobody awaits."""

import asyncio
from collections.abc import Callable
from threading import Event
from time import monotonic
from typing import Final, TypeVar

from starlette.requests import Request

from .session import Step

T = TypeVar("T")

MOST_WAITING: Final = 8
"""The questions that may wait while one is answered."""

_REST: Final = 1.0
"""The seconds after a question before work in the background begins again: the reader's browser draws the answer."""


class Stopped(Exception):
    """Ends work whose answer nobody awaits, or that makes way for a question."""


class Busy(Exception):
    """More questions wait than may."""


class Work:
    """One computation at a time, in a thread; what is measured in the background makes way for questions."""

    def __init__(self) -> None:
        self._running, self._waiting, self._in_background = asyncio.Lock(), 0, Event()
        self._asked = 0.0

    async def answer(self, request: Request, work: Callable[[Step], T]) -> T:
        """The answer to a question; raises `Busy` if too many wait, and `Stopped` if the caller leaves."""
        if self._waiting > MOST_WAITING:
            raise Busy
        gone = Event()
        watching = asyncio.create_task(_watch(request, gone))
        self._waiting += 1
        self._in_background.set()
        try:
            async with self._running:
                return await asyncio.to_thread(work, _step(gone))
        finally:
            gone.set()
            watching.cancel()
            self._waiting -= 1
            self._asked = monotonic()

    async def measure(self, work: Callable[[Step], None], tell: Step, gone: Event) -> None:
        """Works in the background until it is done or `gone`; begins again after a question."""
        while not gone.is_set():
            async with self._running:
                if not self._waiting and monotonic() - self._asked > _REST:
                    self._in_background = Event()
                    try:
                        return await asyncio.to_thread(work, _step(gone, self._in_background, tell=tell))
                    except Stopped:
                        pass
            await asyncio.sleep(0.1)


def _step(*ends: Event, tell: Step = lambda _: None) -> Step:
    def step(message: str) -> None:
        if any(end.is_set() for end in ends):
            raise Stopped
        tell(message)

    return step


async def _watch(request: Request, gone: Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()
