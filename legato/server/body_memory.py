"""Limits the bytes of all request bodies that the server holds at once."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.errors import QueueFullError

RETRY_AFTER_S = 1
SMALL = 1 / 1024
"""Share of `max_bytes` that each body may always have: a few connections that never end their bodies must not
keep others out."""


class BodyMemory:
    """ASGI middleware. A body counts from its first byte to the first byte of the answer: so long its text
    is kept, its tokens perhaps not yet. Bytes count as they come; what a client only announces does not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            new = len(message.get("body", b""))
            held += new
            self._held += new
            is_small = held <= SMALL * self._max_bytes
            if new and not is_small and self._held > self._max_bytes and self._held > held:
                raise QueueFullError(
                    f"{self._held} bytes of request bodies are in work, at most {self._max_bytes} may be",
                    retry_after_s=RETRY_AFTER_S,
                )
            return message

        def release() -> None:
            nonlocal held
            self._held -= held
            held = 0

        async def releasing(message: Message) -> None:
            release()
            await send(message)

        try:
            await self._app(scope, counted, releasing)
        finally:
            release()
