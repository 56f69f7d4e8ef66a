"""Tool calls over HTTP: what the model is told, what it may write, how calls are answered and streamed."""

import asyncio
import json
import threading
from typing import Any

import httpx
import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from server_rig import BOS, ScriptedRunner, ask, build_service, events_of, in_process, plain_runner, spelled
from tool_rig import ANN, PERSON, TEMPLATES, TOOLS, USER, tool_service, written

from legato.server.service import Service
from legato.text.chat import ChatTemplate
from legato.text.grammar import Grammar

CHAT = "/v1/chat/completions"
FORMS = [*TEMPLATES]
LEAVE = {"type": "function", "function": {"name": "leave.now"}}


def asked(service: Service, **fields: object) -> httpx.Response:
    return ask(CHAT, {"messages": USER, "tools": TOOLS, "max_tokens": 300, **fields}, service=service)


def choice_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert isinstance(choice, dict)
    return choice


def joined(response: httpx.Response) -> dict[str, Any]:
    """The message that a client puts together from a stream, and its finish reason, checking on the way
    that chunks have OpenAI's form."""
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = None
    for event in events_of(response.text):
        (choice,) = event["choices"]
        assert finish is None
        finish = choice["finish_reason"]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(call)
            else:
                assert call.keys() == {"index", "function"}
                assert call["index"] == len(message["tool_calls"]) - 1
                assert call["function"].keys() == {"arguments"}
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return {**message, "finish_reason": finish}


