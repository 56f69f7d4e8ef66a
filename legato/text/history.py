"""Conversations as clients send them, made into what one chat template reads.

Absent, null and empty mean the same. What a template cannot read in one form, it is given in another; see
`reading`. Does not know templates' code.
"""

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence

from legato.errors import RequestError
from legato.text.reading import Message, Reading

_SHORT = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS = string.digits + string.ascii_letters
_THOUGHTS = ("reasoning_content", "reasoning")
"""A reply's thoughts, in the words of several servers: templates read one or the other."""


def readable(messages: Sequence[object], reading: Reading) -> list[Message]:
    """The messages with content as text and arguments of calls in the form that the template reads.
    RequestError names the message that is malformed."""
    checked = [_checked(message, f"messages[{i}]", reading) for i, message in enumerate(messages)]
    return _systems_read(_with_ids(checked, reading), reading)


def refuse_unread(messages: Sequence[Mapping[str, object]], reading: Reading) -> None:
    """RequestError if the template drops one of the messages in every form."""
    for i, message in enumerate(messages):
        role = str(message.get("role"))
        if message.get("content") and reading.form(role) == "dropped" and role in ("user", "assistant"):
            raise RequestError(
                f"messages[{i}]: this model's chat template drops messages of role {role}; "
                "the server has to be started with another --chat-template",
                param="messages",
            )


def as_parts(message: Message, reading: Reading) -> Message:
    """The message with its content in the form that the template reads for its role."""
    if reading.form(str(message["role"])) != "parts":
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _checked(message: object, where: str, reading: Reading) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refusal(f"{where} is not an object with a role")
    checked = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is None:
        if message["role"] not in ("assistant", "tool"):
            raise _refusal(f"{where}.content is null; only messages of assistants and tools may lack it")
        content = ""  # many templates write or strip it without a look
    elif not isinstance(content, str):
        raise _refusal(f"{where}.content is neither a text nor a list of parts")
    checked["content"] = content
    if message["role"] == "developer" and not reading.developer:
        checked["role"] = "system"  # as OpenAI's models have it
    calls = checked.pop("tool_calls", None)
    if calls:
        checked["tool_calls"] = [_readable_call(call, reading) for call in calls]
    thoughts = next((text for key in _THOUGHTS if (text := checked.pop(key, None))), None)
    if thoughts is not None:
        checked.update(dict.fromkeys(_THOUGHTS, thoughts))
    return checked


def _text_of(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise _refusal(f"{where} is not an object")
    if part.get("type") != "text":
        raise _refusal(f"{where} has type {part.get('type')!r}; only 'text' is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refusal(f"{where}.text is not a text")
    return text


def _readable_call(call: object, reading: Reading) -> object:
    """OpenAI sends a call's arguments as JSON text; most templates write them as JSON themselves."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    given = call["function"].get("arguments")
    arguments = _arguments(given)
    if not reading.object_arguments:
        arguments = (
            given if isinstance(given, str) and arguments else json.dumps(arguments, ensure_ascii=False)
        )
    elif not isinstance(arguments, dict) and not reading.text_arguments:
        arguments = {"arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _arguments(given: object) -> object:
    """An object, or what a model wrote instead of one."""
    if isinstance(given, str) and given.strip():
        try:
            read = json.loads(given)
        except (ValueError, RecursionError):
            return given
        given = given if isinstance(read, str) else read
    return {} if given is None or given == "" or (isinstance(given, str) and not given.strip()) else given


def _with_ids(messages: Sequence[Message], reading: Reading) -> list[Message]:
    """The messages with ids of calls, and names of results, that the template takes: the same for a call and
    its result."""
    if reading.any_ids and reading.unnamed_results:
        return [*messages]
    made: list[Message] = []
    open_calls: dict[str, object] = {}
    """Id -> name of the calls without a result so far."""
    for message in messages:
        changed = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            given = [
                {**call, "id": call.get("id") or f"{len(made)}.{i}"} if isinstance(call, dict) else call
                for i, call in enumerate(calls)
            ]
            open_calls |= {call["id"]: _name_of(call) for call in given if isinstance(call, dict)}
            changed["tool_calls"] = [
                {**call, "id": _taken_id(call["id"], reading)} if isinstance(call, dict) else call
                for call in given
            ]
        elif message["role"] == "tool":
            id = str(message.get("tool_call_id") or next(iter(open_calls), ""))
            name = message.get("name") or open_calls.get(id)
            open_calls.pop(id, None)
            changed["tool_call_id"] = _taken_id(id, reading)
            if not reading.unnamed_results:
                changed["name"] = name or ""
        made.append(changed)
    return made


def _name_of(call: Mapping[str, object]) -> object:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _taken_id(id: object, reading: Reading) -> str:
    """The id if the template takes it, else nine letters and digits that go with it alone."""
    text = str(id)
    if reading.any_ids or _SHORT.fullmatch(text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest())
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)


def _systems_read(messages: Sequence[Message], reading: Reading) -> list[Message]:
    """The messages with each system message at a place where the template reads it; else its text is the
    user's, in the message beside it."""
    made: list[Message] = []
    unread: list[str] = []
    """Texts that the next message of the user begins with."""
    for message in messages:
        is_first = not made and not unread
        leads = all(other["role"] == "system" for other in made)
        if message["role"] != "system":
            if unread and message["role"] == "user":
                message = {**message, "content": "\n\n".join([*unread, str(message["content"])])}
            elif unread:
                made.append({"role": "user", "content": "\n\n".join(unread)})
            unread = []
            made.append(message)
        elif reading.form("system") == "dropped" or not (leads or reading.late_system):
            if made and made[-1]["role"] == "user":
                made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
            else:
                unread.append(str(message["content"]))
        elif leads and not is_first and not reading.second_system:
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return [*made, {"role": "user", "content": "\n\n".join(unread)}] if unread else made


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages")
