"""LangChain's ChatOpenAI."""

from typing import Any

import httpx
from langchain_openai import ChatOpenAI
from questions import ANSWERS, LONG, MESSAGES, SCHEMA, SHORT, TOOL, check_call, run

TEXT = MESSAGES[0]["content"]


def model(url: str, max_tokens: int, **settings: Any) -> Any:
    name = httpx.get(f"{url}/models").json()["data"][0]["id"]
    return ChatOpenAI(
        model=name, base_url=url, api_key="none", temperature=0, max_tokens=max_tokens, **settings
    )


def chat(url: str) -> None:
    answer = model(url, SHORT).invoke(TEXT)
    assert isinstance(answer.content, str)
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert 0 < answer.usage_metadata["output_tokens"] <= SHORT


def stream(url: str) -> None:
    whole = model(url, SHORT).invoke(TEXT).content
    assert "".join(chunk.content for chunk in model(url, SHORT, stream_usage=True).stream(TEXT)) == whole


def tool(url: str) -> None:
    bound = model(url, LONG).bind_tools([TOOL], tool_choice="get_weather")
    (call,) = bound.invoke(TEXT).tool_calls
    check_call(call["name"], call["args"])


def schema(url: str) -> None:
    bound = model(url, LONG).with_structured_output({"title": "answer", **SCHEMA}, method="json_schema")
    assert bound.invoke(TEXT)["answer"] in ANSWERS


if __name__ == "__main__":
    run(chat=chat, stream=stream, tool=tool, schema=schema)
