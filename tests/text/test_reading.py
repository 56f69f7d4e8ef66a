"""Templates that drop what they are given without a word are found out, and given the form that they read."""

import json
import re

import pytest

from legato.errors import RequestError
from legato.text.chat import BUILTIN_TEMPLATES, ChatTemplate, Message
from legato.text.reading import SHORT_ID
from legato.text.tool_calls import tool_use

USER: Message = {"role": "user", "content": "Hi"}
REPLY: Message = {"role": "assistant", "content": "Hello."}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
START, END = "{% for m in messages %}[{{ m.role }}]", "{% endfor %}"
AS_TEXT = START + "{{ m.content }}" + END
AS_PARTS = (
    START
    + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    + END
)
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ ARGUMENTS }} {{ c.id }}>{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def template(source: str, tool_use: ChatTemplate | None = None) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>", tool_use=tool_use)


def calls(arguments: str) -> str:
    return AS_TEXT.replace(END, CALLS.replace("ARGUMENTS", arguments) + END) + TOOLS


def call(arguments: object = "{}", id: str = "call_0123456789") -> list[Message]:
    """A call and its result."""
    function = {"name": "f", "arguments": arguments}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": id, "function": function}]},
        {"role": "tool", "content": "R", "tool_call_id": id},
    ]


@pytest.mark.parametrize(
    "source",
    [
        AS_TEXT,
        AS_PARTS,
        START + "{{ m.content[0].text }}" + END,
        START + "{% if m.content is string %}{{ m.content }}{% endif %}" + END,
        START + "{% if m.content is not string %}{{ m.content[0]['text'] }}{% endif %}" + END,
        START + "{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}" + END,
    ],
)
@pytest.mark.parametrize("content", ["a b", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_content_is_given_in_the_form_that_is_read(source: str, content: object) -> None:
    read = template(source)
    message: Message = {"role": "user", "content": content}
    text = "a b" if isinstance(content, str) else "a\nb"
    messages = [SYSTEM, message, REPLY, USER]
    assert read.render(messages) == f"[system]Be brief.[user]{text}[assistant]Hello.[user]Hi"
    read.refuse_unread(messages)


@pytest.mark.parametrize("source", [AS_TEXT, AS_PARTS])
def test_a_reply_is_continued_in_either_form(source: str) -> None:
    continued = template(source + "[more]").render(
        [USER, REPLY], continue_final_message=True, add_generation_prompt=False
    )
    assert continued == "[user]Hi[assistant]Hello."


@pytest.mark.parametrize(
    ("source", "role"),
    [
        (START + "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}" + END, "assistant"),
        ("{{ messages[-1].content }}", "assistant"),
        (START + END, "user"),
    ],
)
def test_a_conversation_is_never_answered_without_its_content(source: str, role: str) -> None:
    read = template(source)
    with pytest.raises(RequestError, match=rf"drops messages of role {role}") as refused:
        read.refuse_unread([USER, REPLY, USER])
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert any(role in change and "refused" in change for change in read.changes)
    if role == "assistant":
        read.refuse_unread([USER, {**REPLY, "content": ""}, USER])


NO_SYSTEM = START + "{% if m.role != 'system' %}{{ m.content }}{% endif %}" + END
FIRST_SYSTEM = (
    START.replace("[", "{% if m.role != 'system' or loop.first %}[") + "{{ m.content }}{% endif %}" + END
)


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (AS_TEXT, [SYSTEM, SYSTEM, USER], "[system]Be brief.[system]Be brief.[user]Hi"),
        (NO_SYSTEM, [SYSTEM, USER], "[user]Be brief.\n\nHi"),
        (NO_SYSTEM, [SYSTEM, SYSTEM, USER], "[user]Be brief.\n\nBe brief.\n\nHi"),
        (NO_SYSTEM, [SYSTEM, REPLY, USER], "[user]Be brief.[assistant]Hello.[user]Hi"),
        (NO_SYSTEM, [SYSTEM], "[user]Be brief."),
        (NO_SYSTEM, [USER, REPLY, SYSTEM, USER], "[user]Hi[assistant]Hello.[user]Be brief.\n\nHi"),
        (NO_SYSTEM, [USER, SYSTEM], "[user]Hi\n\nBe brief."),
        (FIRST_SYSTEM, [SYSTEM, SYSTEM, USER], "[system]Be brief.\n\nBe brief.[user]Hi"),
        (
            FIRST_SYSTEM,
            [SYSTEM, USER, REPLY, SYSTEM, USER],
            "[system]Be brief.[user]Hi[assistant]Hello.[user]Be brief.\n\nHi",
        ),
        (FIRST_SYSTEM, [{**SYSTEM, "role": "developer"}, USER], "[system]Be brief.[user]Hi"),
    ],
)
def test_a_system_message_that_would_be_dropped_is_the_users_text(
    source: str, messages: list[Message], expected: str
) -> None:
    assert template(source).render(messages) == expected


