"""POST /v1/completions: prompts as text or token ids, replies as plain text."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from legato.errors import RequestError
from legato.server.answer import Endpoint, Json, Wording, answer
from legato.server.body import LONG, in_thread_if, read_body
from legato.server.logprobs import CompletionLogprobs
from legato.server.models import check_model
from legato.server.protocol import CompletionBody
from legato.server.replies import Generation, Part
from legato.server.sampling import check_body, check_ids, check_length, sampling_params, terms
from legato.server.service import Service
from legato.server.structured import constrained, constraint

ENDPOINT = Endpoint(id_prefix="cmpl", whole_object="text_completion", chunk_object="text_completion")

DEFAULT_MAX_TOKENS = 16
"""As in OpenAI's API."""


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create(request: Request) -> Response:
        service.readiness.check()
        body = await read_body(request, CompletionBody)
        arrival = service.engine.engine.clock()
        _check(body, service)
        return await answer(service, request, body, ENDPOINT, partial(_prepare, service, body, arrival))

    return router


def _check(body: CompletionBody, service: Service) -> None:
    limits = service.limits
    check_model(body.model, service)
    check_body(body, service)
    limits.check(len(body.prompt), limits.prompts, "prompt")
    limits.check(len(body.prompt) * body.n, limits.choices, "n")
    limits.check(body.logprobs or 0, limits.logprobs, "logprobs")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo: not supported together with logprobs", param="echo")
    for prompt in body.prompt:
        if isinstance(prompt, str):
            check_length(prompt, service.max_model_len)
        else:
            check_ids(prompt, service.vocab_size, "prompt")


async def _prepare(service: Service, body: CompletionBody, arrival: float) -> tuple[Generation, Wording]:
    num_chars = sum(len(prompt) for prompt in body.prompt)
    prompts = await in_thread_if(num_chars > LONG, lambda: tuple(_ids(service, p) for p in body.prompt))
    form = await constraint(body, service.grammars)
    params = tuple(
        constrained(
            sampling_params(
                body, service, len(prompt), default_max=DEFAULT_MAX_TOKENS, logprobs=body.logprobs
            ),
            form,
            ignore_eos=body.ignore_eos,
            eos_ids=service.tokenizer.eos_ids,
        )
        for prompt in prompts
    )
    generation = Generation(
        prompts=prompts,
        params=params,
        stop=tuple(body.stop),
        n=body.n,
        arrival=arrival,
        terms=terms(body),
    )
    return generation, CompletionWording(service, body, prompts)


def _ids(service: Service, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Special tokens are parsed: whoever sends a raw prompt may have written a chat template's own."""
    if isinstance(prompt, str):
        return tuple(service.tokenizer.encode(prompt, parse_special=True))
    return prompt


class CompletionWording:
    """The choices of one request."""

    def __init__(self, service: Service, body: CompletionBody, prompts: tuple[tuple[int, ...], ...]) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._prompts = prompts
        self._logprobs = [CompletionLogprobs(self._tokenizer) for _ in range(len(prompts) * body.n)]

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
        with_logprobs = self._body.logprobs is not None
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].of(part.sampled) if with_logprobs else None,
            "finish_reason": part.finish_reason,
        }
        if part.stop_reason is not None:
            choice["stop_reason"] = part.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = [sampled.token for sampled in part.sampled]
            if first:
                choice["prompt_token_ids"] = self._prompts[index // self._body.n]
        return choice

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[index // self._body.n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
