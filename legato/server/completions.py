"""POST /v1/completions: prompts as text or token ids, replies as plain text."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from legato.server.answer import Endpoint, Json, Wording, answer
from legato.server.body import read_body
from legato.server.logprobs import CompletionLogprobs, prompt_logprobs
from legato.server.models import check_model
from legato.server.openapi import EVENTS, GENERATED, GENERATION_ERRORS, answers, takes
from legato.server.protocol import CompletionBody
from legato.server.replies import Generation, Part
from legato.server.sampling import (
    asked_length,
    bad_words,
    check_body,
    check_ids,
    check_length,
    length_notices,
    num_truncated,
    reply_length,
    sampling_params,
    terms,
    text_rules,
    truncated,
)
from legato.server.service import Service
from legato.server.structured import constraint, left_out_notices

ENDPOINT = Endpoint(id_prefix="cmpl", whole_object="text_completion", chunk_object="text_completion")

DEFAULT_MAX_TOKENS = 16
"""As in OpenAI's API."""


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        openapi_extra=takes(CompletionBody),
        responses=answers(*GENERATION_ERRORS, json=GENERATED, events=EVENTS),
    )
    async def create(request: Request) -> Response:
        service.readiness.check()
        body = await read_body(
            request, CompletionBody, service.work, service.unknown_fields, partial(_check, service)
        )
        arrival = service.engine.engine.clock()
        prepare = partial(_prepare, service, body, arrival)
        return await answer(service, request, body, ENDPOINT, prepare, num_replies=len(body.prompt) * body.n)

    return router


def _check(service: Service, body: CompletionBody) -> None:
    limits = service.limits
    check_model(body.model, service)
    check_body(body, service)
    limits.check(len(body.prompt), limits.prompts, "prompt")
    limits.check(len(body.prompt) * body.n, limits.choices, "n")
    limits.check(body.logprobs or 0, limits.logprobs, "logprobs")
    for prompt in body.prompt:
        if isinstance(prompt, str):
            check_length(prompt, service, in_part=body.truncate_prompt_tokens is not None)
        else:
            check_ids(prompt, service.vocab_size, "prompt")


async def _prepare(service: Service, body: CompletionBody, arrival: float) -> tuple[Generation, Wording]:
    num_chars = sum(len(prompt) for prompt in body.prompt)
    whole = await service.work.run(num_chars, lambda: tuple(_ids(service, body, p) for p in body.prompt))
    prompts = tuple(truncated(prompt, body, service) for prompt in whole)
    echoed = 0 if body.logprobs is None and asked_length(body) == 0 else body.logprobs
    wanted = [body.prompt_logprobs, echoed if body.echo else None]
    lengths = [
        reply_length(body, service.max_model_len, len(prompt), DEFAULT_MAX_TOKENS) for prompt in prompts
    ]
    words = await bad_words(body, service)
    form = await constraint(body, service.grammars, service.work)
    params = sampling_params(
        body,
        service,
        lengths,
        logprobs=body.logprobs,
        prompt_logprobs=max((num for num in wanted if num is not None), default=None),
        bad_words=words,
        form=form,
    )
    generation = Generation(
        prompts=prompts,
        params=params,
        text=text_rules(body),
        num_truncated=num_truncated(body, whole, prompts),
        n=body.n,
        arrival=arrival,
        terms=terms(body),
        notices=(*length_notices(body, lengths), *left_out_notices(form)),
    )
    return generation, CompletionWording(service, body, prompts)


def _ids(service: Service, body: CompletionBody, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Special tokens are parsed: whoever sends a raw prompt may have written a chat template's own."""
    if isinstance(prompt, str):
        encode = partial(service.tokenizer.encode, add_special_tokens=body.add_special_tokens)
        return tuple(encode(prompt, parse_special=True))
    return prompt


class CompletionWording:
    """The choices of one request."""

    def __init__(self, service: Service, body: CompletionBody, prompts: tuple[tuple[int, ...], ...]) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._prompts = prompts
        self._logprobs = [
            CompletionLogprobs(self._tokenizer, body.logprobs or 0, skip_special=body.skip_special_tokens)
            for _ in range(len(prompts) * body.n)
        ]

    def chunks(self, index: int, part: Part, *, first: bool) -> list[Json]:
        """Nothing for a token whose text is held back, unless the client looks at tokens."""
        body = self._body
        text = self._echo(index) + part.text if first else part.text
        if not text and part.finish_reason is None and body.logprobs is None and not body.return_token_ids:
            return []
        return [{"choices": [self._choice(index, part, text, first=first)]}]

    def whole(self, replies: Sequence[Part]) -> Json:
        return {
            "choices": [
                self._choice(index, reply, self._echo(index) + reply.text, first=True)
                for index, reply in enumerate(replies)
            ]
        }

    def _choice(self, index: int, part: Part, text: str, *, first: bool) -> Json:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs[index].of(part.prompt if self._body.echo else (), part.sampled)
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
        }
        if first and self._body.prompt_logprobs is not None:
            num_top = self._body.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, part.prompt, num_top)
        if part.stop_reason is not None:
            choice["stop_reason"] = part.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = [sampled.token for sampled in part.sampled]
            if first:
                choice["prompt_token_ids"] = self._prompts[index // self._body.n]
        return choice

    def _echo(self, index: int) -> str:
        """The prompt as it was written; what its tokens spell where it was not written, was cut, or has to go
        with their offsets."""
        body = self._body
        if not body.echo:
            return ""
        prompt = body.prompt[index // body.n]
        if isinstance(prompt, str) and body.logprobs is None and body.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(self._prompts[index // body.n], skip_special=body.skip_special_tokens)