def test_a_template_that_refuses_a_system_message_says_so_itself() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + AS_TEXT
    )
    with pytest.raises(RequestError, match=r"^chat template: no system here$"):
        template(source).render([SYSTEM, USER])


IDS = (
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "{% endfor %}"
)


class TestIds:
    """Case N-01."""

    def rendered(self, *messages: Message) -> str:
        source = calls("c.function.arguments | tojson").replace(
            END, IDS + "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}" + END
        )
        return template(source).render(messages, tools=[TOOL])

    def test_call_and_result_get_the_same_short_id(self) -> None:
        prompt = self.rendered(*call())
        (short,) = re.findall(r"<f {} (\w{9})>", prompt)
        assert short.isalnum()
        assert f"[tool]R<{short}>" in prompt
        assert prompt == self.rendered(*call())
        assert short not in self.rendered(*call(id="call_9876543210"))

    def test_ids_that_are_taken_stay(self) -> None:
        assert f"[tool]R<{SHORT_ID}>" in self.rendered(*call(id=SHORT_ID))

    def test_calls_without_ids_go_with_results_by_their_order(self) -> None:
        user, assistant, result = call()
        function = {"name": "f", "arguments": "{}"}
        several: Message = {
            **assistant,
            "tool_calls": [{"id": "", "function": function}, {"function": function}],
        }
        results: list[Message] = [{**result, "tool_call_id": ""}, {"role": "tool", "content": "S"}]
        prompt = self.rendered(user, several, *results)
        ids = re.findall(r"<f {} (\w{9})>", prompt)
        assert len(set(ids)) == 2
        assert f"[tool]R<{ids[0]}>[tool]S<{ids[1]}>" in prompt


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize(
    "writes",
    ["c.function.arguments | tojson", "'' + c.function.arguments", "c.function.arguments.items() | list"],
)
def test_arguments_have_the_form_that_is_read(writes: str, arguments: object) -> None:
    expected = "[('a', 1)]" if "items" in writes else '{"a": 1}'
    assert f"<f {expected} call_0123456789>" in template(calls(writes)).render(call(arguments), tools=[TOOL])


@pytest.mark.parametrize("arguments", [None, "", " ", "null", "{no", "5", "[1]", '"a"', "{}"])
@pytest.mark.parametrize(
    "writes",
    ["c.function.arguments | tojson", "'' + c.function.arguments", "c.function.arguments.items() | list"],
)
def test_arguments_that_are_no_object_never_end_a_session(writes: str, arguments: object) -> None:
    prompt = template(calls(writes)).render(call(arguments), tools=[TOOL])
    is_empty = arguments in (None, "", " ", "null", "{}")
    assert ("<f {} " in prompt or "<f [] " in prompt) is is_empty
    if not is_empty:
        assert str(arguments).strip('"') in prompt.replace('\\"', "")


