"""Responses in HTTP/1.0, which has no chunked encoding: a body of unknown length ends with the connection."""

import math
from typing import cast

from uvicorn._types import ASGISendEvent, HTTPResponseBodyEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UnchunkedCycle(RequestResponseCycle):
    """uvicorn's own class sends chunks to clients of every HTTP version."""

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
                self.expected_content_length = math.inf  # type: ignore[assignment]
        elif self.expected_content_length == math.inf and not message.get("more_body", False):
            last = cast("HTTPResponseBodyEvent", message)
            self.expected_content_length = len(last.get("body", b""))  # uvicorn expects exactly this rest.
        await super().send(message)
