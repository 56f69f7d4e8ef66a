"""/tokenize, /detokenize and /tokenizer_info: the model's tokenizer, without the model (as vLLM)."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from legato.server.body import as_body, parsed, read_body
from legato.server.chat import prompt_ids
from legato.server.models import check_model
from legato.server.openapi import BODY_ERRORS, answers, has, takes
from legato.server.protocol import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from legato.server.sampling import check_ids, check_length
from legato.server.service import Service
from legato.server.unknown_fields import UnknownFields


def token_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/tokenize",
        openapi_extra=takes(TokenizeTextBody, TokenizeChatBody),
        responses=answers(*BODY_ERRORS, json=has(count="integer", max_model_len="integer", tokens="array")),
    )
    async def tokenize(request: Request) -> Response:
        """The ids of a text, or of messages after the chat template."""
        raw = await request.body()
        body = await service.work.run(len(raw), partial(_body, raw, service.unknown_fields))
        check_model(body.model, service)
        if isinstance(body, TokenizeChatBody):
            ids: Sequence[int] = await prompt_ids(service, body, body.tools, len(raw))
        else:
            ids = await _of_text(body, service)
        told = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
        return await service.work.run(len(ids), partial(JSONResponse, told))

    @router.post(
        "/detokenize",
        openapi_extra=takes(DetokenizeBody),
        responses=answers(*BODY_ERRORS, json=has(prompt="string")),
    )
    async def detokenize(request: Request) -> Response:
        """The text of ids, special tokens by name."""

        def check(body: DetokenizeBody) -> None:
            check_model(body.model, service)
            check_ids(body.tokens, service.vocab_size, "tokens")

        body = await read_body(request, DetokenizeBody, service.work, service.unknown_fields, check)
        decode = service.tokenizer.decode
        return await service.work.run(
            len(body.tokens), lambda: JSONResponse({"prompt": decode(body.tokens, skip_special=False)})
        )

    @router.get(
        "/tokenizer_info", responses=answers(json=has(tokenizer_class="string", model_max_length="integer"))
    )
    async def info() -> dict[str, object]:
        """What Hugging Face's tokenizer_config.json says of a tokenizer."""
        return told

    told = _info(service)
    return router


def _info(service: Service) -> dict[str, object]:
    tokenizer, template = service.tokenizer, service.chat_template
    texts, special = tokenizer.vocabulary.texts, tokenizer.vocabulary.special
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.max_model_len,
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
    data = parsed(raw)
    if isinstance(data, dict) and "messages" in data:
        return as_body(data, TokenizeChatBody, unknown)
    return as_body(data, TokenizeTextBody, unknown)


async def _of_text(body: TokenizeTextBody, service: Service) -> list[int]:
    check_length(body.prompt, service, in_part=True)
    return await service.work.run(
        len(body.prompt),
        lambda: service.tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens, parse_special=body.parse_special
        ),
    )
