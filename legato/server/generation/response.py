"""The HTTP response of a generation request, complete or as a stream, for completions and chat alike.

A route says what to generate (`Generation`) and how to format it (`ResponseFormatter`). This module does the
rest in order: it reserves room in the queue, prepares, submits, and turns deltas into JSON.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from legato.core.events import ProgressEvent
from legato.engine.output_processor import Delta
from legato.server.generation.notices import notice_headers
from legato.server.generation.prompt_log import log_prompts
from legato.server.generation.replies import (
    Generation,
    Replies,
    ReplySlice,
    start_replies,
    timeout_error,
)
from legato.server.schema.bodies import GenerationBody, StreamOptions
from legato.server.service import Service
from legato.server.transport.sse import (
    DONE,
    KEEP_ALIVE,
    EventStreamResponse,
    Heartbeat,
    cancel_on_disconnect,
    event_encoder,
)

Json = dict[str, object]

TOKEN_SIZE = 16
"""Formatting a token with its log-probabilities takes as long as tokenizing this many characters."""


class ResponseFormatter(Protocol):
    """Formats the replies of one request for one endpoint."""

    def chunks(self, index: int, part: ReplySlice, *, first: bool) -> list[Json]:
        """The chunks for the next part of reply `index`: `choices` and the fields beside them. May be
        empty."""
        ...

    def complete(self, replies: Sequence[ReplySlice]) -> Json:
        """`choices` for complete replies, and the fields beside them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseKind:
    """The constants of an endpoint's responses."""

    id_prefix: str
    complete_object: str
    chunk_object: str


@dataclass(slots=True)
class Usage:
    """Token counts. The token that ends a reply counts, in streams and in complete responses alike."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    num_truncated: int | None = None
    """Tokens that were cut off the prompts, if truncation was asked for."""

    def as_json(self) -> Json:
        details = {"cached_tokens": self.num_cached}
        if self.num_truncated is not None:
            details["truncated_tokens"] = self.num_truncated
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": details,
        }


Prepare = Callable[[], Awaitable[tuple[Generation, ResponseFormatter]]]
Start = Callable[[], AbstractAsyncContextManager[Replies]]


async def generation_response(
    service: Service,
    request: Request,
    body: GenerationBody,
    kind: ResponseKind,
    prepare: Prepare,
    *,
    num_replies: int,
) -> Response:
    """The response to a request whose body was read.

    `prepare` may take long and may raise. Room for the replies is reserved in the queue before it runs.
    """
    response_id = f"{kind.id_prefix}-{secrets.token_hex(12)}"
    head: Json = {
        "id": response_id,
        "object": kind.chunk_object if body.stream else kind.complete_object,
        "created": int(time.time()),
        "model": service.model.name,
    }
    prepare = partial(_with_timeout, prepare, body.timeout)
    if body.stream:
        headers: dict[str, str] = {}
        options = body.stream_options or StreamOptions()
        events = _events(service, options, head, response_id, prepare, num_replies, headers)
        return EventStreamResponse(events, headers)
    response = _complete_response(service, head, response_id, prepare, num_replies)
    return await cancel_on_disconnect(request.receive, response)


async def _with_timeout(prepare: Prepare, timeout: float | None) -> tuple[Generation, ResponseFormatter]:
    """The request's timeout includes tokenizing and compiling grammars."""
    try:
        async with asyncio.timeout(timeout):
            return await prepare()
    except TimeoutError:
        raise timeout_error() from None


@asynccontextmanager
async def _prepared(
    service: Service, response_id: str, prepare: Prepare, num_replies: int
) -> AsyncIterator[tuple[Generation, ResponseFormatter, Start]]:
    """The generation request, its formatter, and the function that starts the replies."""
    with service.engine.reserve(num_replies, 0) as reservation:
        generation, formatter = await prepare()
        service.engine.widen(reservation, generation.num_prompt_tokens * generation.n)
        if service.log_prompts:
            log_prompts(service.model.tokenizer, response_id, generation.prompts)
        start = partial(start_replies, service.engine, generation, response_id, reservation, service.turns)
        yield generation, formatter, start


