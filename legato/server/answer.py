"""One HTTP request's answer, whole or as a stream, the same for completions and chat.

The endpoints say what to generate (`Generation`) and how to word it (`Wording`); the order of things is here.
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
from legato.engine.output import Delta
from legato.server.notices import notice_headers
from legato.server.prompt_log import log_prompts
from legato.server.protocol import GenerationBody, StreamOptions
from legato.server.replies import Generation, Part, Replies, out_of_time, started
from legato.server.service import Service
from legato.server.sse import DONE, KEEP_ALIVE, EventStream, Silence, events_with, unless_gone

Json = dict[str, object]

SIZE_OF_TOKEN = 16
"""Writing a token with its log-probabilities takes as long as tokenizing this many characters."""


class Wording(Protocol):
    """How one endpoint words the answer to one request."""

    def chunks(self, index: int, part: Part, *, first: bool) -> list[Json]:
        """The chunks that the next part of reply `index` is sent in, if any: `choices` and what else
        stands beside them."""
        ...

    def whole(self, replies: Sequence[Part]) -> Json:
        """`choices` for complete replies, and what else stands beside them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What is constant in an endpoint's answers."""

    id_prefix: str
    whole_object: str
    chunk_object: str


@dataclass(slots=True)
class Usage:
    """Tokens so far. A token that ends a reply counts, in streams and in whole answers alike."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0
    """Tokens of the prompts that were not computed."""
    num_truncated: int | None = None
    """Tokens that were cut off the prompts, if that was asked for."""

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


Prepare = Callable[[], Awaitable[tuple[Generation, Wording]]]


async def answer(
    service: Service,
    request: Request,
    body: GenerationBody,
    endpoint: Endpoint,
    prepare: Prepare,
    *,
    num_replies: int,
) -> Response:
    """Answer a request whose body was read. `prepare` may take long and may raise. Places for the replies are
    taken in the queue before it begins."""
    name = f"{endpoint.id_prefix}-{secrets.token_hex(12)}"
    head: Json = {
        "id": name,
        "object": endpoint.chunk_object if body.stream else endpoint.whole_object,
        "created": int(time.time()),
        "model": service.model_name,
    }
    prepare = partial(_in_time, prepare, body.timeout)
    if body.stream:
        headers: dict[str, str] = {}
        return EventStream(_events(service, body, head, name, prepare, num_replies, headers), headers)
    return await unless_gone(request.receive, _whole(service, head, name, prepare, num_replies))


async def _in_time(prepare: Prepare, timeout: float | None) -> tuple[Generation, Wording]:
    """Tokenizing and grammars may take their time, too."""
    try:
        async with asyncio.timeout(timeout):
            return await prepare()
    except TimeoutError:
        raise out_of_time() from None


@asynccontextmanager
async def _prepared(
    service: Service, name: str, prepare: Prepare, num_replies: int
) -> AsyncIterator[tuple[Generation, Wording, Callable[[], AbstractAsyncContextManager[Replies]]]]:
    """What to generate, how to word it, and what starts it."""
    with service.engine.reserve(num_replies, 0) as room:
        generation, wording = await prepare()
        service.engine.widen(room, generation.num_prompt_tokens * generation.n)
        log_prompts(service, name, generation)
        yield generation, wording, partial(started, service.engine, generation, name, room, service.turns)


async def _whole(service: Service, head: Json, name: str, prepare: Prepare, num_replies: int) -> Response:
    async with (
        _prepared(service, name, prepare, num_replies) as (generation, wording, start),
        start() as running,
    ):
        made: list[list[Delta]] = [[] for _ in running.streams]
        async with aclosing(running.read()) as items:
            async for item in items:
                if item is not None:
                    made[item[0]].append(item[1])
    num_cached = generation.num_cached(running.streams)

    def worded() -> Response:
        replies = [Part.of(deltas_of_one) for deltas_of_one in made]
        num_completion = sum(len(reply.sampled) for reply in replies)
        usage = Usage(generation.num_prompt_tokens, num_completion, num_cached, generation.num_truncated)
        return JSONResponse(
            {**head, **wording.whole(replies), "usage": usage.as_json()},
            headers=notice_headers(generation.notices),
        )

    # A prompt may be part of the answer, once for each reply.
    num_tokens = sum(map(len, made)) + generation.num_prompt_tokens * generation.n
    return await service.work.run(num_tokens * SIZE_OF_TOKEN, worded)


async def _events(
    service: Service,
    body: GenerationBody,
    head: Json,
    name: str,
    prepare: Prepare,
    num_replies: int,
    headers: dict[str, str],
) -> AsyncGenerator[bytes, None]:
    """Fills `headers` before the first event."""
    async with _prepared(service, name, prepare, num_replies) as (generation, wording, start):
        headers.update(notice_headers(generation.notices))
        async with aclosing(_chunks(service, body, head, generation, wording, start)) as chunks:
            async for chunk in chunks:
                yield chunk


async def _chunks(
    service: Service,
    body: GenerationBody,
    head: Json,
    generation: Generation,
    wording: Wording,
    start: Callable[[], AbstractAsyncContextManager[Replies]],
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options or StreamOptions()
    usage = Usage(generation.num_prompt_tokens, num_truncated=generation.num_truncated)
    opened: set[int] = set()
    untold: defaultdict[int, list[Delta]] = defaultdict(list)
    """Deltas of prompts, by reply: they are told with the reply's first token."""

    event_of = events_with(head)

    def chunk_of(content: Json) -> bytes:
        if options.continuous_usage_stats:
            usage.num_cached = generation.num_cached(running.streams)
            return event_of({**content, "usage": usage.as_json()})
        return event_of({**content, "usage": None} if options.include_usage else content)

    def chunks_of(index: int, part: Part) -> list[bytes]:
        return [chunk_of(content) for content in wording.chunks(index, part, first=index not in opened)]

    async with start() as running:
        silence = Silence(service.keep_alive, running.wake)
        async with aclosing(running.read()) as items:
            with silence.watched():
                async for item in items:
                    if item is None:
                        yield KEEP_ALIVE
                        continue
                    index, delta = item
                    if delta.progress is not None:
                        silence.heard()
                        yield chunk_of({"choices": [], "progress": _progress(index, delta.progress)})
                        continue
                    untold[index].append(delta)
                    if delta.sampled is None and delta.finish is None:
                        continue
                    usage.num_completion += delta.sampled is not None
                    part = Part.of(untold.pop(index))
                    # The first chunk of a reply may hold its prompt.
                    told = 0 if index in opened else len(generation.prompts[index // generation.n])
                    size = SIZE_OF_TOKEN * max(told, len(part.prompt))
                    for chunk in await service.work.run(size, partial(chunks_of, index, part)):
                        silence.heard()
                        yield chunk
                    opened.add(index)
        usage.num_cached = generation.num_cached(running.streams)
    if options.include_usage:
        yield event_of({"choices": [], "usage": usage.as_json()})
    yield DONE


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
