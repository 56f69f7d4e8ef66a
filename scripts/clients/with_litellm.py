"""LiteLLM, with the server as one of its OpenAI-compatible providers."""

from typing import Any

import httpx
import litellm
from questions import (
    LONG,
    MESSAGES,
    RESPONSE_FORMAT,
    SHORT,
    TOOL,
    TOOL_CHOICE,
    check_call,
    check_json,
    run,
)


def ask(url: str, **body: Any) -> Any:
    model = httpx.get(f"{url}/models").json()["data"][0]["id"]
    return litellm.completion(
        model=f"openai/{model}", api_base=url, api_key="none", messages=MESSAGES, temperature=0, **body
    )


def chat(url: str) -> None:
    answer = ask(url, max_tokens=SHORT)
    assert isinstance(answer.choices[0].message.content, str)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= SHORT


def stream(url: str) -> None:
    whole = ask(url, max_tokens=SHORT).choices[0].message.content
    chunks = ask(url, max_tokens=SHORT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def tool(url: str) -> None:
    (call,) = ask(url, max_tokens=LONG, tools=[TOOL], tool_choice=TOOL_CHOICE).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def schema(url: str) -> None:
    check_json(ask(url, max_tokens=LONG, response_format=RESPONSE_FORMAT).choices[0].message.content)


if __name__ == "__main__":
    run(chat=chat, stream=stream, tool=tool, schema=schema)
