"""POST /v1/chat/completions: messages in, a message out. Also makes prompts of messages for /tokenize."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from legato.errors import RequestError
from legato.server.answer import Endpoint, Json, Wording, answer
from legato.server.body import read_body
from legato.server.calling import Calling, CallsInReply, calling, check_tools, offered, plain_or_native
from legato.server.logprobs import chat_logprobs, prompt_logprobs
from legato.server.models import check_model
from legato.server.openapi import EVENTS, GENERATED, GENERATION_ERRORS, answers, takes
from legato.server.protocol import ChatBody, Conversation
from legato.server.replies import Generation, Part
from legato.server.sampling import (
    bad_words,
    check_body,
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
from legato.server.tools import Tool
from legato.text.chat import ChatTemplate

ENDPOINT = Endpoint(
    id_prefix="chatcmpl", whole_object="chat.completion", chunk_object="chat.completion.chunk"
)

NOTHING = Part("", (), None, None)


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatBody),
        responses=answers(*GENERATION_ERRORS, json=GENERATED, events=EVENTS),
    )
    async def create(request: Request) -> Response:
        service.readiness.check()
        body = await read_body(
            request, ChatBody, service.work, service.unknown_fields, partial(_check, service)
        )
        arrival = service.engine.engine.clock()
        prepare = partial(_prepare, service, body, len(await request.body()), arrival)
        return await answer(service, request, body, ENDPOINT, prepare, num_replies=body.n)

    return router


async def prompt_ids(
    service: Service, conversation: Conversation, tools: Sequence[Tool], size: int
) -> tuple[int, ...]:
    """The token ids of messages and tools, of `size` bytes, by the model's chat template. Raises
    `RequestError` if there is none, or it refuses the messages."""
    asked = {"add_generation_prompt", "continue_final_message"} & conversation.model_fields_set
    if len(asked) == 2 and conversation.add_generation_prompt and conversation.continue_final_message:
        raise RequestError(
            "continue_final_message: not with add_generation_prompt", param="continue_final_message"
        )
    template = service.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template"
        )
    # Always in a thread: a template may be slow, and another one's rendering holds its lock.
    return await service.work.run_in_thread(size, partial(_render, service, template, conversation, tools))


def _render(
    service: Service, template: ChatTemplate, conversation: Conversation, tools: Sequence[Tool]
) -> tuple[int, ...]:
    messages, told = plain_or_native(service, conversation, tools)
    prompt = template.render(
        messages,
        tools=told,
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final_message,
        continue_final_message=conversation.continue_final_message,
        extra=conversation.template_variables,
    )
    template.refuse_unread(messages)
    in_part = not isinstance(conversation, ChatBody) or conversation.truncate_prompt_tokens is not None
    check_length(prompt, service, in_part=in_part)
    return tuple(service.tokenizer.encode_chat(prompt, add_special_tokens=conversation.add_special_tokens))


def _check(service: Service, body: ChatBody) -> None:
    check_model(body.model, service)
    check_body(body, service)
    service.limits.check(body.top_logprobs or 0, service.limits.logprobs, "top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: only with logprobs", param="top_logprobs")
    check_tools(body)


async def _prepare(service: Service, body: ChatBody, size: int, arrival: float) -> tuple[Generation, Wording]:
    whole = await prompt_ids(service, body, offered(body), size)
    prompt = truncated(whole, body, service)
    length = reply_length(body, service.max_model_len, len(prompt), None)
    calls = await calling(body, service)
    form = await constraint(body, service.grammars, service.work) if calls is None else calls.form
    params = sampling_params(
        body,
        service,
        [length],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        bad_words=await bad_words(body, service),
        form=form,
    )
    generation = Generation(
        prompts=(prompt,),
        params=params,
        text=replace(text_rules(body), shown=frozenset() if calls is None else calls.shown),
        num_truncated=num_truncated(body, [whole], [prompt]),
        n=body.n,
        arrival=arrival,
        terms=terms(body),
        notices=(*length_notices(body, [length]), *left_out_notices(form)),
    )
    return generation, ChatWording(service, body, prompt, calls)


class ChatWording:
    """The choices of one request."""

    def __init__(
        self, service: Service, body: ChatBody, prompt: tuple[int, ...], calls: Calling | None
    ) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._calls = None if calls is None else [CallsInReply(calls) for _ in range(body.n)]
        """For each reply, if it may call."""
        self._beside: Json = {"prompt_token_ids": prompt} if body.return_token_ids else {}
        last = body.messages[-1]
        self._echo = ""
        if body.echo and last.role == "assistant":
            self._echo = "\n".join(content.text for content in last.content or ())

    def chunks(self, index: int, part: Part, *, first: bool) -> list[Json]:
        """The role before a reply's first token; nothing for a token whose text is held back, unless the
        client looks at tokens."""
        chunks: list[Json] = []
        if first:
            opening = self._choice(index, NOTHING, {"delta": {"role": "assistant", "content": ""}})
            chunks.append({"choices": [opening], **self._with_prompt(index, part)})
            if self._echo:
                chunks.append({"choices": [self._choice(index, NOTHING, {"delta": {"content": self._echo}})]})
        wanted = self._body.logprobs or self._body.return_token_ids
        if self._calls is None:
            deltas: list[Json] = [{"content": part.text}] if part.text else []
        else:
            deltas = self._calls[index].deltas(part)
        if not deltas and (part.finish_reason is not None or wanted):
            deltas = [{"content": ""} if self._calls is None else {}]
        for delta in deltas[:-1]:
            chunks.append({"choices": [self._choice(index, NOTHING, {"delta": delta})]})
        for delta in deltas[-1:]:
            chunks.append({"choices": [self._choice(index, part, {"delta": delta})]})
        return chunks

    def whole(self, replies: Sequence[Part]) -> Json:
        choices = []
        for index, reply in enumerate(replies):
            if self._calls is None:
                message: Json = {"role": "assistant", "content": self._echo + reply.text, "refusal": None}
            else:
                message = self._calls[index].message(reply)
            choices.append(self._choice(index, reply, {"message": message}))
        return {"choices": choices, **self._with_prompt(0, replies[0])}

    def _with_prompt(self, index: int, part: Part) -> Json:
        """What is told of the prompt, beside the choices."""
        num_top = self._body.prompt_logprobs
        if index or num_top is None:
            return self._beside
        return {**self._beside, "prompt_logprobs": prompt_logprobs(self._tokenizer, part.prompt, num_top)}

    def _choice(self, index: int, part: Part, content: Json) -> Json:
        body = self._body
        choice: Json = {
            "index": index,
            **content,
            "logprobs": chat_logprobs(self._tokenizer, part.sampled) if body.logprobs else None,
            "finish_reason": part.finish_reason
            if self._calls is None
            else self._calls[index].finish_reason(part),
        }
        if part.stop_reason is not None:
            choice["stop_reason"] = part.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = [sampled.token for sampled in part.sampled]
        return choice