def functions_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize("form", FORMS)
class TestCalls:
    @pytest.mark.parametrize("before", ["", "Let me see.\n"])
    def test_a_call_becomes_tool_calls_whole_and_streamed(self, form: str, before: str) -> None:
        text = "" if form == "llama3_json" else before  # there a reply that calls is nothing but the call
        service = lambda: tool_service(ScriptedRunner(spelled(text + written(form, ("greet", ANN)))), form)  # noqa: E731
        choice = choice_of(asked(service()))
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["role"], message["content"], message["refusal"]) == ("assistant", text or None, None)
        assert functions_of(message) == [("greet", ANN)]
        (call,) = message["tool_calls"]
        assert call.keys() == {"id", "type", "function"}
        assert len(call["id"]) == 9 if form == "mistral" else call["id"].startswith("call_")
        streamed = joined(asked(service(), stream=True))
        assert (streamed["content"], functions_of(streamed)) == (text, [("greet", ANN)])
        assert streamed["finish_reason"] == "tool_calls"

    def test_arguments_come_in_pieces_as_they_are_made(self, form: str) -> None:
        service = tool_service(ScriptedRunner(spelled(written(form, ("greet", ANN)))), form)
        deltas = [event["choices"][0]["delta"] for event in events_of(asked(service, stream=True).text)]
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert pieces[0] == {"name": "greet", "arguments": ""}
        assert [piece["arguments"] for piece in pieces[1:]] == list(ANN)

    @pytest.mark.parametrize("choice", ["required", LEAVE, {**LEAVE, "function": {"name": "greet"}}])
    def test_a_call_that_is_demanded_is_made_and_valid(self, form: str, choice: object) -> None:
        """By a runner that would never write one by itself."""
        answer = choice_of(asked(tool_service(plain_runner(), form), tool_choice=choice, max_tokens=480))
        assert answer["finish_reason"] in ("tool_calls", "stop", "length")
        calls = functions_of(answer["message"])
        assert calls
        for name, arguments in calls:
            if answer["finish_reason"] != "length":
                jsonschema.validate(
                    json.loads(arguments), PERSON if name == "greet" else {"maxProperties": 0}
                )
        if isinstance(choice, dict):
            assert [name for name, _ in calls] == [choice["function"]["name"]]
            assert answer["finish_reason"] == "stop"  # as OpenAI's and vLLM's
        else:
            assert answer["finish_reason"] != "stop"
        streamed = joined(
            asked(tool_service(plain_runner(), form), tool_choice=choice, max_tokens=480, stream=True)
        )
        assert functions_of(streamed) == calls
        assert streamed["finish_reason"] == answer["finish_reason"]

    def test_n_replies_call_each_for_itself(self, form: str) -> None:
        runner = ScriptedRunner(spelled(written(form, ("greet", ANN))))
        answer = asked(tool_service(runner, form), n=3).json()
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
        assert len({*ids}) == 3

    def test_a_call_cut_by_max_tokens_is_a_call_with_finish_reason_length(self, form: str) -> None:
        text = written(form, ("greet", ANN))
        runner = lambda: ScriptedRunner(spelled(text))  # noqa: E731
        most = text.index("ann") + 1
        choice = choice_of(asked(tool_service(runner(), form), max_tokens=most))
        assert choice["finish_reason"] == "length"
        assert functions_of(choice["message"]) == [("greet", '{"name": "a')]
        if form != "llama3_json":  # after the marker nothing but a call can come
            marker = text.index(">") + 1 if form == "hermes" else text.index("]") + 1
            for most in range(marker, text.index('"ann"') - len('{"name": ')):
                choice = choice_of(asked(tool_service(runner(), form), max_tokens=most))
                assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
                streamed = joined(asked(tool_service(runner(), form), max_tokens=most, stream=True))
                assert (streamed["content"], streamed["tool_calls"]) == ("", [])
        choice = choice_of(asked(tool_service(runner(), form), max_tokens=9))
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == text[:9]
        assert "tool_calls" not in choice["message"]

    @pytest.mark.parametrize(("stop", "reason"), [('"age"', "stop"), ("}", "stop"), ("<no>", "tool_calls")])
    def test_a_stop_string_in_arguments_leaves_no_call_to_run(
        self, form: str, stop: str, reason: str
    ) -> None:
        text = written(form, ("greet", ANN))
        for stream in (False, True):
            service = tool_service(ScriptedRunner(spelled(text)), form)
            answer = asked(service, stop=stop, stream=stream)
            ended = joined(answer) if stream else choice_of(answer)
            assert ended["finish_reason"] == reason

    def test_an_answer_in_words_is_content(self, form: str) -> None:
        choice = choice_of(asked(tool_service(ScriptedRunner(spelled("No <tool> {needed}.")), form)))
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": "No <tool> {needed}.", "refusal": None}

    def test_log_probabilities_and_ids_are_those_of_all_tokens(self, form: str) -> None:
        text = written(form, ("greet", ANN))
        options = {"logprobs": True, "return_token_ids": True}
        choice = choice_of(asked(tool_service(ScriptedRunner(spelled(text)), form), **options))
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == len(text) + 1
        events = events_of(
            asked(tool_service(ScriptedRunner(spelled(text)), form), stream=True, **options).text
        )
        ids = [id for event in events for id in event["choices"][0].get("token_ids", ())]
        assert ids == choice["token_ids"]


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_several_calls_keep_their_order_and_may_be_forbidden(form: str) -> None:
    text = written(form, ("greet", ANN), ("leave.now", "{}"), ("greet", ANN))
    expected = [("greet", ANN), ("leave.now", "{}"), ("greet", ANN)]
    assert (
        functions_of(choice_of(asked(tool_service(ScriptedRunner(spelled(text)), form)))["message"])
        == expected
    )
    streamed = joined(asked(tool_service(ScriptedRunner(spelled(text)), form), stream=True))
    assert functions_of(streamed) == expected
    assert [call["index"] for call in streamed["tool_calls"]] == [0, 1, 2]
    forbidden = asked(
        tool_service(ScriptedRunner(spelled(text)), form), parallel_tool_calls=False, tool_choice="required"
    )
    assert forbidden.status_code == 400  # the scripted runner draws what it may not


def test_with_tool_choice_none_the_model_is_told_of_no_tools_and_writes_what_it_likes() -> None:
    text = written("hermes", ("greet", ANN))
    runner = ScriptedRunner(spelled(text))
    choice = choice_of(asked(tool_service(runner), tool_choice="none"))
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    assert "tool_calls" not in choice["message"]


