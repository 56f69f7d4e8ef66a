"""Chat templates: what they render, what they refuse, and what a hostile one cannot do."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from legato.errors import ConfigError, ModelError, RequestError
from legato.text.chat import (
    BUILTIN_TEMPLATES,
    ChatTemplate,
    Message,
    load_template,
    template_from_folder,
    template_from_gguf,
)
from legato.text.fake import FakeTokenizer

USER: Message = {"role": "user", "content": "Hi"}
DIALOGUE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": " And now? "},
]
TOOL: dict[str, object] = {"type": "function", "function": {"name": "f", "description": "<&'>\u00e9"}}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n And now? <|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<bos>[INST] Be brief.\n\nHi[/INST] Hello.<eos>[INST] And now?[/INST]"),
        (
            "gemma",
            "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nHello.<end_of_turn>\n"
            "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_built_in_templates_render_a_dialogue(name: str, expected: str) -> None:
    built_in = template(load_template(name))
    assert built_in.render(DIALOGUE) == expected
    without = built_in.render(DIALOGUE, add_generation_prompt=False)
    assert expected.startswith(without)


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_built_in_templates_refuse_what_they_would_drop(name: str) -> None:
    built_in = template(load_template(name))
    with pytest.raises(RequestError, match="no place for tools") as refused:
        built_in.render([USER], tools=[TOOL])
    assert refused.value.param == "tools"
    calls: Message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    for last in (calls, {"role": "tool", "content": "4"}):
        with pytest.raises(RequestError, match="no place for tool calls"):
            built_in.render([USER, last])


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_roles_must_alternate_where_the_model_knows_only_two(name: str) -> None:
    """Case F-19: the template's own message, and a 400."""
    with pytest.raises(RequestError, match=r"^chat template: roles must alternate") as refused:
        template(load_template(name)).render([USER, USER])
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_a_prompt_has_exactly_the_bos_of_its_template(name: str) -> None:
    """Case F-09."""
    tokenizer = FakeTokenizer()
    assert tokenizer.add_bos
    ids = tokenizer.encode_chat(template(load_template(name)).render([USER]))
    assert (ids[0], ids.count(256)) == (256, 1)
    assert tokenizer.encode_chat(template(load_template("chatml")).render([USER])).count(256) == 0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ tools | tojson }}",
            '[{"type": "function", "function": {"name": "f", "description": "<&\'>\u00e9"}}]',
        ),
        ("{{ tools[0].function.name | tojson(indent=2) }}", '"f"'),
        ("{% for m in messages %}\n  {% if true %}\nx{% endif %}{% endfor %}", "x"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in [1, 2] %}{{ loop.last }} {{ loop.length }} {% endfor %}", "False 2 True 2 "),
        ("{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.index }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{{ bos_token ~ eos_token ~ 1 ~ none }}", "<bos><eos>1None"),
        ("{{ enable_thinking }}{{ nowhere }}", "True"),
        (
            "{{ messages[0].content + 'a' * 3 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ 1.5 * 2 }}",
            "Hiaaa1024[1, 2]3.0",
        ),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}", "<1>"),
        (
            "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
            "1",
        ),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ],
)
def test_templates_have_what_hugging_face_gives_them(source: str, expected: str) -> None:
    tools = [TOOL] if "tools" in source else None
    assert template(source).render([USER], tools=tools, extra={"enable_thinking": True}) == expected
    theirs, _ = render_jinja_template(
        [[USER]],
        tools=tools,
        chat_template=source,
        bos_token="<bos>",
        eos_token="<eos>",
        enable_thinking=True,
    )
    assert theirs == [expected]


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_transformers_renders_the_built_in_templates_alike(name: str) -> None:
    source = BUILTIN_TEMPLATES[name]
    theirs, _ = render_jinja_template(
        [DIALOGUE], chat_template=source, add_generation_prompt=True, bos_token="<bos>", eos_token="<eos>"
    )
    assert theirs == [template(source).render(DIALOGUE)]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
def test_extra_variables_that_have_their_own_place_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is not a variable of its own"):
        template("{{ messages[0].content }}").render([USER], extra={name: []})


ROLES = "{% for m in messages %}<{{ m.role }}>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "roles"),
    [(ROLES, "<system><user>"), ("{# developer #}" + ROLES, "<developer><user>")],
)
def test_a_developer_is_the_system_where_the_template_knows_none(source: str, roles: str) -> None:
    assert template(source).render([{"role": "developer", "content": "Be brief."}, USER]) == roles


