"""One HTTP request's answer, whole or as a stream, the same for completions and chat.

The endpoints say what to generate (`Generation`) and how to word it (`Wording`); the order of things is here.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from legato.engine.output import Delta
from legato.server.prompt_log import log_prompts
from legato.server.protocol import GenerationBody
from legato.server.replies import Generation, Part, merged, started
from legato.server.service import Service
from legato.server.sse import DONE, EventStream, event, unless_gone

Json = dict[str, object]


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

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


Prepare = Callable[[], Awaitable[tuple[Generation, Wording]]]


async def answer(
    service: Service, request: Request, body: GenerationBody, endpoint: Endpoint, prepare: Prepare
) -> Response:
    """Answer a request whose body was read. `prepare` may take long and may raise."""
    name = f"{endpoint.id_prefix}-{secrets.token_hex(12)}"
    head: Json = {
        "id": name,
        "object": endpoint.chunk_object if body.stream else endpoint.whole_object,
        "created": int(time.time()),
        "model": service.model_name,
    }
    if body.stream:
        return EventStream(_events(service, body, head, name, prepare))
    return JSONResponse(await unless_gone(request.receive, _whole(service, head, name, prepare)))


async def _whole(service: Service, head: Json, name: str, prepare: Prepare) -> Json:
    generation, wording = await prepare()
    log_prompts(service, name, generation)
    with started(service.engine, generation, name) as streams:
        made: list[list[Delta]] = [[] for _ in streams]
        async with aclosing(merged(streams)) as deltas:
            async for index, delta in deltas:
                made[index].append(delta)
    replies = [Part.of(deltas_of_one) for deltas_of_one in made]
    num_completion = sum(len(reply.sampled) for reply in replies)
    usage = Usage(generation.num_prompt_tokens, num_completion, generation.num_cached(streams))
    return {**head, **wording.whole(replies), "usage": usage.as_json()}


async def _events(
    service: Service, body: GenerationBody, head: Json, name: str, prepare: Prepare
) -> AsyncGenerator[bytes, None]:
    generation, wording = await prepare()
    log_prompts(service, name, generation)
    options = body.stream_options
    with_usage = options is not None and options.include_usage
    running_usage = options is not None and options.continuous_usage_stats
    usage = Usage(generation.num_prompt_tokens)
    opened: set[int] = set()
    with started(service.engine, generation, name) as streams:
        async with aclosing(merged(streams)) as deltas:
            async for index, delta in deltas:
                usage.num_completion += delta.sampled is not None
                for chunk in wording.chunks(index, Part.of([delta]), first=index not in opened):
                    if running_usage:
                        usage.num_cached = generation.num_cached(streams)
                        yield event({**head, **chunk, "usage": usage.as_json()})
                    elif with_usage:
                        yield event({**head, **chunk, "usage": None})
                    else:
                        yield event({**head, **chunk})
                opened.add(index)
        usage.num_cached = generation.num_cached(streams)
    if with_usage:
        yield event({**head, "choices": [], "usage": usage.as_json()})
    yield DONE
