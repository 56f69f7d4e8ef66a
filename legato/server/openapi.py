"""The page at /openapi.json: what each route takes and answers, from the same models that check requests.

The routes read their bodies themselves, so that errors have OpenAI's shape; here they say what they read.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from legato import __version__
from legato.server.guards import OPEN_PATHS
from legato.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)

Json = dict[str, Any]

BODIES = (CompletionBody, ChatBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody)
_TEMPLATE = "#/components/schemas/{model}"

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


def takes(*kinds: type[BaseModel]) -> Json:
    """`openapi_extra` of a route that reads a body of one of these kinds."""
    refs = [{"$ref": _TEMPLATE.format(model=kind.__name__)} for kind in kinds]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(*errors: int, **kinds: Json) -> dict[int | str, Json]:
    """`responses` of a route: the errors that it may answer with, and its answer's schema by kind:
    `json`, `events`, `text`."""
    names = {"json": "application/json", "events": "text/event-stream", "text": "text/plain"}
    content = {names[kind]: {"schema": schema} for kind, schema in kinds.items()}
    return {200: {"description": "OK", "content": content}, **{status: _error(status) for status in errors}}


def has(**properties: str) -> Json:
    """The schema of an object that has at least these fields, name=type."""
    fields = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "required": list(fields), "properties": fields}


GENERATED = has(id="string", object="string", created="integer", model="string", choices="array")
EVENTS = has(data="string")
"""Each event of a stream: its data is a chunk as JSON, an error, or [DONE]."""


def _error(status: int) -> Json:
    content = {"application/json": {"schema": {"$ref": _TEMPLATE.format(model="Error")}}}
    return {"description": HTTPStatus(status).phrase, "content": content}


def page(app: FastAPI, *, with_keys: bool) -> Json:
    """The whole page. `with_keys` says that the routes ask for a key."""
    made = get_openapi(title="Legato", version=__version__, routes=app.routes)
    _, defined = models_json_schema([(kind, "validation") for kind in BODIES], ref_template=_TEMPLATE)
    made["components"] = {"schemas": {**defined["$defs"], "Error": _ERROR}}
    for path, operation in _operations(made):
        operation["responses"].pop("422", None)  # the web framework's own check of parameters never fails
        if with_keys and path not in OPEN_PATHS:
            operation["security"] = [{"key": []}]
            operation["responses"]["401"] = _error(401)
    if with_keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return made


def _operations(made: Json) -> Iterable[tuple[str, Json]]:
    return ((path, operation) for path, methods in made["paths"].items() for operation in methods.values())
