"""Calls of tools in the replies of one chat request: the grammar that makes them valid, and their wording."""

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from legato.errors import RequestError
from legato.server.answer import Json
from legato.server.protocol import ChatBody, Conversation
from legato.server.replies import Part
from legato.server.service import Service
from legato.server.structured import asked_form, compiled, content_form
from legato.server.tools import FunctionTool, Named, Tool
from legato.text.grammar import Grammar, Grammars
from legato.text.grammar_trial import Schema, Source
from legato.text.tool_call_grammar import Function, calls_source
from legato.text.tool_call_parser import Call, Content, Piece, ToolCallParser
from legato.text.tool_calls import in_plain_words
from legato.text.tool_format import ToolFormat

NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


def check_tools(body: ChatBody) -> None:
    """All about tools that can be refused before anything is compiled."""
    names = [tool.function.name for tool in body.tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            param = f"tools[{i}].function.name"
            raise RequestError(f"{param}: {name} is there already", param=param)
    choice = body.tool_choice
    if isinstance(choice, Named) and choice.name not in names:
        raise RequestError("tool_choice: not one of the tools", param="tool_choice")
    if choice == "required" and not names:
        raise RequestError("tool_choice: required without tools", param="tool_choice")
    form = asked_form(body)
    if offered(body) and form not in (None, "response_format"):
        raise RequestError(f"{form}: not together with tools", param=form)


def offered(body: ChatBody) -> Sequence[Tool]:
    """The tools that the model is told of."""
    return () if body.tool_choice == "none" else body.tools


def plain_or_native(
    service: Service, conversation: Conversation, tools: Sequence[Tool]
) -> tuple[list[Json], list[Json] | None]:
    """(messages, tools) as the chat template is given them."""
    assert service.tool_use is not None
    messages = [message.model_dump(exclude_none=True) for message in conversation.messages]
    told = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
    if service.tool_use.native:
        return messages, told or None
    if told or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        assert service.chat_template is not None
        form, system = service.tool_use.format, service.chat_template.takes_system
        return in_plain_words(messages, told, form, system=system), None
    return messages, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """What the replies of one request may call, and how."""

    form: Grammar
    format: ToolFormat
    names: frozenset[str]
    content: Literal["text", "json"] | None
    """What a reply may be instead of calls."""
    calls_alone: Grammar | None
    """Of the calls without the content, where only that tells them apart."""
    shown: frozenset[int]
    """Special tokens that are shown as text: words of the form."""
    named: bool
    """Whether the client said which function is called."""

    def parser(self) -> ToolCallParser:
        may_call = None if self.calls_alone is None else self.calls_alone.text_matcher().push
        return ToolCallParser(self.format, self.names, content=self.content, may_call=may_call)


async def calling(body: ChatBody, service: Service) -> Calling | None:
    """None if nothing can be called. Raises `RequestError` that names a schema at fault."""
    use, choice, grammars = service.tool_use, body.tool_choice, service.grammars
    if not offered(body) or use is None:
        return None
    named = choice.name if isinstance(choice, Named) else None
    special = {
        word: id for word in use.format.words if (id := service.tokenizer.special_id(word)) is not None
    }

    def described() -> tuple[Schema | Literal["text"] | None, Source, Source]:
        source = partial(
            calls_source,
            use.format,
            functions(body.tools, named, grammars),
            parallel=body.parallel_tool_calls and named is None,
            special=special,
        )
        content = content_form(body.response_format, grammars) if choice == "auto" else None
        return content, source(content=content), source(content=None)

    content, source, calls_alone = await service.work.run_in_thread(1, described)
    form = await compiled("tools", source, grammars)
    alone = None
    if isinstance(content, Schema) and not use.format.marker:
        alone = await compiled("tools", calls_alone, grammars, quiet=True)
        # Made once for each grammar, which takes as long as to compile it; copies for replies take no time.
        await service.work.run_in_thread(1, alone.text_matcher)
    return Calling(
        form=form,
        format=use.format,
        names=frozenset(tool.function.name for tool in body.tools if named in (None, tool.function.name)),
        content="json" if isinstance(content, Schema) else content,
        calls_alone=alone,
        shown=frozenset(special.values()),
        named=named is not None,
    )


def functions(tools: Sequence[Tool], named: str | None, grammars: Grammars) -> list[Function]:
    """What can be called; only the `named` one, if there is one."""
    return [
        Function(
            name=tool.function.name,
            schema=_arguments(tool.function, f"tools[{i}].function.parameters", grammars),
        )
        for i, tool in enumerate(tools)
        if named in (None, tool.function.name)
    ]


def _arguments(function: FunctionTool, name: str, grammars: Grammars) -> Schema:
    """Of an object: all forms of calls write one, whatever else, or beside it, the schema allows."""
    parameters = NO_ARGUMENTS if function.parameters is None else function.parameters
    type_ = parameters.get("type") or "object"
    is_object = type_ == "object" or (isinstance(type_, list) and "object" in type_)
    if function.strict and not is_object:
        raise RequestError(f'{name}.type: must be "object"', param=name)
    schema = grammars.schema({**parameters, "type": "object"}, strict=function.strict, name=name)
    return schema if is_object else replace(schema, left_out=(".type",))


class CallsInReply:
    """Words one reply that may call."""

    def __init__(self, calling: Calling) -> None:
        self._format = calling.format
        self._parser = calling.parser()
        self._named = calling.named
        self._num_calls = 0

    def deltas(self, part: Part) -> list[Json]:
        """What the part adds to the message, in the form of a stream's `delta`s."""
        pieces = self._parser.push(part.text)
        if part.finish_reason is not None:
            pieces += self._parser.flush()
        return [self._delta(piece) for piece in pieces]

    def message(self, reply: Part) -> Json:
        """The whole message."""
        content, made = "", list[tuple[str, str]]()
        for piece in [*self._parser.push(reply.text), *self._parser.flush()]:
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, Call):
                made.append((piece.name, ""))
            else:
                name, arguments = made[-1]
                made[-1] = name, arguments + piece.text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if not made:
            return message
        calls = [self._call(name, arguments) for name, arguments in made]
        return {**message, "content": content or None, "tool_calls": calls}

    def finish_reason(self, part: Part) -> str | None:
        """Of a reply that its part ends. One cut by a stop string in the middle of a call has none to run. A
        call of the function that the client named ends with "stop", as OpenAI's do."""
        called = self._num_calls > 0 and part.finish_reason == "stop" and not self._parser.in_call
        called = called and not self._named
        return "tool_calls" if called else part.finish_reason

    def _delta(self, piece: Piece) -> Json:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Call):
            return {"tool_calls": [{"index": self._num_calls, **self._call(piece.name, "")}]}
        return {"tool_calls": [{"index": self._num_calls - 1, "function": {"arguments": piece.text}}]}

    def _call(self, name: str, arguments: str) -> Json:
        self._num_calls += 1
        return {
            "id": _short_id() if self._format.short_ids else f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