def test_text_parts_become_one_text() -> None:
    """Case F-19: content as a list of text parts, where the template wants a text."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message: Message = {"role": "user", "content": parts}
    assert template("{{ messages[0].content + '!' }}").render([message]) == "a\nb!"
    assert message["content"] is parts


def test_arguments_of_tool_calls_are_objects_to_the_template() -> None:
    """OpenAI's clients send them as JSON text; what is no JSON stays as it is."""
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}"
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"x": 1}', "{no", None, "")]
    message: Message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert template(source).render([message]) == '{"x": 1};"{no";{};{};'
    assert calls[0]["function"]["arguments"] == '{"x": 1}'  # type: ignore[index]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("Hi", r"messages\[1\] is not an object with a role"),
        ({"content": "Hi"}, r"messages\[1\] is not an object with a role"),
        ({"role": "user", "content": None}, r"messages\[1\].content is null"),
        ({"role": "user"}, r"messages\[1\].content is null"),
        ({"role": "system", "content": None}, r"messages\[1\].content is null"),
        ({"role": "user", "content": 5}, "neither a text nor a list"),
        ({"role": "user", "content": ["Hi"]}, r"messages\[1\].content\[0\] is not an object"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\] has type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\].text is not a text"),
    ],
)
def test_malformed_messages_are_refused_by_place(message: Message, complaint: str) -> None:
    """Case F-19: content of wrong form or null is the client's fault."""
    with pytest.raises(RequestError, match=complaint) as refused:
        template("{{ messages[0].content }}").render([USER, message])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('no ' + messages[0].role + ' here') }}", "^chat template: no user here$"),
        ("{{ messages[0].content.foo.bar }}", "has no attribute 'foo'"),
        ("{{ nothing.x }}", "'nothing' is undefined"),
        ("{{ 'secret' + none }}", r"fails with these messages \(TypeError\)$"),
        ("{{ messages[0].content | int | string + 1 }}", r"\(TypeError\)$"),
        ("{{ 1 // 0 }}", r"\(ZeroDivisionError\)$"),
        ("{% for x in 5 %}{% endfor %}", r"\(TypeError\)$"),
        ("{% include 'x' %}", r"\(TypeError\)$"),
    ],
)
def test_a_template_that_fails_is_a_fault_of_the_request(source: str, complaint: str) -> None:
    """Case F-19: never a 500, and never the template's source or the prompt in the message."""
    with pytest.raises(RequestError, match=complaint) as refused:
        template(source).render([USER])
    assert refused.value.param == "messages"
    assert "{{" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.__builtins__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | map('attr', '__class__') | list)[0].mro() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    """Case J-11."""
    messages = [dict(USER)]
    with pytest.raises(RequestError):
        template(source).render(messages)
    assert messages == [USER]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(50000) %}{{ 'a' * 100000 }}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [0] }}",
        "{{ 2 ** (10 ** 9) }}",
        "{{ -2 ** (10 ** 9) }}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_a_template_cannot_run_or_grow_without_end(source: str) -> None:
    """Case J-11: limits on time and output."""
    with pytest.raises(RequestError, match="chat template"):
        template(source).render([USER])
    assert template("{{ messages[0].content }}").render([USER]) == "Hi"


def test_the_steps_of_one_rendering_do_not_count_for_the_next() -> None:
    busy = template("{% for i in range(99999) %}{% endfor %}x")
    assert {busy.render([USER]) for _ in range(60)} == {"x"}


def test_long_dialogues_stay_within_the_limits() -> None:
    messages: list[Message] = [dict(DIALOGUE[1 + i % 2]) for i in range(10_001)]
    for name in BUILTIN_TEMPLATES:
        assert template(load_template(name)).render(messages).count("Hi") == 5001


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x | no_such_filter }}",
        "{% if x %}",
        "{% no_such_tag %}",
        "{{" + "(" * 5000,
        "{{ '\ud800' ",
    ],
)
def test_a_template_with_faults_is_refused_at_once(source: str) -> None:
    with pytest.raises(ModelError, match="chat template") as refused:
        template(source)
    assert "\n" not in str(refused.value)


def test_templates_are_found_by_name_by_path_or_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("own \u00e9 template")
    assert load_template("chatml") == BUILTIN_TEMPLATES["chatml"]
    assert load_template(str(path)) == "own \u00e9 template"
    assert load_template("{{ messages }}") == "{{ messages }}"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("chat-ml", "no chat template 'chat-ml'; give one of chatml, llama3, mistral, gemma"),
        ("", "give one of chatml"),
        ("/no/such/file.jinja", r"/no/such/file.jinja: cannot be read \(No such file or directory\)"),
    ],
)
def test_a_template_that_is_nowhere_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        load_template(name)
    assert refused.value.param == "chat_template"


def test_a_gguf_file_may_have_a_template() -> None:
    assert template_from_gguf({"tokenizer.chat_template": "{{ x }}"}) == "{{ x }}"
    assert template_from_gguf({}) is None
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template is of type list"):
        template_from_gguf({"tokenizer.chat_template": ["x"]})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {}}, None),
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        (
            {"tokenizer_config.json": {"chat_template": "a"}, "chat_template.json": {"chat_template": "b"}},
            "b",
        ),
        ({"chat_template.json": {"chat_template": "b"}, "chat_template.jinja": "c"}, "c"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ]
                }
            },
            "d",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "t"}]}}, None),
    ],
)
def test_a_model_folder_may_have_a_template(
    tmp_path: Path, files: dict[str, object], expected: str | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert template_from_folder(tmp_path) == expected


def test_a_damaged_template_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template is 5"):
        template_from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: is not UTF-8"):
        template_from_folder(tmp_path)


def test_a_template_for_tools_has_its_own_name(tmp_path: Path) -> None:
    """In a GGUF file, and in the two forms that folders have."""
    assert template_from_gguf({"tokenizer.chat_template.tool_use": "t"}, "tool_use") == "t"
    assert template_from_gguf({"tokenizer.chat_template": "d"}, "tool_use") is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    assert template_from_folder(tmp_path, "tool_use") == "t"
    config.write_text(json.dumps({"chat_template": "d"}))
    assert template_from_folder(tmp_path, "tool_use") is None
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("j")
    assert template_from_folder(tmp_path, "tool_use") == "j"
    assert template_from_folder(tmp_path) == "d"
