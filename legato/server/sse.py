"""JSON and server-sent events as bytes, and clients that leave before their answer is complete."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from legato.server.failures import error_body, known

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip: it keeps proxies and impatient clients from closing a silent connection."""

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(data: object) -> bytes:
    """One server-sent event. Only ASCII: some clients take U+2028 or U+0085 for the end of a line."""
    return f"data: {_to_json(data)}\n\n".encode("ascii")


def events_with(head: Mapping[str, object]) -> Callable[[Mapping[str, object]], bytes]:
    """Makes events of `head` and what else there is to say, at least one thing: the head is encoded once."""
    opening = f"data: {_to_json(head)[:-1]},"
    return lambda data: f"{opening}{_to_json(data)[1:]}\n\n".encode("ascii")


class Silence:
    """Calls `tick` each time that nothing was `heard` for `interval` seconds; never if that is 0.

    Costs one timer for all of a stream's events together.
    """

    def __init__(self, interval: float, tick: Callable[[], None]) -> None:
        self._interval, self._tick = interval, tick
        self._loop = asyncio.get_running_loop()
        self.heard()
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        self._last = self._loop.time()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this block."""
        if self._interval:
            self._wait()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self) -> None:
        self._timer = self._loop.call_at(self._last + self._interval, self._look)

    def _look(self) -> None:
        if self._loop.time() >= self._last + self._interval:
            self.heard()
            self._tick()
        self._wait()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, but end it and raise `ClientDisconnect` as soon as the client is gone.

    Frameworks do not do this: without it a reply is computed to its end for nobody. The request's body must
    have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends events as they come.

    The response starts with the first event, so what fails before is an ordinary HTTP error. What fails
    later is an event with an error, and the end of the stream.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], more_headers: Mapping[str, str]) -> None:
        """`more_headers` may be filled until `events` makes its first one."""
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events
        self._more_headers = more_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with aclosing(self._events):
            with suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        first = await anext(self._events)
        self.headers.update(self._more_headers)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            failure = event(error_body(known(error)))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
