"""The OpenAPI document: the bodies and responses of each route, from the same models that validate requests.

The routes read their bodies themselves, so that errors have OpenAI's form. Here they declare what they read.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from legato import __version__
from legato.server.schema.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from legato.server.transport.api_keys import OPEN_PATHS

Json = dict[str, Any]

BODIES = (CompletionBody, ChatBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody)
_REF_TEMPLATE = "#/components/schemas/{model}"

GENERATION_ERRORS = (400, 404, 413, 429, 500, 503, 504)
BODY_ERRORS = (400, 404, 413)

_NULLABLE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
        }
    },
}


def request_body(*models: type[BaseModel]) -> Json:
    """`openapi_extra` of a route whose body is one of `models`."""
    refs = [{"$ref": _REF_TEMPLATE.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses(*errors: int, **schemas: Json) -> dict[int | str, Json]:
    """`responses` of a route: its error statuses, and the schemas of a 200 by kind: `json`, `events`,
    `text`."""
    media_types = {"json": "application/json", "events": "text/event-stream", "text": "text/plain"}
    content = {media_types[kind]: {"schema": schema} for kind, schema in schemas.items()}
    return {200: {"description": "OK", "content": content}, **{status: _error(status) for status in errors}}


def object_schema(**properties: str) -> Json:
    """The schema of an object that has at least these fields, given as name=type."""
    fields = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "required": list(fields), "properties": fields}


GENERATION_JSON = object_schema(
    id="string", object="string", created="integer", model="string", choices="array"
)
GENERATION_EVENTS = object_schema(data="string")
"""The data of an event is a chunk as JSON, an error, or [DONE]."""


def _error(status: int) -> Json:
    content = {"application/json": {"schema": {"$ref": _REF_TEMPLATE.format(model="Error")}}}
    return {"description": HTTPStatus(status).phrase, "content": content}


def openapi_document(app: FastAPI, *, with_keys: bool) -> Json:
    """The document of all routes. `with_keys` says that requests need an API key."""
    document = get_openapi(title="Legato", version=__version__, routes=app.routes)
    _, defined = models_json_schema([(model, "validation") for model in BODIES], ref_template=_REF_TEMPLATE)
    document["components"] = {"schemas": {**defined["$defs"], "Error": _ERROR}}
    for path, operation in _operations(document):
        operation["responses"].pop("422", None)  # The web framework's own validation never fails here.
        if with_keys and path not in OPEN_PATHS:
            operation["security"] = [{"key": []}]
            operation["responses"]["401"] = _error(401)
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operations(document: Json) -> Iterable[tuple[str, Json]]:
    paths = document["paths"].items()
    return ((path, operation) for path, methods in paths for operation in methods.values())
