"""JSON and server-sent events as bytes, and clients that leave before their answer is complete."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from legato.server.failures import error_body, known

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(data: object) -> bytes:
    """One server-sent event. Only ASCII: some clients take U+2028 or U+0085 for the end of a line."""
    return f"data: {_to_json(data)}\n\n".encode("ascii")


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

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with aclosing(self._events):
            with suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        first = await anext(self._events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            failure = event(error_body(known(error)))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
