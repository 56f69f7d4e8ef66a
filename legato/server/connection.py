"""One client's connection: uvicorn's, with limits that it does not have.

A request's head may be only so long, and head and body have to come in a given time; a connection that never
asks anything is closed like one that asks nothing more, and a client that takes nothing of what is sent to it
is dropped. A client that is answered before it has sent everything can read the answer. None of it costs
anything for each token that is sent.

Who offers another protocol (Java's client does, with every request) is answered in this one.
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
from legato.server.failures import error_body
from legato.server.http10 import UnchunkedCycle

MAX_HEAD_BYTES = 65_536
"""Request line and headers, or what follows a body."""
CLOSED_AT_ONCE = 16
"""Idle connections that make room for new ones."""


class Connection(HttpToolsProtocol):
    """Made by uvicorn, which gives all arguments but the first two: seconds."""

    def __init__(self, send_timeout: float, receive_timeout: float, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._send_timeout = send_timeout
        self._receive_timeout = receive_timeout
        self._receiving: asyncio.TimerHandle | None = None
        """While a request is not complete."""
        self._head_bytes = 0
        """That came since the last byte of a body."""
        self._ended = False
        """Whether all that still comes is dropped."""
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def idle_until(self) -> float | None:
        """When it is closed if nothing comes, on the event loop's clock; None while something is received or
        answered."""
        timer = self.timeout_keep_alive_task
        return None if timer is None or self._receiving is not None else timer.when()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        if self._receiving is None:
            self._receiving = self.loop.call_later(self._receive_timeout, self._too_slow)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse("400 Bad Request", "this is not HTTP/1.1")
        if self._head_bytes > MAX_HEAD_BYTES and not (self._ended or self.transport.is_closing()):
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
        # The answer's end may close the connection: that is up to us.
        close = partial(self._end, self.cycle)
        self.cycle.transport = SimpleNamespace(  # type: ignore[assignment]
            write=self.transport.write, is_closing=self.transport.is_closing, close=close
        )

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        self._received()
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]

    def _without_upgrade(self) -> bytes:
        """The head of a request without its offer of another protocol, for a parser that knows nothing of it:
        the old one would take a body for the other protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("an offer that cannot be left out")
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return b"\r\n".join([*lines, b"", b""])

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _too_slow(self) -> None:
        self._receiving = None
        cycle = self.cycle
        if self._ended:
            self.transport.close()
        elif cycle is not None and not cycle.response_complete and not cycle.more_body:
            # Another request is being answered, which this one waits for.
            self._receiving = self.loop.call_later(self._receive_timeout, self._too_slow)
        elif cycle is not None and cycle.response_complete and cycle.more_body:
            self.transport.close()  # the rest of a body that was refused
        else:
            limit = f"{self._receive_timeout:g} s"
            self._refuse("408 Request Timeout", f"the request took more than {limit} to come")

    def _refuse(self, status: str, message: str) -> None:
        """Answer what never became a request, and close the connection. An answer under way is cut off."""
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
        """Close, after the answer to `cycle`. A client that may still send gets time to read it: to close
        with bytes unread is to reset, which takes from it what it has not read (RFC 9112, 9.6)."""
        if cycle is not None and not cycle.more_body:
            self.transport.close()
            return
        self._ended = True
        self.flow.resume_reading()
        with suppress(OSError):  # the client is gone already
            self.transport.write_eof()
        if self._receiving is None:
            self._receiving = self.loop.call_later(self._receive_timeout, self._too_slow)

    def pause_writing(self) -> None:
        """More waits to be sent than the connection may hold."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._received()
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


def close_idle(connections: Iterable[Connection]) -> int:
    """Close the connections that have been idle for longest, some at most; how many were closed. Clients
    have to expect that of any connection, and ask again on a new one (RFC 9112, 9.3.1)."""
    idle = [(until, id(each), each) for each in connections if (until := each.idle_until) is not None]
    longest = nsmallest(CLOSED_AT_ONCE, idle)
    for _, _, connection in longest:
        connection.transport.close()
    return len(longest)
