"""Chat templates for models whose files have none."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_NO_TOOL_CALLS = """\
    {%- if message.tool_calls or message.role == 'tool' %}
        {{- raise_exception('this chat template has no place for tool calls') }}
    {%- endif %}
"""

_CHATML = (
    "{%- for message in messages %}\n"
    + _NO_TOOL_CALLS
    + """\
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
)

_LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    + _NO_TOOL_CALLS
    + """\
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
)

# Mistral and Gemma have no system turn: its text begins the first user turn. Turns must alternate.
_ALTERNATING = (
    """\
{{- bos_token }}
{%- set system = '' %}
{%- set turns = messages %}
{%- if messages and messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
"""
    + _NO_TOOL_CALLS
    + """\
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('roles must alternate user/assistant, beginning with user') }}
    {%- endif %}
    {%- set text = (system if loop.first else '') + message.content | trim %}
"""
)

_MISTRAL = (
    _ALTERNATING
    + """\
    {%- if message.role == 'user' %}
        {{- '[INST] ' + text + '[/INST]' }}
    {%- else %}
        {{- ' ' + text + eos_token }}
    {%- endif %}
{%- endfor %}
"""
)

_GEMMA = (
    _ALTERNATING
    + """\
    {{- '<start_of_turn>' + ('user' if message.role == 'user' else 'model') + '\\n' }}
    {{- text + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
)

BUILTIN_TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {"chatml": _CHATML, "llama3": _LLAMA3, "mistral": _MISTRAL, "gemma": _GEMMA}
)
"""Templates for models whose files have none."""
