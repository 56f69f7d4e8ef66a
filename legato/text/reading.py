"""What a chat template reads of a conversation, found out by rendering small ones.

Templates drop what they do not know without a word: a text where they look for parts, a system message, the
tools. Each probe is a conversation with a word that no template has; either the word is in the prompt, or it
was dropped, or the template raised an exception. Does not know requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Message = dict[str, object]
Write = Callable[[Sequence[Message], object], str | None]
"""The prompt for (messages, tools) as they are; None if the template raises an exception."""
Form = Literal["text", "parts", "dropped", "refused"]
"""The form of content in which a template reads it; `refused` if it raises an exception for each."""

_WORD: Final = "zyzzyva"
_USER: Final[Message] = {"role": "user", "content": "x"}
_REPLY: Final[Message] = {"role": "assistant", "content": "x"}
_FUNCTION: Final = "a_function"
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "x",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "x"}}},
    },
}
SHORT_ID: Final = "abcdefghi"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one template reads. The defaults are those of a template about which nothing was found out."""

    forms: Mapping[str, Form] = field(default_factory=dict)
    """Role -> form of content; text for a role that is missing."""
    takes_system: bool = True
    second_system: bool = True
    """Whether it does not drop the second of two system messages at the beginning."""
    late_system: bool = True
    """Whether it does not drop a system message that comes later."""
    developer: bool = True
    tools: bool = True
    """Whether it writes the tools that it is given."""
    tools_need_system: bool = False
    """Whether it writes them only in a conversation that begins with a system message."""
    no_tools: object = None
    """What stands for no tools: None, or an empty list for a template that loops over them."""
    object_arguments: bool = True
    """Whether arguments of calls are objects to it; else JSON text."""
    text_arguments: bool = True
    """Whether arguments that are no object may be a text all the same."""
    any_ids: bool = True
    """Whether ids of calls may have any form; else they are nine letters or digits."""
    unnamed_results: bool = True
    """Whether a result may lack the name of its function."""

    def form(self, role: str) -> Form:
        return self.forms.get(role, "text")

    def reads(self, role: str) -> bool:
        return self.form(role) in ("text", "parts")

    def changes(self) -> list[str]:
        """What is changed in conversations for this template, or refused: one line each."""
        parts = [role for role in self.forms if self.form(role) == "parts"]
        unread = [role for role in ("user", "assistant") if self.form(role) == "dropped"]
        notes = {
            f"content of {', '.join(parts)} messages is given as parts": bool(parts),
            "system messages become text of the user's": self.form("system") == "dropped",
            "later system messages become text of the user's": self.takes_system and not self.late_system,
            "arguments of tool calls are given as JSON text": not self.object_arguments,
            "ids of tool calls are mapped to nine letters": not self.any_ids,
            f"it drops {' and '.join(unread)} messages, so conversations with these are refused": bool(
                unread
            ),
        }
        return [note for note, is_so in notes.items() if is_so]


