"""POST /v1/chat/completions: messages in, an assistant's message out."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter

from legato.errors import RequestError
from legato.server.generation.chat_prompt import chat_prompt_ids
from legato.server.generation.constraints import compile_constraint, left_out_notices
from legato.server.generation.logprobs import chat_logprobs, prompt_logprobs
from legato.server.generation.parameters import (
    bad_word_ids,
    check_body,
    detokenize_options,
    length_notices,
    num_truncated,
    reply_length,
    request_options,
    sampling_params,
    truncate,
)
from legato.server.generation.replies import Generation, ReplySlice
from legato.server.generation.response import Json, ResponseFormatter, ResponseKind
from legato.server.generation.tool_calling import (
    ToolCallFormatter,
    ToolCalling,
    check_tools,
    offered_tools,
    tool_calling,
)
from legato.server.routes.generation import Endpoint, add_generation_route
from legato.server.routes.models import check_model
from legato.server.schema.bodies import ChatBody
from legato.server.service import Service
from legato.text.tokenizer import Tokenizer

EMPTY = ReplySlice("", (), None, None)


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()
    endpoint = Endpoint(
        path="/v1/chat/completions",
        body=ChatBody,
        kind=ResponseKind(
            id_prefix="chatcmpl", complete_object="chat.completion", chunk_object="chat.completion.chunk"
        ),
        check=_check,
        num_replies=lambda body: body.n,
        prepare=_prepare,
    )
    add_generation_route(router, service, endpoint)
    return router


def _check(service: Service, body: ChatBody) -> None:
    check_model(body.model, service.model)
    check_body(body, service)
    service.limits.check(body.top_logprobs or 0, service.limits.logprobs, "top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: only with logprobs", param="top_logprobs")
    check_tools(body)


async def _prepare(
    service: Service, body: ChatBody, size: int, arrival: float
) -> tuple[Generation, ResponseFormatter]:
    model, work = service.model, service.work
    whole = await chat_prompt_ids(body, offered_tools(body), model, work, size)
    prompt = truncate(whole, body, model.max_model_len)
    length = reply_length(body, model.max_model_len, len(prompt), None)
    calling = await tool_calling(body, model, work)
    if calling is None:
        constraint = await compile_constraint(body, model.grammars, work)
    else:
        constraint = calling.constraint
    params = sampling_params(
        body,
        model,
        [length],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        bad_words=await bad_word_ids(body, model, work),
        constraint=constraint,
    )
    generation = Generation(
        prompts=(prompt,),
        params=params,
        text=replace(detokenize_options(body), shown=frozenset() if calling is None else calling.shown),
        num_truncated=num_truncated(body, [whole], [prompt]),
        n=body.n,
        arrival=arrival,
        options=request_options(body),
        notices=(*length_notices(body, [length]), *left_out_notices(constraint)),
    )
    return generation, ChatFormatter(model.tokenizer, body, prompt, calling)


class ChatFormatter:
    """Formats the choices of one request."""

    def __init__(
        self, tokenizer: Tokenizer, body: ChatBody, prompt: tuple[int, ...], calling: ToolCalling | None
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._calls = None if calling is None else [ToolCallFormatter(calling) for _ in range(body.n)]
        """One for each reply, if tools may be called."""
        self._beside: Json = {"prompt_token_ids": prompt} if body.return_token_ids else {}
        last = body.messages[-1]
        self._echo = ""
        if body.echo and last.role == "assistant":
            self._echo = "\n".join(content.text for content in last.content or ())

    def chunks(self, index: int, part: ReplySlice, *, first: bool) -> list[Json]:
        """The first chunk of a reply has the role. A token whose text is held back has no chunk, unless the
        client asked for log-probabilities or token ids."""
        chunks: list[Json] = []
        if first:
            opening = self._choice(index, EMPTY, {"delta": {"role": "assistant", "content": ""}})
            chunks.append({"choices": [opening], **self._beside_choices(index, part)})
            if self._echo:
                chunks.append({"choices": [self._choice(index, EMPTY, {"delta": {"content": self._echo}})]})
        deltas = self._deltas(index, part)
        for delta in deltas[:-1]:
            chunks.append({"choices": [self._choice(index, EMPTY, {"delta": delta})]})
        if deltas:  # Only the last one has the log-probabilities and the finish reason of the part.
            chunks.append({"choices": [self._choice(index, part, {"delta": deltas[-1]})]})
        return chunks

    def _deltas(self, index: int, part: ReplySlice) -> list[Json]:
        if self._calls is None:
            deltas: list[Json] = [{"content": part.text}] if part.text else []
        else:
            deltas = self._calls[index].deltas(part)
        shows_tokens = self._body.logprobs or self._body.return_token_ids
        if not deltas and (part.finish_reason is not None or shows_tokens):
            return [{"content": ""} if self._calls is None else {}]
        return deltas

    def complete(self, replies: Sequence[ReplySlice]) -> Json:
        choices = []
        for index, reply in enumerate(replies):
            if self._calls is None:
                message: Json = {"role": "assistant", "content": self._echo + reply.text, "refusal": None}
            else:
                message = self._calls[index].message(reply)
            choices.append(self._choice(index, reply, {"message": message}))
        return {"choices": choices, **self._beside_choices(0, replies[0])}

    def _beside_choices(self, index: int, part: ReplySlice) -> Json:
        """The fields about the prompt, which stand beside the choices."""
        num_top = self._body.prompt_logprobs
        if index or num_top is None:
            return self._beside
        return {**self._beside, "prompt_logprobs": prompt_logprobs(self._tokenizer, part.prompt, num_top)}

    def _choice(self, index: int, part: ReplySlice, content: Json) -> Json:
        body = self._body
        finish_reason = part.finish_reason
        if self._calls is not None:
            finish_reason = self._calls[index].finish_reason(part)
        choice: Json = {
            "index": index,
            **content,
            "logprobs": chat_logprobs(self._tokenizer, part.sampled) if body.logprobs else None,
            "finish_reason": finish_reason,
        }
        if part.stop_reason is not None:
            choice["stop_reason"] = part.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = [sampled.token for sampled in part.sampled]
        return choice