class TestPrompt:
    """What the template is given."""

    CONVERSATION = [  # noqa: RUF012
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "greet", "arguments": ANN}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "hello"},
    ]

    def prompt(self, service: Service, **fields: object) -> str:
        body = {"messages": self.CONVERSATION, "tools": TOOLS, "max_tokens": 1, "return_token_ids": True}
        response = ask(CHAT, {**body, **fields}, service=service)
        assert response.status_code == 200, response.text
        ids = response.json()["prompt_token_ids"]
        return bytes(id for id in ids if id != BOS).decode()

    def test_calls_and_results_go_to_a_template_that_knows_them(self) -> None:
        call = '<assistant><tool_call>{"name": "greet", "arguments": {"name": "ann", "age": 7}}</tool_call>'
        conversation = f"<user>hi{call}<tool>hello"
        assert self.prompt(tool_service()) == f"{conversation}[2 tools]<assistant>"
        assert self.prompt(tool_service(), tool_choice="none") == f"{conversation}<assistant>"
        assert self.prompt(tool_service(), tools=[]) == f"{conversation}<assistant>"

    def test_a_template_that_knows_no_tools_gets_them_in_our_words(self) -> None:
        body = {"messages": self.CONVERSATION, "tools": TOOLS[1:]}
        ids = ask("/tokenize", body, service=build_service()).json()["tokens"]
        prompt = bytes(id for id in ids if id != BOS).decode()
        assert prompt.startswith("<system>These functions can be called")
        assert '{"name": "leave.now"}' in prompt
        assert f'<assistant><tool_call>\n{{"name": "greet", "arguments": {ANN}}}\n</tool_call>' in prompt
        assert prompt.endswith("<user><tool_response>\nhello\n</tool_response><assistant>")

    def test_without_tools_results_of_earlier_calls_are_still_in_our_words(self) -> None:
        assert self.prompt(build_service(), tools=[]).startswith("<user>hi<assistant><tool_call>\n")

    def test_tokenize_shows_the_prompt_with_tools(self) -> None:
        service = tool_service()
        ids = ask("/tokenize", {"messages": USER, "tools": TOOLS}, service=service).json()["tokens"]
        assert bytes(id for id in ids if id != BOS).decode() == "<user>hi[2 tools]<assistant>"

    def test_an_answer_with_calls_can_be_sent_back_as_it_is(self) -> None:
        text = written("hermes", ("greet", ANN))
        message = choice_of(asked(tool_service(ScriptedRunner(spelled(text)))))["message"]
        streamed = joined(asked(tool_service(ScriptedRunner(spelled(text))), stream=True))
        for calls in (message["tool_calls"], streamed["tool_calls"]):
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "hello"}
            messages = [*USER, {**message, "tool_calls": calls}, result]
            assert asked(tool_service(), messages=messages, max_tokens=3).status_code == 200


