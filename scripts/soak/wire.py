"""HTTP by hand, for clients that no library would be: every byte, pause and departure is the caller's.

One request for each connection. Knows nothing of what is asked.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

PATIENCE_S = 300.0
"""After it a client that waits for an answer gives up, and that is a fault."""
SMALL = 2_304
"""The least that Linux takes for a socket's receive buffer: what is not read stays with the server."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status 0: the server closed the connection without a word."""

    status: int
    body: bytes


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def line(port: int, *, hesitant: bool = False, reset: bool = False) -> AsyncIterator[Line]:
    """A connection. `hesitant` holds next to nothing that it has not read; `reset` ends it rudely."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    connection.setblocking(False)
    if hesitant:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL if hesitant else 2**16)
    try:
        yield reader, writer
    finally:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()


def request(path: str, body: bytes | None = None) -> bytes:
    """A GET, or a POST if there is a body, after whose answer the connection ends."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(port: int, path: str, body: object = None) -> Answer:
    """One request as it should be, and its whole answer. `body` becomes JSON."""
    return await exchange(port, request(path, None if body is None else json.dumps(body).encode()))


async def exchange(port: int, sent: bytes) -> Answer:
    """Send bytes of any kind and read until the server ends the connection."""
    async with asyncio.timeout(PATIENCE_S), line(port) as (reader, writer):
        writer.write(sent)
        try:
            return parse(await reader.read())
        except ConnectionResetError:
            return Answer(0, b"")


def parse(received: bytes) -> Answer:
    """The (last) answer in what a connection brought."""
    head, _, body = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return Answer(0, received)
    if b"transfer-encoding: chunked" in head.lower():
        body = _joined(body)
    return Answer(int(head[9:12]), body)


def _joined(body: bytes) -> bytes:
    """What the chunks of a body hold; what is cut off is left out."""
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(body[:length])
        body = body[length + 2 :]
    return b"".join(pieces)
