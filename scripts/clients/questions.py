"""What every Python client asks, and what must be in the answers. Needs no client."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

MESSAGES: list[Any] = [{"role": "user", "content": "Say something about Paris."}]
CITIES, ANSWERS = ["Paris", "Oslo"], ["yes", "no"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TOOL_CHOICE: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ANSWERS}},
    "required": ["answer"],
    "additionalProperties": False,
}
RESPONSE_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
}
SHORT, LONG = 16, 64
"""Most tokens of a plain reply and of one that must be complete."""


def check_call(name: str, arguments: str | Mapping[str, Any]) -> None:
    """A tool call is that of `TOOL`, with arguments that fit."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather", name
    assert read["city"] in CITIES, read


def check_json(content: str) -> None:
    """A reply keeps `SCHEMA`."""
    assert json.loads(content)["answer"] in ANSWERS, content


def run(**checks: Callable[[str], None]) -> None:
    """Run the checks that the command line names, each with the server's address; status 1 if one fails."""
    url, *names = sys.argv[1:]
    failed = False
    for name in names:
        try:
            checks[name](url)
            print(f"{name}: ok", flush=True)
        except Exception as error:  # whatever a client makes of an answer
            failed = True
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)
