"""The official Python client."""

from typing import Any

import openai
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
    """With the first model that the server lists."""
    client = openai.OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, **body)


def chat(url: str) -> None:
    answer = ask(url, max_tokens=SHORT, n=2, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert isinstance(choice.message.content, str)
        assert choice.finish_reason in ("stop", "length")
        assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream(url: str) -> None:
    whole = ask(url, max_tokens=SHORT).choices[0].message.content
    chunks = list(ask(url, max_tokens=SHORT, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens <= SHORT


def tool(url: str) -> None:
    (call,) = ask(url, max_tokens=LONG, tools=[TOOL], tool_choice=TOOL_CHOICE).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def schema(url: str) -> None:
    check_json(ask(url, max_tokens=LONG, response_format=RESPONSE_FORMAT).choices[0].message.content)


if __name__ == "__main__":
    run(chat=chat, stream=stream, tool=tool, schema=schema)
