"""/tokenize, /detokenize and /tokenizer_info: the model's tokenizer (as in vLLM)."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from legato.server.generation.chat_prompt import chat_prompt_ids
from legato.server.generation.parameters import check_ids, check_length
from legato.server.routes.models import check_model
from legato.server.routes.openapi import BODY_ERRORS, object_schema, request_body, responses
from legato.server.schema.bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from legato.server.schema.parsing import as_body, parse_json, read_body
from legato.server.schema.unknown_fields import UnknownFields
from legato.server.service import ServedModel, Service


def token_routes(service: Service) -> APIRouter:
    router = APIRouter()
    model = service.model

    @router.post(
        "/tokenize",
        openapi_extra=request_body(TokenizeTextBody, TokenizeChatBody),
        responses=responses(
            *BODY_ERRORS, json=object_schema(count="integer", max_model_len="integer", tokens="array")
        ),
    )
    async def tokenize(request: Request) -> Response:
        """The ids of a text, or of messages after the chat template."""
        raw = await request.body()
        body = await service.work.run(len(raw), partial(_body, raw, service.unknown_fields))
        check_model(body.model, model)
        if isinstance(body, TokenizeChatBody):
            ids: Sequence[int] = await chat_prompt_ids(body, body.tools, model, service.work, len(raw))
        else:
            ids = await _text_ids(body, service)
        content = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        return await service.work.run(len(ids), partial(JSONResponse, content))

    @router.post(
        "/detokenize",
        openapi_extra=request_body(DetokenizeBody),
        responses=responses(*BODY_ERRORS, json=object_schema(prompt="string")),
    )
    async def detokenize(request: Request) -> Response:
        """The text of ids, with the names of special tokens."""

        def check(body: DetokenizeBody) -> None:
            check_model(body.model, model)
            check_ids(body.tokens, model.vocab_size, "tokens")

        body = await read_body(request, DetokenizeBody, service.work, service.unknown_fields, check)
        decode = model.tokenizer.decode
        return await service.work.run(
            len(body.tokens), lambda: JSONResponse({"prompt": decode(body.tokens, skip_special=False)})
        )

    @router.get(
        "/tokenizer_info",
        responses=responses(json=object_schema(tokenizer_class="string", model_max_length="integer")),
    )
    async def tokenizer_info() -> dict[str, object]:
        """The fields of Hugging Face's tokenizer_config.json."""
        return info

    info = _tokenizer_info(model)
    return router


def _tokenizer_info(model: ServedModel) -> dict[str, object]:
    tokenizer, template = model.tokenizer, model.chat_template
    texts, special = tokenizer.vocabulary.texts, tokenizer.vocabulary.special
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": model.max_model_len,
        "bos_token": tokenizer.special_text(tokenizer.bos_id) or None,
        "eos_token": tokenizer.special_text(tokenizer.eos_id) or None,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(id): {"content": texts[id], "special": True} for id in sorted(special) if id < len(texts)
        },
        "chat_template": None if template is None else template.source,
    }


def _body(raw: bytes, unknown: UnknownFields) -> TokenizeChatBody | TokenizeTextBody:
    data = parse_json(raw)
    if isinstance(data, dict) and "messages" in data:
        return as_body(data, TokenizeChatBody, unknown)
    return as_body(data, TokenizeTextBody, unknown)


async def _text_ids(body: TokenizeTextBody, service: Service) -> list[int]:
    check_length(body.prompt, service.model, may_be_cut=True)
    return await service.work.run(
        len(body.prompt),
        lambda: service.model.tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens, parse_special=body.parse_special
        ),
    )