def test_results_get_the_name_of_their_function_where_a_template_needs_it() -> None:
    source = calls("c.function.arguments | tojson").replace(
        END, "{% if m.role == 'tool' %}{{ '(' + m.name + ')' }}{% endif %}" + END
    )
    assert "[tool]R(f)" in template(source).render(call(), tools=[TOOL])
    assert "name" not in template(AS_TEXT + "{{ messages[-1].name }}").render(call())


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_reach_templates_that_have_a_place_for_them(key: str) -> None:
    """Case N-05."""
    thoughtful: Message = {**REPLY, key: "because"}
    for read in ("reasoning_content", "reasoning"):
        source = AS_TEXT.replace(
            "]{{", "]{% if m." + read + " is defined %}<{{ m." + read + " }}>{% endif %}{{"
        )
        assert (
            template(source).render([USER, thoughtful, USER]) == "[user]Hi[assistant]<because>Hello.[user]Hi"
        )
        for void in ("", None):
            assert "<" not in template(source).render([USER, {**REPLY, key: void}, USER])
    assert template(AS_TEXT).render([thoughtful]) == "[assistant]Hello."


@pytest.mark.parametrize(
    "changes", [{}, {"content": None}, {"tool_calls": []}, {"tool_calls": None, "name": None}]
)
def test_void_turns_are_empty_texts(changes: Message) -> None:
    """Case N-05."""
    source = AS_TEXT.replace(END, "{% if m.tool_calls is defined or m.name is defined %}!{% endif %}" + END)
    for role in ("assistant", "tool"):
        assert template(source).render([USER, {"role": role, **changes}, USER]) == f"[user]Hi[{role}][user]Hi"


LOOPS = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}" + calls(
    "c.function.arguments | tojson"
)
"""Like Hermes 3's for tools: without any, there is nothing to loop over."""


class TestNamedTemplate:
    """Case N-07."""

    def test_it_is_used_where_there_are_tools(self) -> None:
        both = template(AS_TEXT, template(calls("c.function.arguments | tojson") + "TOOL USE"))
        assert both.render([USER]) == "[user]Hi"
        assert both.render([USER], tools=[TOOL]).endswith("TOOL USE")
        assert both.render(call()).endswith("TOOL USE")
        assert both.takes_tools
        assert not template(AS_TEXT).takes_tools

    def test_the_form_of_calls_is_that_of_the_named_one(self) -> None:
        hermes = LOOPS.replace(
            "<{{ c.function.name }}", '<tool_call>{"name": "{{ c.function.name }}", "arguments":'
        )
        use = tool_use(template(AS_TEXT, template(hermes)))
        assert (use.format.name, use.native) == ("hermes", True)

    def test_a_template_that_loops_over_tools_works_without(self) -> None:
        assert template(LOOPS).render([USER]) == "[user]Hi"
        assert template("{{ tools is none }}" + AS_TEXT).render([USER]) == "True[user]Hi"

    def test_its_markup_is_isolated_too(self) -> None:
        assert "TOOL USE" in template(AS_TEXT, template("TOOL USE")).source


def test_tools_that_a_template_drops_are_explained_by_the_server() -> None:
    dropping = "{% if tools and tools | length > 99 %}{{ tools }}{% endif %}" + AS_TEXT
    assert not template(dropping).takes_tools
    assert not tool_use(template(dropping)).native


def test_tools_that_need_a_system_message_get_an_empty_one() -> None:
    source = (
        "{% if messages[0].role == 'system' and tools %}"
        + json.dumps("T")
        + "{{ tools | length }}{% endif %}"
        + AS_TEXT
    )
    assert template(source).takes_tools
    assert template(source).render([USER], tools=[TOOL]) == '"T"1[system][user]Hi'
    assert template(source).render([USER]) == "[user]Hi"


def test_results_that_a_template_drops_are_written_by_the_server() -> None:
    hermes = calls("c.function.arguments | tojson").replace(
        "<{{ c.function.name }}", '<tool_call>{"name": "{{ c.function.name }}", "arguments":'
    )
    assert tool_use(template(hermes)).native
    dropping = hermes.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    assert not tool_use(template(dropping)).native


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_built_in_templates_need_no_changes(name: str) -> None:
    assert template(BUILTIN_TEMPLATES[name]).changes == []


def test_probes_of_a_template_that_fails_conclude_nothing() -> None:
    failing = template("{{ raise_exception('always') }}")
    assert failing.changes == []
    failing.refuse_unread([USER, REPLY])
    with pytest.raises(RequestError, match="always"):
        failing.render([SYSTEM, USER])