class TestTogether:
    """Tools and a response format."""

    FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}  # noqa: RUF012

    @pytest.mark.parametrize("form", FORMS)
    def test_the_reply_is_of_the_format_or_a_call(self, form: str) -> None:
        called = tool_service(ScriptedRunner(spelled(written(form, ("leave.now", "{}")))), form)
        assert choice_of(asked(called, response_format=self.FORMAT))["finish_reason"] == "tool_calls"
        choice = choice_of(
            asked(tool_service(ScriptedRunner(spelled(ANN)), form), response_format=self.FORMAT)
        )
        assert choice["message"]["content"] == ANN

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("stream", [False, True])
    def test_content_that_looks_like_a_call_is_content_or_a_valid_call(self, form: str, stream: bool) -> None:
        """What no tool's schema checked is never told as a call, and a call is never taken for JSON."""
        wrong, right = '{"name": "eve", "age": 7}', ANN
        key = "parameters" if form == "llama3_json" else "arguments"
        wrong_call = f'{{"name": "greet", "{key}": {wrong}}}'
        empty_call = f'{{"name": "greet", "{key}": {{}}}}'
        in_text = f'{{"a": {json.dumps(written(form, ("greet", wrong)))}}}'
        texts: dict[str, tuple[str, list[tuple[str, str]]]] = {
            empty_call: (empty_call, []),
            wrong_call: (wrong_call, []),
            in_text: (in_text, []),
            written(form, ("greet", right)): ("", [("greet", right)]),
        }
        for text, expected in texts.items():
            service = tool_service(ScriptedRunner(spelled(text)), form)
            answer = asked(service, response_format={"type": "json_object"}, stream=stream)
            message = joined(answer) if stream else choice_of(answer)["message"]
            assert (message["content"] or "", functions_of(message)) == expected

    def test_with_tool_choice_none_it_is_of_the_format(self) -> None:
        choice = choice_of(
            asked(tool_service(plain_runner()), tool_choice="none", response_format=self.FORMAT)
        )
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)

    def test_another_form_is_refused_together_with_tools(self) -> None:
        response = asked(tool_service(), guided_regex="a")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")
        assert asked(tool_service(plain_runner()), guided_regex="a", tool_choice="none").status_code == 200


def tool(name: str, **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "200 tools": ("tools", {"tools": [tool(f"f{i}") for i in range(200)]}, "at most 128 items"),
    "one name twice": (
        "tools[2].function.name",
        {"tools": [tool("a"), tool("b"), tool("a")]},
        "duplicate function name a",
    ),
    "no function": ("tools[0].function", {"tools": [{"type": "function"}]}, "required"),
    "another type": ("tools[0].type", {"tools": [{"type": "web_search"}]}, "function"),
    "no name": ("tools[0].function.name", {"tools": [tool("")]}, "pattern"),
    "a name with a quote": ("tools[0].function.name", {"tools": [tool('a"b')]}, "pattern"),
    "parameters that are none": ("tools[0].function.parameters", {"tools": [tool("a", parameters=5)]}, ""),
    "an invalid schema": (
        "tools[1].function.parameters",
        {"tools": [tool("a"), tool("b", strict=True, parameters={"properties": {"x": {"type": "strang"}}})]},
        "tools[1].function.parameters.properties.x.type: Invalid type: strang",
    ),
    "an invalid schema, called by name": (
        "tools[1].function.parameters",
        {
            "tools": [
                tool("a"),
                tool("b", strict=True, parameters={"properties": {"x": {"$ref": "#/no"}}}),
            ],
            "tool_choice": tool("b"),
        },
        "tools[1].function.parameters.properties.x.$ref: Pointer '/no'",
    ),
    "strict, with arguments of another type": (
        "tools[0].function.parameters",
        {"tools": [tool("a", strict=True, parameters={"type": "array"})]},
        'tools[0].function.parameters.type: must be "object"',
    ),
    "arguments that are no object": (
        "tools[0].function.parameters",
        {"tools": [tool("a", parameters={"type": "object", "allOf": [{"type": "array"}]})]},
        "",
    ),
    "strict, with an unknown keyword": (
        "tools[0].function.parameters",
        {"tools": [tool("a", strict=True, parameters={"properties": {"x": {"not": {}}}})]},
        '["not"]',
    ),
    "schemas of 1 MB": (
        "tools",
        {
            "tools": [
                tool(f"f{i}", parameters={"properties": {"x": {"enum": ["y" * 10_000]}}}) for i in range(100)
            ]
        },
        "at most 262144",
    ),
    "an unknown name": ("tool_choice", {"tools": TOOLS, "tool_choice": tool("rm")}, "not one of"),
    "a name without tools": ("tool_choice", {"tools": [], "tool_choice": tool("rm")}, "not one of"),
    "required without tools": ("tool_choice", {"tool_choice": "required", "tools": []}, "without tools"),
    "another choice": ("tool_choice", {"tool_choice": "any"}, "must be none, auto, required or {"),
    "allowed_tools": ("tool_choice", {"tool_choice": {"type": "allowed_tools"}}, "must be none, auto"),
    "functions": ("functions", {"functions": [{"name": "a"}]}, "not supported"),
    "a user's calls": (
        "messages[0].tool_calls",
        {"messages": [{**USER[0], "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": ""}}]}]},
        "assistant",
    ),
    "a result without its call": (
        "messages[1].tool_call_id",
        {"messages": [*USER, {"role": "tool", "content": "a"}]},
        "required",
    ),
}


