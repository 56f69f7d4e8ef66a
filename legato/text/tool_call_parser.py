"""Finds calls of tools in a reply's text, as it comes.

It follows the definition that the reply's grammar is made of (`tool_format`), so it never repairs a call. A
call is told from the moment its arguments begin; from then on these are passed on as they are, to their end
or the reply's. Where a reply ends between a marker, or a known function's name, and the arguments, what was
there of the call is left out. Does not know grammars, tokens or JSON bodies.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from legato.text.tool_format import BLANKS, FENCED, FRAMELESS, HEAD, MAX_BLANKS, Frame, ToolFormat


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's arguments: JSON, once joined."""

    text: str


Piece = Content | Call | Arguments


class _State(Enum):
    START = auto()
    """Nothing is decided."""
    TEXT = auto()
    """Looking for the marker."""
    HEAD = auto()
    """From the marker to the arguments."""
    ARGUMENTS = auto()
    TAIL = auto()
    """From the arguments to the call's end."""
    BETWEEN = auto()
    """From a call's end to the next call, or the end of all."""
    NO_CALLS = auto()
    """All that is left is content."""


class ToolCallParser:
    """Follows one reply."""

    def __init__(
        self,
        format: ToolFormat,
        names: Collection[str],
        *,
        content: Literal["text", "json"] | None = "text",
        may_call: Callable[[str], bool] | None = None,
    ) -> None:
        """`content` is what the reply may be instead of calls, as in its grammar.

        `may_call` is given more and more of the reply, and says whether this may still become a valid call.
        It is needed where JSON stands beside calls without a marker: some texts are the beginnings of both.
        """
        self._format = format
        self._names = names
        self._content = content
        self._may_call = may_call
        text_with_calls = content == "text" and format.marker
        self._outside = _State.TEXT if text_with_calls else _State.NO_CALLS
        """The state in content after something that is no call, or after all calls."""
        self._state = _State.START
        self._held = ""
        """Text that is not decided yet."""
        self._asked = 0
        """Characters of it that `may_call` was given."""
        self._frame = format.frame
        """Of the calls that are read."""
        self._named = False
        """Whether what is held has the name of a known function, so that only a call can follow."""
        self._first = True
        """Whether the next call is the first of its frame."""
        self._json = _JsonEnd()

    @property
    def in_call(self) -> bool:
        """Whether the last call's arguments are not complete."""
        return self._state is _State.ARGUMENTS

    def push(self, text: str) -> list[Piece]:
        """What the text adds to what is known."""
        self._held += text
        pieces: list[Piece] = []
        steps = {
            _State.START: self._read_start,
            _State.TEXT: self._read_text,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.TAIL: self._read_tail,
            _State.BETWEEN: self._read_between,
            _State.NO_CALLS: self._read_all,
        }
        while self._held and steps[self._state](pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The rest, once the reply is complete."""
        self._may_call = None  # what may be a call now is one
        pieces = self.push("")
        held, self._held = self._held, ""
        undecided = self._state in (_State.START, _State.TEXT, _State.NO_CALLS)
        if held and undecided and not self._named and self._content is not None:
            pieces.append(Content(held))
        return pieces

    # Each step takes what it can from `_held` and says whether to go on with the rest.

    def _read_start(self, pieces: list[Piece]) -> bool:
        if self._may_call is not None:
            asked, self._asked = self._asked, len(self._held)
            if self._may_call(self._held[asked:]):
                return False
            self._state = _State.NO_CALLS
            return True
        marker = self._format.marker
        if self._content == "text" or not marker:
            return self._read_bare((*FENCED, FRAMELESS) if self._content == "text" else (FRAMELESS,), pieces)
        if len(self._held) < len(marker) and marker.startswith(self._held):
            return False
        self._state = _State.HEAD if self._held.startswith(marker) else self._outside
        return True

    def _read_bare(self, frames: Iterable[Frame], pieces: list[Piece]) -> bool:
        """A reply that is one call without a marker."""
        for frame in frames:
            try:
                self._begin_call(frame, frame.first, pieces)
            except _TooShort:
                return False
            except _Different:
                continue
            return True
        self._state = self._outside
        return True

    def _read_text(self, pieces: list[Piece]) -> bool:
        marker = self._format.marker
        found = self._held.find(marker)
        shown = found if found >= 0 else len(self._held) - _overlap(self._held, marker)
        self._take_content(shown, pieces)
        if found < 0:
            return False
        self._state, self._first = _State.HEAD, True
        return True

    def _read_head(self, pieces: list[Piece]) -> bool:
        frame = self._format.frame
        try:
            self._begin_call(frame, frame.first if self._first else frame.next, pieces)
        except _TooShort:
            return False
        except _Different:
            self._take_content(len(self._format.marker), pieces)
            self._state = self._outside
        return True

    def _begin_call(self, frame: Frame, before: Iterable[str], pieces: list[Piece]) -> None:
        """Take a call up to its arguments, if `_held` begins with one; raises what `_past` raises."""
        self._named = False
        at = _past(self._held, 0, (*before, *HEAD, '"'))
        name, quote, _ = self._held[at:].partition('"')
        if not quote and any(known.startswith(name) for known in self._names):
            raise _TooShort
        if not quote or name not in self._names:
            raise _Different
        self._named = True
        try:
            at = _past(self._held, at + len(name) + 1, (*self._format.joint, "{"))
        except _Different:
            self._named = False
            raise
        pieces.append(Call(name))
        self._held = self._held[at - 1 :]
        self._state, self._json, self._frame = _State.ARGUMENTS, _JsonEnd(), frame

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        end = self._json.find(self._held)
        taken, self._held = self._held[:end], self._held[end:]
        pieces.append(Arguments(taken))
        if self._json.ended:
            self._state = _State.TAIL
        return True

    def _read_tail(self, pieces: list[Piece]) -> bool:  # noqa: ARG002
        try:
            end = _past(self._held, 0, ("}", *self._frame.after))
        except _TooShort:
            return False
        except _Different:
            end = 0
        self._held, self._state, self._named = self._held[end:], _State.BETWEEN, False
        return True

    def _read_between(self, pieces: list[Piece]) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip(BLANKS)
        following, close = "".join(self._frame.next), "".join(self._frame.close)
        if following and self._held.startswith(following):
            self._state, self._first = _State.HEAD, False
        elif close and self._held.startswith(close):
            self._state, self._held = self._outside, self._held[len(close) :]
        elif following.startswith(self._held) or close.startswith(self._held):
            return False
        else:
            self._state = self._outside
        return True

    def _read_all(self, pieces: list[Piece]) -> bool:
        self._take_content(len(self._held), pieces)
        return False

    def _take_content(self, size: int, pieces: list[Piece]) -> None:
        text, self._held = self._held[:size], self._held[size:]
        if text and pieces and isinstance(pieces[-1], Content):
            pieces[-1] = Content(pieces[-1].text + text)
        elif text:
            pieces.append(Content(text))


class _TooShort(Exception):  # noqa: N818 (not an error: more text may come)
    pass


class _Different(Exception):  # noqa: N818
    pass


def _past(text: str, at: int, literals: Iterable[str]) -> int:
    """Where `text` goes on after the literals that stand from `at` on, with any blanks before each."""
    for literal in literals:
        most = at + MAX_BLANKS
        while at < len(text) and text[at] in BLANKS:
            at += 1
            if at > most:
                raise _Different
        there = text[at : at + len(literal)]
        if there != literal:
            raise _TooShort if len(there) < len(literal) and literal.startswith(there) else _Different
        at += len(literal)
    return at


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


class _JsonEnd:
    """Finds the end of an object that comes in pieces."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int:
        """How much of `text` belongs to the object."""
        for at, char in enumerate(text, start=1):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return at
        return len(text)
