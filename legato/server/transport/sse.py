"""Server-sent events, and the cancellation of work whose client has disconnected.

sse-starlette is not used: it cannot delay the status of a response until the first event.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from legato.server.transport.errors import error_body, to_client_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore. It keeps proxies from closing a connection without data."""

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode_event(data: object) -> bytes:
    """One server-sent event. It is pure ASCII: some clients treat U+2028 or U+0085 as the end of a line."""
    return f"data: {_to_json(data)}\n\n".encode("ascii")


def event_encoder(head: Mapping[str, object]) -> Callable[[Mapping[str, object]], bytes]:
    """A function that encodes events of `head` and at least one more field. The head is encoded only once."""
    opening = f"data: {_to_json(head)[:-1]},"
    return lambda data: f"{opening}{_to_json(data)[1:]}\n\n".encode("ascii")


class Heartbeat:
    """Calls `beat` whenever no event was sent for `interval` seconds. An interval of 0 turns it off.

    All events of a stream share one timer.
    """

    def __init__(self, interval: float, beat: Callable[[], None]) -> None:
        self._interval, self._beat = interval, beat
        self._loop = asyncio.get_running_loop()
        self.sent()
        self._timer: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """An event was sent just now."""
        self._last = self._loop.time()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Beat within this block."""
        if self._interval:
            self._schedule()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_at(self._last + self._interval, self._check)

    def _check(self) -> None:
        if self._loop.time() >= self._last + self._interval:
            self.sent()
            self._beat()
        self._schedule()


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises `ClientDisconnect`.

    Web frameworks do not do this, so a reply would be computed although its client is gone. The body of the
    request must have been read.
    """
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        disconnecting.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(StreamingResponse):
    """Sends events as they are made.

    The response starts with the first event, so an error before it is an ordinary HTTP error. A later error
    is sent as an event and ends the stream.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], more_headers: Mapping[str, str]) -> None:
        """`events` may add to `more_headers` until it yields its first event."""
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
                await cancel_on_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        first = await anext(self._events)
        self.headers.update(self._more_headers)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            failure = encode_event(error_body(to_client_error(error)))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