@pytest.mark.parametrize(("param", "fields", "hint"), REFUSED.values(), ids=REFUSED.keys())
def test_tools_that_cannot_be_are_refused_by_name(param: str, fields: dict[str, object], hint: str) -> None:
    for streamed in (False, True):
        response = asked(tool_service(), stream=streamed, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param, error
        assert hint in error["message"]


PATTERNED = {
    "type": "object",
    "properties": {"p": {"type": "string", "pattern": "^(?!-)[a-z]+$"}, "city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PATTERN = "tools[1].function.parameters.properties.p.pattern"


@pytest.mark.parametrize("stream", [False, True])
def test_n_03_a_tool_that_cannot_be_followed_whole_stops_no_request_and_is_told(stream: bool) -> None:
    """The other tool stays as strict as it is, and so does the rest of this one."""
    tools = [tool("greet", strict=True, parameters=PERSON), tool("x", parameters=PATTERNED)]
    for choice in ("auto", "required", tool("x")):
        response = asked(
            tool_service(plain_runner()), tools=tools, tool_choice=choice, stream=stream, max_tokens=400
        )
        assert response.status_code == 200, response.text
        assert response.headers["X-Legato-Notice"] == f"schema keywords left out: {PATTERN}"
        called = functions_of(joined(response) if stream else choice_of(response)["message"])
        if choice == tool("x"):
            ((_, arguments),) = called
            assert json.loads(arguments)["city"] in ("Paris", "Rome")
    response = asked(tool_service(plain_runner()), tools=tools[:1], stream=stream)
    assert "X-Legato-Notice" not in response.headers


def test_tools_that_are_not_called_are_not_looked_at() -> None:
    tools = [tool("a"), tool("b", strict=True, parameters=PATTERNED)]
    response = asked(tool_service(plain_runner()), tools=tools, tool_choice=tool("a"))
    assert response.status_code == 200
    assert asked(tool_service(plain_runner()), tools=tools, tool_choice="none").status_code == 200


@pytest.mark.parametrize(
    ("type_", "left_out"), [(None, False), (["object", "null"], False), ("array", True), ("obj", True)]
)
def test_arguments_are_an_object_whatever_type_a_tool_names(type_: object, left_out: bool) -> None:
    tools = [tool("a", parameters={**PERSON, "type": type_})]
    response = asked(tool_service(plain_runner()), tools=tools, tool_choice="required")
    jsonschema.validate(json.loads(functions_of(choice_of(response)["message"])[0][1]), PERSON)
    assert ("X-Legato-Notice" in response.headers) is left_out


def test_128_tools_are_served() -> None:
    many = [tool(f"function_{i}", parameters=PERSON) for i in range(128)]
    choice = choice_of(asked(tool_service(plain_runner()), tools=many, tool_choice=tool("function_77")))
    assert [name for name, _ in functions_of(choice["message"])] == ["function_77"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frame", ["```json\n{}\n```", "```\n{}\n```", "\n\n{}"])
def test_with_128_tools_a_call_without_a_marker_is_no_harder_to_follow(form: str, frame: str) -> None:
    """What all calls have in common is followed once: for each tool it was too much work for one token."""
    many = [tool(f"function_{i}", parameters=PERSON) for i in range(128)]
    key = "parameters" if form == "llama3_json" else "arguments"
    text = frame.format(f'{{"name": "function_77", "{key}": {ANN}}}')
    service = tool_service(ScriptedRunner(spelled(text)), form)
    assert functions_of(choice_of(asked(service, tools=many))["message"]) == [("function_77", ANN)]


@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json"])
def test_the_form_of_calls_can_be_set(parser: str) -> None:
    service = tool_service(ScriptedRunner(spelled(written(parser, ("greet", ANN)))), tool_call_parser=parser)
    assert functions_of(choice_of(asked(service))["message"]) == [("greet", ANN)]


def test_requests_with_and_without_tools_run_side_by_side() -> None:
    service = tool_service(plain_runner())

    async def run() -> list[httpx.Response]:
        async with in_process(service) as client:
            with_tools = {"tools": TOOLS, "tool_choice": LEAVE, "max_tokens": 400}
            bodies: list[dict[str, object]] = [with_tools, {"max_tokens": 90}] * 4
            posts = [client.post(CHAT, json={"messages": USER, **body}) for body in bodies]
            return await asyncio.gather(*posts)

    answers = [choice_of(response) for response in asyncio.run(run())]
    alone = choice_of(ask(CHAT, {"messages": USER, "max_tokens": 90}, service=tool_service(plain_runner())))
    assert all(answer == alone for answer in answers[1::2])
    assert {answer["finish_reason"] for answer in answers[::2]} == {"stop"}


def test_a_base_model_without_a_template_says_so() -> None:
    response = asked(build_service(chat_template=None))
    assert "no chat template" in response.json()["error"]["message"]


def test_templates_are_asked_once_for_their_form() -> None:
    template = ChatTemplate(TEMPLATES["hermes"], bos_token="", eos_token="")
    service = build_service(chat_template=template)
    assert service.model.tool_use is service.model.tool_use


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "assistant", "content": "b", "reasoning": "because", "reasoning_content": ""},
        {"role": "tool", "tool_call_id": "call_1", "content": None},
        *(
            {"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "greet", **arguments}}]}
            for arguments in ({}, {"arguments": None}, {"arguments": {"a": 1}}, {"arguments": "no JSON"})
        ),
    ],
)
def test_turns_that_come_back_from_clients_do_not_end_a_session(turn: dict[str, Any]) -> None:
    body = {"messages": [*USER, turn, *USER], "max_tokens": 1}
    for build in (tool_service, build_service):
        assert ask(CHAT, body, service=build()).status_code == 200
        assert ask("/tokenize", {"messages": body["messages"]}, service=build()).status_code == 200


def test_what_tells_calls_from_json_is_made_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a schema of 300 properties it takes a third of a second."""
    made_in: list[str] = []
    make = Grammar._new_matcher

    def noted(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
        made_in.append(threading.current_thread().name)
        return make(grammar, tokens)

    monkeypatch.setattr(Grammar, "_new_matcher", noted)
    schema = {"type": "object", "properties": {"only_here": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    # No other test asks for this function, so nothing of it is kept from before.
    tools = [{"type": "function", "function": {"name": "asked_only_here", "parameters": PERSON}}]
    text = written("llama3_json", ("asked_only_here", ANN))
    service = tool_service(ScriptedRunner(spelled(text)), "llama3_json")
    response = asked(service, response_format=form, tools=tools)
    assert choice_of(response)["finish_reason"] == "tool_calls"
    assert len(made_in) == 3  # of all replies, of calls alone, and of their text
    assert threading.current_thread().name not in made_in


def test_a_conversation_whose_turns_the_template_drops_is_refused() -> None:
    template = ChatTemplate("{{ messages[-1].content }}", bos_token="<bos>", eos_token="<eos>")
    messages = [*USER, {"role": "assistant", "content": "b"}, *USER]
    response = ask(CHAT, {"messages": messages}, service=build_service(chat_template=template))
    assert response.status_code == 400
    assert "messages[1]: this model's chat template drops messages of role assistant" in response.text
    service = build_service(chat_template=template)
    assert ask(CHAT, {"messages": USER, "max_tokens": 1}, service=service).status_code == 200
