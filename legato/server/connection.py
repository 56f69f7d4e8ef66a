"""One client's connection: uvicorn's, with limits that it does not have.

A request's head may be only so long, and head and body have to come in a given time; a connection that never
asks anything is closed like one that asks nothing more, and a client that takes nothing of what is sent to it
is dropped. None of it costs anything for each token that is sent.

Who offers another protocol (Java's client does, with every request) is answered in this one.
"""

import asyncio
import json
import socket
import struct
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from legato.errors import RequestError
from legato.server.failures import error_body

MAX_HEAD_BYTES = 65_536
"""Request line and headers, or what follows a body."""
RECEIVE_S = 120.0
"""From a request's first byte to its last."""


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
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        if self._receiving is None:
            self._receiving = self.loop.call_later(self._receive_timeout, self._drop_if_idle)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse("400 Bad Request", "this is not HTTP")
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                "431 Request Header Fields Too Large",
                f"the head of the request has more than {MAX_HEAD_BYTES} bytes, the most possible",
            )

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        self._received()
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes what follows the head for another protocol: it is told the head without that.
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("not for us") from None
            lines = [b"%s %s HTTP/1.1" % (method, self.url)]
            lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join([*lines, b"", data[upgrade.args[0] :]]))

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _drop_if_idle(self) -> None:
        """The time for a request to come is over. One that is being answered meanwhile is not disturbed."""
        self._receiving = None
        answering = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        if answering:
            self._receiving = self.loop.call_later(self._receive_timeout, self._drop_if_idle)
        else:
            self._refuse("408 Request Timeout", f"the request did not come within {self._receive_timeout:g} s")

    def _refuse(self, status: str, message: str) -> None:
        """Answer what never became a request, and close the connection. An answer under way is cut off."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps(error_body(RequestError(message)))
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
        self.transport.close()

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
