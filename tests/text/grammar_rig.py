"""Grammars over the fake vocabulary, asked by hand."""

from legato.text.grammar import Grammar, Grammars
from legato.text.grammar_trial import Source

EOS = 257


def ids_of(mask: bytes) -> list[int]:
    """The tokens in a mask."""
    return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]


def compiled(grammars: Grammars, source: Source) -> Grammar:
    return grammars.compile(source).result(timeout=60)


def takes(grammar: Grammar, text: str) -> bool:
    """Whether `text` is of this form, whole."""
    return num_taken(grammar, text) == len(text.encode()) and EOS in ids_of(
        grammar.matcher().mask(text.encode())
    )


def num_taken(grammar: Grammar, text: str) -> int:
    """How many bytes of `text` may come."""
    matcher, ids = grammar.matcher(), text.encode()
    return next((i for i in range(len(ids)) if ids[i] not in ids_of(matcher.mask(ids[:i]))), len(ids))


def raw_schema(text: str) -> Source:
    """As the library takes it, refused where it cannot be followed."""
    return Source(format="json_schema", text=text)
