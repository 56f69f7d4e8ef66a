"""Structured output and tools through the official Python client: its types, its parsers, its streams."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from server_rig import MODEL, Connect, RunningServer, ScriptedRunner, StartServer, plain_runner, spelled
from tool_rig import ANN, TOOLS, USER, tool_service, written


class Person(BaseModel):
    name: Literal["ann", "bob"]
    age: Literal[7, 8]
    tags: list[Literal["x"]] | None


class Greet(BaseModel):
    """Says hello."""

    name: Literal["ann", "bob"]
    age: int


@pytest.fixture
def serve_tools(start_server: StartServer) -> Any:
    def serve(runner: object) -> RunningServer:
        return start_server(runner, chat_template=tool_service().model.chat_template)

    return serve


def test_parse_gives_an_object_of_the_clients_own_class(start_server: StartServer, connect: Connect) -> None:
    client = connect(start_server(plain_runner()))
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=USER,
        response_format=Person,
        max_tokens=400,  # type: ignore[arg-type]
    )
    assert isinstance(completion.choices[0].message.parsed, Person)


def test_a_stream_is_parsed_at_its_end(start_server: StartServer, connect: Connect) -> None:
    client = connect(start_server(plain_runner()))
    with client.chat.completions.stream(
        model=MODEL,
        messages=USER,
        response_format=Person,
        max_tokens=400,  # type: ignore[arg-type]
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert isinstance(message.parsed, Person)
    assert "content.delta" in kinds


def test_a_call_is_typed_and_its_arguments_are_parsed(serve_tools: Any, connect: Connect) -> None:
    client = connect(serve_tools(ScriptedRunner(spelled(written("hermes", ("Greet", ANN))))))
    tools: Any = [openai.pydantic_function_tool(Greet)]
    completion = client.chat.completions.parse(model=MODEL, messages=USER, tools=tools)  # type: ignore[arg-type]
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.function.parsed_arguments == Greet(name="ann", age=7)


def test_a_streamed_call_is_put_together_by_the_client(serve_tools: Any, connect: Connect) -> None:
    text = "Well.\n" + written("hermes", ("greet", ANN), ("leave.now", "{}"))
    client = connect(serve_tools(ScriptedRunner(spelled(text))))
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
        pieces = [
            event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well.\n"
    calls = choice.message.tool_calls or ()
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("greet", ANN),
        ("leave.now", "{}"),
    ]
    assert "".join(pieces) == ANN + "{}"


def test_a_conversation_goes_round_from_call_to_answer(serve_tools: Any, connect: Connect) -> None:
    client = connect(serve_tools(plain_runner()))
    create: Any = client.chat.completions.create
    choice = {"type": "function", "function": {"name": "greet"}}
    first = create(model=MODEL, messages=USER, tools=TOOLS, tool_choice=choice, max_tokens=400).choices[0]
    (call,) = first.message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"name", "age"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "hello ann"}
    second = create(
        model=MODEL,
        messages=[*USER, first.message.model_dump(exclude_none=True), result],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=5,
    )
    assert second.choices[0].message.content is not None


def test_a_refused_schema_names_its_field(start_server: StartServer, connect: Connect) -> None:
    client = connect(start_server(plain_runner()))
    format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "strang"}, "strict": True},
    }
    with pytest.raises(openai.BadRequestError, match="Invalid type: strang") as caught:
        client.chat.completions.create(model=MODEL, messages=USER, response_format=format)  # type: ignore[arg-type]
    assert caught.value.param == "response_format.json_schema.schema"
