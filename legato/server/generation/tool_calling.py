"""Tool calls in the replies of one chat request: the grammar that makes them valid, and their JSON."""

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from legato.errors import RequestError
from legato.server.generation.constraints import compile_source, content_schema
from legato.server.generation.replies import ReplySlice
from legato.server.generation.response import Json
from legato.server.schema.bodies import ChatBody
from legato.server.schema.structured_output import constraint_field
from legato.server.schema.tools import FunctionTool, NamedChoice, Tool
from legato.server.service import ServedModel
from legato.server.transport.work_pool import WorkPool
from legato.text.grammar import Grammar, Grammars
from legato.text.grammar_trial import Schema, Source
from legato.text.tool_call_grammar import Function, calls_source
from legato.text.tool_call_parser import Call, Content, Piece, ToolCallParser
from legato.text.tool_format import ToolFormat

NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


def check_tools(body: ChatBody) -> None:
    """Check everything about tools that needs no grammar. Raises `RequestError`."""
    names = [tool.function.name for tool in body.tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            param = f"tools[{i}].function.name"
            raise RequestError(f"{param}: duplicate function name {name}", param=param)
    choice = body.tool_choice
    if isinstance(choice, NamedChoice) and choice.name not in names:
        raise RequestError("tool_choice: not one of the tools", param="tool_choice")
    if choice == "required" and not names:
        raise RequestError("tool_choice: required without tools", param="tool_choice")
    field = constraint_field(body)
    if offered_tools(body) and field not in (None, "response_format"):
        raise RequestError(f"{field}: not together with tools", param=field)


def offered_tools(body: ChatBody) -> Sequence[Tool]:
    """The tools that are part of the prompt."""
    return () if body.tool_choice == "none" else body.tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalling:
    """The functions that the replies of one request may call, and how."""

    constraint: Grammar
    format: ToolFormat
    names: frozenset[str]
    content: Literal["text", "json"] | None
    """The content that a reply may have instead of calls."""
    calls_only: Grammar | None
    """The grammar of calls without content. Set only if calls cannot be told from content in another way."""
    shown: frozenset[int]
    """Special tokens of the tool format, which must appear in the text."""
    is_named: bool
    """Whether the client chose the function."""

    def parser(self) -> ToolCallParser:
        may_call = None if self.calls_only is None else self.calls_only.text_matcher().push
        return ToolCallParser(self.format, self.names, content=self.content, may_call=may_call)


async def tool_calling(body: ChatBody, model: ServedModel, work: WorkPool) -> ToolCalling | None:
    """None if there is nothing to call. Raises `RequestError` that names an invalid schema."""
    use, choice, grammars = model.tool_use, body.tool_choice, model.grammars
    if not offered_tools(body) or use is None:
        return None
    named = choice.name if isinstance(choice, NamedChoice) else None
    special = {word: id for word in use.format.words if (id := model.tokenizer.special_id(word)) is not None}

    def sources() -> tuple[Schema | Literal["text"] | None, Source, Source]:
        source = partial(
            calls_source,
            use.format,
            callable_functions(body.tools, named, grammars),
            parallel=body.parallel_tool_calls and named is None,
            special=special,
        )
        content = content_schema(body.response_format, grammars) if choice == "auto" else None
        return content, source(content=content), source(content=None)

    content, source, calls_only_source = await work.run_in_thread(1, sources)
    constraint = await compile_source("tools", source, grammars)
    calls_only = None
    if isinstance(content, Schema) and not use.format.marker:
        calls_only = await compile_source("tools", calls_only_source, grammars, quiet=True)
        # The first matcher of a grammar takes as long as compiling it. Copies for the replies take no time.
        await work.run_in_thread(1, calls_only.text_matcher)
    return ToolCalling(
        constraint=constraint,
        format=use.format,
        names=frozenset(tool.function.name for tool in body.tools if named in (None, tool.function.name)),
        content="json" if isinstance(content, Schema) else content,
        calls_only=calls_only,
        shown=frozenset(special.values()),
        is_named=named is not None,
    )


def callable_functions(tools: Sequence[Tool], named: str | None, grammars: Grammars) -> list[Function]:
    """The functions that may be called. Only the `named` one, if there is one."""
    return [
        Function(
            name=tool.function.name,
            schema=_arguments_schema(tool.function, f"tools[{i}].function.parameters", grammars),
        )
        for i, tool in enumerate(tools)
        if named in (None, tool.function.name)
    ]


def _arguments_schema(function: FunctionTool, name: str, grammars: Grammars) -> Schema:
    """The schema of an object: in every tool format the arguments are one, whatever else the schema
    allows."""
    parameters = NO_ARGUMENTS if function.parameters is None else function.parameters
    type_ = parameters.get("type") or "object"
    is_object = type_ == "object" or (isinstance(type_, list) and "object" in type_)
    if function.strict and not is_object:
        raise RequestError(f'{name}.type: must be "object"', param=name)
    schema = grammars.schema({**parameters, "type": "object"}, strict=function.strict, name=name)
    return schema if is_object else replace(schema, left_out=(".type",))


class ToolCallFormatter:
    """Formats one reply that may contain calls."""

    def __init__(self, calling: ToolCalling) -> None:
        self._format = calling.format
        self._parser = calling.parser()
        self._is_named = calling.is_named
        self._num_calls = 0

    def deltas(self, part: ReplySlice) -> list[Json]:
        """The `delta`s of a stream for the next part of the reply."""
        pieces = self._parser.push(part.text)
        if part.finish_reason is not None:
            pieces += self._parser.flush()
        return [self._delta(piece) for piece in pieces]

    def message(self, reply: ReplySlice) -> Json:
        """The message of a complete reply."""
        content, calls = "", list[tuple[str, str]]()
        for piece in [*self._parser.push(reply.text), *self._parser.flush()]:
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, Call):
                calls.append((piece.name, ""))
            else:
                name, arguments = calls[-1]
                calls[-1] = name, arguments + piece.text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if not calls:
            return message
        tool_calls = [self._call(name, arguments) for name, arguments in calls]
        return {**message, "content": content or None, "tool_calls": tool_calls}

    def finish_reason(self, part: ReplySlice) -> str | None:
        """The finish reason of a reply that ends with `part`.

        A reply that a stop string cut within a call has no call to run. A call of the function that the
        client chose ends with "stop", as in OpenAI's API.
        """
        has_called = self._num_calls > 0 and part.finish_reason == "stop" and not self._parser.in_call
        return "tool_calls" if has_called and not self._is_named else part.finish_reason

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
