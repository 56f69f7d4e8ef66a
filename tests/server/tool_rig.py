"""Chat services whose templates know tools, in each form."""

import json

from server_rig import build_service

from legato.server.service import Service
from legato.text.chat import ChatTemplate

START = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% set arguments = c.function.arguments | tojson %}"
)
END = "{% endfor %}{% endfor %}{% if tools %}[{{ tools | length }} tools]{% endif %}<assistant>"
CALLS = {
    "hermes": '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ arguments }}}</tool_call>',
    "llama3_json": '{"name": "{{ c.function.name }}", "parameters": {{ arguments }}}',
    "mistral": '[TOOL_CALLS][{"name": "{{ c.function.name }}", "arguments": {{ arguments }}}]',
}
TEMPLATES = {form: START + call + END for form, call in CALLS.items()}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "greet", "description": "Says hello", "parameters": PERSON}},
    {"type": "function", "function": {"name": "leave.now"}},
]
USER = [{"role": "user", "content": "hi"}]
ANN = '{"name": "ann", "age": 7}'


def tool_service(runner: object = None, form: str = "hermes", **changes: object) -> Service:
    template = ChatTemplate(TEMPLATES[form], bos_token="<bos>", eos_token="<eos>")
    return build_service(runner, chat_template=template, **changes)  # type: ignore[arg-type]


def written(form: str, *calls: tuple[str, str]) -> str:
    """Calls as a model writes them; (name, arguments) each."""
    key = "parameters" if form == "llama3_json" else "arguments"
    objects = [f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}' for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    return f"[TOOL_CALLS][{', '.join(objects)}]" if form == "mistral" else "; ".join(objects)
