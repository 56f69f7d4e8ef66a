"""Limits on request bodies: the size of each, its encoding, and the bytes of all of them together."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.errors import BodyTooLargeError, MediaTypeError, QueueFullError
from legato.server.transport.errors import error_response

RETRY_AFTER_S = 1
SMALL_SHARE = 1 / 1024
"""Each body may always hold this share of `max_bytes`, so that a few connections that never end their bodies
cannot keep out all others."""


class BodyLimitMiddleware:
    """Refuses a body that is too large: unread if Content-Length says so, otherwise as soon as it is too
    long.

    A compressed body is refused unread, because it could expand to any size.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if any(coding.lower() not in ("", "identity") for coding in _codings(headers)):
            error = MediaTypeError("the body has a Content-Encoding; only uncompressed bodies are supported")
            await error_response(error, headers={"Accept-Encoding": "identity"})(scope, receive, send)
            return
        length = headers.get("Content-Length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_bytes):
            await error_response(self._too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body has more than {self._max_bytes} bytes, the most possible")


def _codings(headers: Headers) -> list[str]:
    return [coding.strip() for value in headers.getlist("Content-Encoding") for coding in value.split(",")]


class BodyMemoryMiddleware:
    """Limits the bytes of all request bodies that the server holds at once.

    A body counts from its first byte to the first byte of the response: until then its text is in memory, and
    its tokens are not in the queue yet. Only received bytes count, not announced ones.
    """

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
            is_small = held <= SMALL_SHARE * self._max_bytes
            if new and not is_small and self._held > self._max_bytes and self._held > held:
                raise QueueFullError(
                    f"request bodies take {self._held} bytes, at most {self._max_bytes} are possible",
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
