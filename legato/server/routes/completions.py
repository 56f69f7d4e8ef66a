"""POST /v1/completions: prompts as text or token ids, replies as plain text."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter

from legato.server.generation.constraints import compile_constraint, left_out_notices
from legato.server.generation.logprobs import CompletionLogprobs, prompt_logprobs
from legato.server.generation.parameters import (
    bad_word_ids,
    check_body,
    check_ids,
    check_length,
    detokenize_options,
    length_notices,
    num_truncated,
    reply_length,
    request_options,
    requested_length,
    sampling_params,
    truncate,
)
from legato.server.generation.replies import Generation, ReplySlice
from legato.server.generation.response import Json, ResponseFormatter, ResponseKind
from legato.server.routes.generation import Endpoint, add_generation_route
from legato.server.routes.models import check_model
from legato.server.schema.bodies import CompletionBody
from legato.server.service import Service
from legato.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's API."""


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()
    endpoint = Endpoint(
        path="/v1/completions",
        body=CompletionBody,
        kind=ResponseKind(
            id_prefix="cmpl", complete_object="text_completion", chunk_object="text_completion"
        ),
        check=_check,
        num_replies=lambda body: len(body.prompt) * body.n,
        prepare=_prepare,
    )
    add_generation_route(router, service, endpoint)
    return router


def _check(service: Service, body: CompletionBody) -> None:
    limits, model = service.limits, service.model
    check_model(body.model, model)
    check_body(body, service)
    limits.check(len(body.prompt), limits.prompts, "prompt")
    limits.check(len(body.prompt) * body.n, limits.choices, "n")
    limits.check(body.logprobs or 0, limits.logprobs, "logprobs")
    for prompt in body.prompt:
        if isinstance(prompt, str):
            check_length(prompt, model, may_be_cut=body.truncate_prompt_tokens is not None)
        else:
            check_ids(prompt, model.vocab_size, "prompt")


async def _prepare(
    service: Service,
    body: CompletionBody,
    size: int,  # noqa: ARG001
    arrival: float,
) -> tuple[Generation, ResponseFormatter]:
    model, work = service.model, service.work
    num_chars = sum(len(prompt) for prompt in body.prompt)
    whole = await work.run(
        num_chars, lambda: tuple(_ids(model.tokenizer, body, prompt) for prompt in body.prompt)
    )
    prompts = tuple(truncate(prompt, body, model.max_model_len) for prompt in whole)
    lengths = [reply_length(body, model.max_model_len, len(prompt), DEFAULT_MAX_TOKENS) for prompt in prompts]
    bad_words = await bad_word_ids(body, model, work)
    constraint = await compile_constraint(body, model.grammars, work)
    params = sampling_params(
        body,
        model,
        lengths,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        bad_words=bad_words,
        constraint=constraint,
    )
    generation = Generation(
        prompts=prompts,
        params=params,
        text=detokenize_options(body),
        num_truncated=num_truncated(body, whole, prompts),
        n=body.n,
        arrival=arrival,
        options=request_options(body),
        notices=(*length_notices(body, lengths), *left_out_notices(constraint)),
    )
    return generation, CompletionFormatter(model.tokenizer, body, prompts)


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """The number of most likely tokens for each prompt token: `prompt_logprobs`, and `logprobs` with
    `echo`."""
    echoed = 0 if body.logprobs is None and requested_length(body) == 0 else body.logprobs
    wanted = [body.prompt_logprobs, echoed if body.echo else None]
    return max((num for num in wanted if num is not None), default=None)


def _ids(tokenizer: Tokenizer, body: CompletionBody, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Special tokens are parsed, because a raw prompt may contain those of a chat template."""
    if isinstance(prompt, str):
        encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
        return tuple(encode(prompt, parse_special=True))
    return prompt


class CompletionFormatter:
    """Formats the choices of one request."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionBody, prompts: tuple[tuple[int, ...], ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._prompts = prompts
        self._logprobs = [
            CompletionLogprobs(tokenizer, body.logprobs or 0, skip_special=body.skip_special_tokens)
            for _ in range(len(prompts) * body.n)
        ]

    def chunks(self, index: int, part: ReplySlice, *, first: bool) -> list[Json]:
        """A token whose text is held back has no chunk, unless the client asked for log-probabilities or
        ids."""
        body = self._body
        text = self._echo(index) + part.text if first else part.text
        if not text and part.finish_reason is None and body.logprobs is None and not body.return_token_ids:
            return []
        return [{"choices": [self._choice(index, part, text, first=first)]}]

    def complete(self, replies: Sequence[ReplySlice]) -> Json:
        return {
            "choices": [
                self._choice(index, reply, self._echo(index) + reply.text, first=True)
                for index, reply in enumerate(replies)
            ]
        }

    def _choice(self, index: int, part: ReplySlice, text: str, *, first: bool) -> Json:
        logprobs = None
        if self._body.logprobs is not None:
            prompt = part.prompt if self._body.echo else ()
            logprobs = self._logprobs[index].arrays(prompt, part.sampled)
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
        """The prompt as the client sent it. If it was sent as ids, was truncated, or needs text offsets, it
        is the text of its tokens."""
        body = self._body
        if not body.echo:
            return ""
        prompt = body.prompt[index // body.n]
        if isinstance(prompt, str) and body.logprobs is None and body.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(self._prompts[index // body.n], skip_special=body.skip_special_tokens)
