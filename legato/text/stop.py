"""Stop strings in a text that arrives in pieces.

The outcome is that of reading the text one character at a time: the first stop string to be complete ends
the text, and of several complete at the same character the longest. So it does not depend on how the text
was cut into pieces, and no text is needed beyond the match. Does not know tokens.
"""

from collections.abc import Sequence
from functools import lru_cache

from legato.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000


class StopStrings:
    """Finds the first of `stops` in one growing text; time is linear in the text for each stop string.

    RequestError for an empty stop string, more than MAX_STOP_STRINGS, or one longer than MAX_STOP_CHARS.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include` the match itself is shown."""
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(
                f"{len(stops)} stop strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        for stop in stops:
            if not stop:
                raise RequestError("a stop string is empty", param="stop")
            if len(stop) > MAX_STOP_CHARS:
                raise RequestError(
                    f"a stop string has {len(stop)} characters; at most {MAX_STOP_CHARS} are allowed",
                    param="stop",
                )
        # Longest first, so that the first one found complete at a character is the one that counts.
        self._searches = [_Search(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is now safe to show: no stop string can begin in it. "" for ever after a match.

        If not `may_stop`, a stop string that is complete within `text` is text like any other.
        """
        if self.matched is not None or not self._searches:
            return "" if self.matched is not None else text
        text_start = len(self._held)
        self._held += text
        for position, char in enumerate(text, start=text_start + 1):
            for search in self._searches:
                search.advance(char)
            for search in self._searches:
                if search.num_matched == len(search.stop) and not may_stop:
                    search.skip()
                elif search.num_matched == len(search.stop):
                    self.matched = search.stop
                    end = position if self._include else position - len(search.stop)
                    shown, self._held = self._held[:end], ""
                    return shown
        num_held = max(search.num_matched for search in self._searches)
        num_shown = len(self._held) - num_held
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown

    def flush(self) -> str:
        """The rest of the text, once it is known to be complete."""
        shown, self._held = self._held, ""
        return shown


class _Search:
    """How much of one stop string the end of the text matches (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = _shorter(stop)

    def advance(self, char: str) -> None:
        self.num_matched = _extend(self.stop, self._shorter, self.num_matched, char)

    def skip(self) -> None:
        """Do not count the match that is complete; the next one may begin within it."""
        self.num_matched = self._shorter[self.num_matched]


@lru_cache(maxsize=256)
def _shorter(stop: str) -> Sequence[int]:
    """[n]: the length of the longest proper prefix of stop[:n] that also ends it.

    Remembered, because all replies of a request and most requests of a client have the same stop strings.
    """
    shorter = [0, 0]
    length = 0
    for char in stop[1:]:
        length = _extend(stop, shorter, length, char)
        shorter.append(length)
    return tuple(shorter)


def _extend(stop: str, shorter: Sequence[int], length: int, char: str) -> int:
    """How much of `stop` matches after `char`, if `length` characters of it matched before."""
    while length and stop[length] != char:
        length = shorter[length]
    return length + 1 if stop[length] == char else 0
