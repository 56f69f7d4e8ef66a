"""What a misspelled name was probably meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name most like `word`; None if none is like it. Case, dashes and underscores do not count."""
    by_key = {_key(name): name for name in known}
    matches = get_close_matches(_key(word), by_key, n=1, cutoff=0.7)
    return by_key[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: "; did you mean X?", or nothing if no known name is like `word`."""
    name = closest(word, known)
    return "" if name is None else f"; did you mean {name}?"


def _key(name: str) -> str:
    return name.lower().replace("-", "_")
