"""One client's HTTP connection: uvicorn's protocol with limits that uvicorn does not have.

- The head of a request is limited in size, and head and body must arrive within a given time.
- A connection that never sends a request is closed like one that sends no further request.
- A client that reads nothing of what is sent to it is dropped.
- A client that gets its response before it has sent everything can read the response.
- A request that offers another protocol (Java's client does so every time) is answered in HTTP/1.1.

None of this costs anything per token.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from heapq import nsmallest
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from legato.errors import RequestError
from legato.server.transport.errors import error_body
from legato.server.transport.http10 import UnchunkedCycle

MAX_HEAD_BYTES = 65_536
"""The most bytes of the request line and the headers, or of what follows a body."""
MAX_CLOSED_IDLE = 16
"""The most idle connections that are closed at once to make room for new ones."""


class Connection(HttpToolsProtocol):
    """Created by uvicorn, which passes all arguments but the first two."""

    def __init__(self, send_timeout: float, receive_timeout: float, *args: Any, **others: Any) -> None:
        """Both timeouts are in seconds."""
        super().__init__(*args, **others)
        self._send_timeout = send_timeout
        self._receive_timeout = receive_timeout
        self._receive_timer: asyncio.TimerHandle | None = None
        """Set while a request is incomplete."""
        self._head_bytes = 0
        """Bytes received since the last byte of a body."""
        self._is_ending = False
        """Whether everything that still arrives is dropped."""
        self._send_timer: asyncio.TimerHandle | None = None
        """Set while the client does not read."""

    @property
    def idle_until(self) -> float | None:
        """When the connection is closed if nothing arrives, on the event loop's clock. None while a request
        is received or answered."""
        timer = self.timeout_keep_alive_task
        return None if timer is None or self._receive_timer is not None else timer.when()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(self._receive_timeout, self._receive_timed_out)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse("400 Bad Request", "this is not HTTP/1.1")
        if self._head_bytes > MAX_HEAD_BYTES and not (self._is_ending or self.transport.is_closing()):
            self._refuse(
                "431 Request Header Fields Too Large",
                f"the head of the request has more than {MAX_HEAD_BYTES} bytes, the most possible",
            )

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UnchunkedCycle
        # The end of the response may close the connection. `_end` decides how.
        close = partial(self._end, self.cycle)
        self.cycle.transport = SimpleNamespace(  # type: ignore[assignment]
            write=self.transport.write, is_closing=self.transport.is_closing, close=close
        )

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        self._stop_receive_timer()
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]

    def _without_upgrade(self) -> bytes:
        """The head of a request without its Upgrade header, for a new parser.

        The old parser would treat the body as data of the other protocol.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not supported")
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join([*lines, b"", b""])

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _receive_timed_out(self) -> None:
        self._receive_timer = None
        cycle = self.cycle
        if self._is_ending:
            self.transport.close()
        elif cycle is not None and not cycle.response_complete and not cycle.more_body:
            # The request waits for the response to an earlier one: start again.
            self._receive_timer = self.loop.call_later(self._receive_timeout, self._receive_timed_out)
        elif cycle is not None and cycle.response_complete and cycle.more_body:
            self.transport.close()  # The rest of a refused body did not arrive.
        else:
            limit = f"{self._receive_timeout:g} s"
            self._refuse("408 Request Timeout", f"the request took more than {limit} to arrive")

    def _refuse(self, status: str, message: str) -> None:
        """Answer what is not a complete request, and close the connection. Cuts off a response in
        progress."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps(error_body(RequestError(message)))
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._end(None)

    def _end(self, cycle: RequestResponseCycle | None) -> None:
        """Close the connection after the response to `cycle`.

        A client that may still send gets time to read the response. Closing with unread bytes would reset the
        connection and discard what the client has not read (RFC 9112, section 9.6).
        """
        if cycle is not None and not cycle.more_body:
            self.transport.close()
            return
        self._is_ending = True
        self.flow.resume_reading()
        with suppress(OSError):  # The client has disconnected.
            self.transport.write_eof()
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(self._receive_timeout, self._receive_timed_out)

    def pause_writing(self) -> None:
        """The send buffer is above its high-water mark."""
        super().pause_writing()
        self._start_send_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_send_timer()
        self._stop_receive_timer()
        super().connection_lost(exc)

    def _start_send_timer(self, num_unsent: int) -> None:
        self._send_timer = self.loop.call_later(self._send_timeout, self._drop_if_stalled, num_unsent)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _drop_if_stalled(self, num_before: int) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent < num_before:
            self._start_send_timer(num_unsent)
        else:
            # Reset the connection, so that the kernel drops its send buffer too.
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


def close_idle(connections: Iterable[Connection]) -> int:
    """Close the connections that have been idle for longest, at most `MAX_CLOSED_IDLE`. Returns how many.

    Clients must expect this of any connection and repeat their request on a new one (RFC 9112, section
    9.3.1).
    """
    idle = [(until, id(each), each) for each in connections if (until := each.idle_until) is not None]
    longest = nsmallest(MAX_CLOSED_IDLE, idle)
    for _, _, connection in longest:
        connection.transport.close()
    return len(longest)
