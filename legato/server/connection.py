"""One client's connection: uvicorn's, with limits that it does not have.

A request's head may be only so long, a connection on which no request comes, or no rest of one, is closed
like one that asks nothing more, and a client that takes nothing of what is sent to it is dropped. A client
that is answered before it has sent everything can read the answer. None of it costs anything for each token
that is sent.
"""

import asyncio
import json
import socket
import struct
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from legato.errors import RequestError
from legato.server.failures import error_body

MAX_HEAD_BYTES = 65_536
"""Request line and headers, or what follows a body."""


class Connection(HttpToolsProtocol):
    """Made by uvicorn, which gives all arguments but the first: seconds."""

    def __init__(self, send_timeout: float, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._send_timeout = send_timeout
        self._head_bytes = 0
        """That came since the last byte of a body."""
        self._ended = False
        """Whether all that still comes is dropped."""
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_more()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._ended or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                "431 Request Header Fields Too Large",
                f"the head of the request has more than {MAX_HEAD_BYTES} bytes, the most possible",
            )
        elif not self.pipeline and (
            self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        ):
            self._await_more()

    def _await_more(self) -> None:
        """For as long as an idle connection stays open. The next bytes end the wait."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # The answer's end may close the connection: that is up to us.
        close = partial(self._end, self.cycle)
        self.cycle.transport = SimpleNamespace(  # type: ignore[assignment]
            write=self.transport.write, is_closing=self.transport.is_closing, close=close
        )

    def _end(self, cycle: RequestResponseCycle | None) -> None:
        """Close, after the answer to `cycle`. A client that may still send gets time to read it: to close
        with bytes unread is to reset, which takes from it what it has not read (RFC 9112, 9.6)."""
        if cycle is not None and not cycle.more_body:
            self.transport.close()
            return
        self._ended = True
        self.flow.resume_reading()
        with suppress(OSError):  # the client is gone already
            self.transport.write_eof()
        self._await_more()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, message: str) -> None:
        """Answer what never became a whole request, and close the connection."""
        cycle = self.cycle
        if self.pipeline or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.close()  # nothing may stand amid another answer
            return
        body = json.dumps(error_body(RequestError(message)))
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self._end(None)

    def pause_writing(self) -> None:
        """More waits to be sent than the connection may hold."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self, num_unsent: int) -> None:
        self._stalled = self.loop.call_later(self._send_timeout, self._drop_if_stalled, num_unsent)

    def _unwatch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _drop_if_stalled(self, num_before: int) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent < num_before:
            self._watch(num_unsent)
        else:
            # With a reset: what the kernel has for the client goes too.
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