async def _complete_response(
    service: Service, head: Json, response_id: str, prepare: Prepare, num_replies: int
) -> Response:
    async with (
        _prepared(service, response_id, prepare, num_replies) as (generation, formatter, start),
        start() as replies,
    ):
        deltas: list[list[Delta]] = [[] for _ in replies.streams]
        async with aclosing(replies.read()) as items:
            async for item in items:
                if item is not None:
                    deltas[item[0]].append(item[1])
    num_cached = generation.num_cached(replies.streams)

    def format_response() -> Response:
        parts = [ReplySlice.of(deltas_of_one) for deltas_of_one in deltas]
        num_completion = sum(len(part.sampled) for part in parts)
        usage = Usage(generation.num_prompt_tokens, num_completion, num_cached, generation.num_truncated)
        return JSONResponse(
            {**head, **formatter.complete(parts), "usage": usage.as_json()},
            headers=notice_headers(generation.notices),
        )

    # Each reply may contain its prompt.
    num_tokens = sum(map(len, deltas)) + generation.num_prompt_tokens * generation.n
    return await service.work.run(num_tokens * TOKEN_SIZE, format_response)


async def _events(
    service: Service,
    options: StreamOptions,
    head: Json,
    response_id: str,
    prepare: Prepare,
    num_replies: int,
    headers: dict[str, str],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. Fills `headers` before the first event."""
    async with _prepared(service, response_id, prepare, num_replies) as (generation, formatter, start):
        headers.update(notice_headers(generation.notices))
        stream = _EventStream(service, options, head, generation, formatter)
        async with aclosing(stream.events(start)) as events:
            async for event in events:
                yield event


class _EventStream:
    """The events of one streamed response."""

    def __init__(
        self,
        service: Service,
        options: StreamOptions,
        head: Json,
        generation: Generation,
        formatter: ResponseFormatter,
    ) -> None:
        self._service = service
        self._options = options
        self._generation = generation
        self._formatter = formatter
        self._encode = event_encoder(head)
        self._usage = Usage(generation.num_prompt_tokens, num_truncated=generation.num_truncated)
        self._opened: set[int] = set()
        """The replies whose first part was sent."""
        self._pending: defaultdict[int, list[Delta]] = defaultdict(list)
        """Deltas of prompts, by reply. They are sent with the first token of the reply."""

    async def events(self, start: Start) -> AsyncGenerator[bytes, None]:
        async with start() as replies:
            heartbeat = Heartbeat(self._service.sse_keep_alive, replies.wake)
            async with aclosing(replies.read()) as items:
                with heartbeat.running():
                    async for item in items:
                        if item is None:
                            yield KEEP_ALIVE
                            continue
                        for event in await self._events_of(replies, *item):
                            heartbeat.sent()
                            yield event
            self._usage.num_cached = self._generation.num_cached(replies.streams)
        if self._options.include_usage:
            yield self._encode({"choices": [], "usage": self._usage.as_json()})
        yield DONE

    async def _events_of(self, replies: Replies, index: int, delta: Delta) -> list[bytes]:
        """The events for the next delta of reply `index`."""
        if delta.progress is not None:
            return [self._event(replies, {"choices": [], "progress": _progress(index, delta.progress)})]
        self._pending[index].append(delta)
        if delta.sampled is None and delta.finish is None:
            return []
        if delta.sampled is not None:
            self._usage.num_completion += 1
        part = ReplySlice.of(self._pending.pop(index))
        is_first = index not in self._opened
        # The first part of a reply may contain its prompt.
        num_prompt = len(self._generation.prompts[index // self._generation.n]) if is_first else 0
        size = TOKEN_SIZE * max(num_prompt, len(part.prompt))

        def format_part() -> list[bytes]:
            chunks = self._formatter.chunks(index, part, first=is_first)
            return [self._event(replies, chunk) for chunk in chunks]

        events = await self._service.work.run(size, format_part)
        self._opened.add(index)
        return events

    def _event(self, replies: Replies, content: Json) -> bytes:
        if self._options.continuous_usage_stats:
            self._usage.num_cached = self._generation.num_cached(replies.streams)
            return self._encode({**content, "usage": self._usage.as_json()})
        return self._encode({**content, "usage": None} if self._options.include_usage else content)


def _progress(index: int, event: ProgressEvent) -> Json:
    """How far the prompt of reply `index` is."""
    predicted = event.predicted_ttft
    return {
        "index": index,
        "prefilled_tokens": event.num_computed,
        "prompt_tokens": event.num_prompt,
        "cached_tokens": event.num_cached,
        "queue_place": event.queue_position,
        **({} if predicted is None else {"predicted_ttft_ms": round(1000 * predicted, 1)}),
    }
