"""Reads the bytes of a request as one of the bodies in `bodies`. Errors name the field."""

import json
import re
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from legato.errors import RequestError
from legato.server.schema.base import Body
from legato.server.schema.unknown_fields import UnknownFields
from legato.server.transport.work_pool import WorkPool

MAX_STRUCTURE = 2**18
"""The most characters `[`, `{` and `:` in a body. Outside of strings they are its lists, objects and fields,
and 32 MB can hold millions of them. `json` parses without releasing the interpreter lock, which would block
all other threads for seconds. A string with that many of these characters has millions of tokens."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The only way in which JSON in UTF-8 can contain a surrogate."""

B = TypeVar("B", bound=Body)

_Location = tuple["_Location | None", str | int]
"""The position of a value in JSON: the location of its container, and its name or index there."""


async def read_body(
    request: Request, kind: type[B], work: WorkPool, unknown: UnknownFields, check: Callable[[B], None]
) -> B:
    """The body as a `kind` that passes `check`. Raises `RequestError` that names the first wrong field."""
    raw = await request.body()

    def read() -> B:
        body = as_body(parse_json(raw), kind, unknown)
        check(body)
        return body

    return await work.run(len(raw), read)


def as_body(data: object, kind: type[B], unknown: UnknownFields) -> B:
    """JSON data as a `kind`. Raises `RequestError` that names the first wrong field."""
    try:
        return kind.model_validate(data, context=unknown)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
    raise _request_error(
        details
    )  # outside the handler, so that the error has no context that quotes the body


def parse_json(raw: bytes) -> object:
    """The body as JSON. Raises `RequestError` if it is not valid."""
    if sum(map(raw.count, (b"[", b"{", b":"))) > MAX_STRUCTURE:
        raise RequestError(f"the body has more than {MAX_STRUCTURE} of the characters [ {{ : in all")
    try:
        data: object = json.loads(raw.decode())
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise RequestError(f"the body is not valid JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError:  # An integer with more digits than Python converts.
        raise RequestError("the body contains a number that is too long") from None
    if _SURROGATE.search(raw):
        _refuse_lone_surrogates(data)
    return data


def _refuse_lone_surrogates(data: object) -> None:
    """Half of a surrogate pair is valid JSON but not text. Refused here, no later code has to handle it."""
    left: list[tuple[_Location | None, object]] = [(None, data)]
    while left:
        location, value = left.pop()
        if isinstance(value, str) and not _is_text(value):
            param = _dotted(_path(location))
            raise RequestError(f"{param or 'the body'}: contains a lone surrogate", param=param or None)
        if isinstance(value, dict):
            if not all(map(_is_text, value)):
                param = _dotted(_path(location))
                problem = f"{param or 'the body'}: the name of a field contains a lone surrogate"
                raise RequestError(problem, param=param or None)
            left += [((location, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [((location, index), inner) for index, inner in enumerate(value)]


def _path(location: "_Location | None") -> list[str | int]:
    steps = []
    while location is not None:
        location, step = location
        steps.append(step)
    return steps[::-1]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _request_error(details: ErrorDetails) -> RequestError:
    """The path and the words of Legato or pydantic, never the client's text."""
    field = details.get("ctx", {}).get("field")
    param = _dotted([*details["loc"], *([] if field is None else [field])])
    if details["type"] == "unknown":
        return RequestError(f"unknown field {param}", param=param)
    problem = details["msg"].replace("Input should be", "must be")
    return RequestError(f"{param or 'the body'}: {problem[:1].lower()}{problem[1:]}", param=param or None)


def _dotted(path: list[str | int]) -> str:
    """messages[0].content for ("messages", 0, "content")."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text[:200]