def read_by(write: Write, *, has_developer: bool) -> Reading:
    """What the template behind `write` reads. `has_developer` says whether its source names that role."""
    no_tools: object = None
    user: Form = "refused"
    for no_tools in (None, []):
        user = _form(lambda message, none=no_tools: write([message], none), "user")  # type: ignore[misc]
        if user in ("text", "parts"):
            break
    if user not in ("text", "parts"):  # so nothing can be concluded from what is missing
        system = write([{"role": "system", "content": _WORD}, _USER], no_tools)
        return Reading(forms={"user": user}, developer=has_developer, takes_system=_WORD in (system or ""))
    question = {**_USER, "content": _content("x", user)}

    def with_turns(
        message: Message, *, before: Sequence[Message] = (), after: Sequence[Message] = ()
    ) -> str | None:
        return write([*before, message, *after], no_tools)

    system_form = _form(lambda message: with_turns(message, after=[question]), "system")
    reply = _form(lambda message: with_turns(message, before=[question], after=[question]), "assistant")
    takes_system = system_form in ("text", "parts")
    answer = {**_REPLY, "content": _content("x", reply)}
    late = {"role": "system", "content": _content(_WORD, system_form)}
    first = {"role": "system", "content": _content("x", system_form)}
    developer = with_turns({"role": "developer", "content": _WORD}, after=[question])
    calls = _Calls(write, no_tools, question, answer)
    need = calls.read_tools(first if takes_system else None)
    return Reading(
        forms={"user": user, "assistant": reply, "system": system_form, "tool": calls.result_form()},
        takes_system=takes_system,
        second_system=_WORD in (with_turns(late, before=[first], after=[question]) or _WORD),
        late_system=_WORD in (with_turns(late, before=[question, answer], after=[question]) or _WORD),
        developer=has_developer and _WORD in (developer or ""),
        tools=need is not None,
        tools_need_system=need is True,
        no_tools=no_tools,
        object_arguments=calls.read_objects(),
        text_arguments=calls.read_texts(),
        any_ids=calls.read_any_ids(),
        unnamed_results=calls.read_unnamed(),
    )


def _content(text: str, form: Form) -> object:
    return [{"type": "text", "text": text}] if form == "parts" else text


def _form(write: Callable[[Message], str | None], role: str) -> Form:
    outputs = []
    for form in ("text", "parts"):
        output = write({"role": role, "content": _content(_WORD, form)})
        # Content that the template prints as a list, quotes and all, was not read.
        if output is not None and _WORD in output and "'type'" not in output:
            return form
        outputs.append(output)
    return "refused" if None in outputs[:1] else "dropped"


@dataclass(frozen=True, slots=True)
class _Calls:
    """Probes with a call of a tool and its result."""

    write: Write
    no_tools: object
    question: Message
    answer: Message

    def _prompt(
        self, *, arguments: object = None, id: str = SHORT_ID, result: object = "x", named: bool = True
    ) -> str | None:
        function = {"name": _FUNCTION, "arguments": {"key": "x"} if arguments is None else arguments}
        call = {"id": id, "type": "function", "function": function}
        called: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        returned: Message = {"role": "tool", "content": result, "tool_call_id": id}
        if named:
            returned["name"] = _FUNCTION
        return self.write([self.question, called, returned], [_TOOL])

    def read_tools(self, system: Message | None) -> bool | None:
        """Whether it writes tools only beside a system message; None if never. False as well if it raises
        an exception in all probes: then it may write them."""
        without = self.write([self.question], self.no_tools)
        given = self.write([self.question], [_TOOL])
        if given is not None and given != without:
            return False
        if system is not None:
            beside = self.write([system, self.question], [_TOOL])
            if beside is not None and beside != self.write([system, self.question], self.no_tools):
                return True
        return False if given is None else None

    def result_form(self) -> Form:
        return _form(lambda message: self._prompt(arguments=self._base(), result=message["content"]), "tool")

    def _base(self) -> object:
        """Arguments in the form with which the other probes can succeed."""
        return None if self.read_objects() else '{"key": "x"}'

    def read_objects(self) -> bool:
        if _WORD in (self._prompt(arguments={"key": _WORD}) or ""):
            return True
        return _WORD not in (self._prompt(arguments=f'{{"key": "{_WORD}"}}') or "")

    def read_texts(self) -> bool:
        if self._prompt(arguments=self._base()) is None:
            return True
        return _WORD in (self._prompt(arguments=_WORD) or "")

    def read_any_ids(self) -> bool:
        if self._prompt(arguments=self._base()) is None:
            return True
        return self._prompt(arguments=self._base(), id="call_0123456789") is not None

    def read_unnamed(self) -> bool:
        if self._prompt(arguments=self._base()) is None:
            return True
        return self._prompt(arguments=self._base(), named=False) is not None
