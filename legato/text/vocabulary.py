"""What a tokenizer is made of, and how the written form of a token becomes bytes.

Does not know where a vocabulary comes from (see `gguf_vocab` and `folder_vocab`) nor how it is used (see
`tokenizer`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

COMPOSED = 4
"""Bytes of a text of which a Unicode normalizer makes one byte, at most: a bold A of mathematics is an A."""
WORD_MARK = "\u2581"
"""The sign that SentencePiece vocabularies write for a space."""

END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Control tokens that end a reply in every model that has them, whether or not its files say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of one model and the two encoders over them."""

    size: int
    """Ids run from 0 to size - 1. Ids without a text (padding of the embedding matrix) add no bytes."""
    texts: Sequence[str]
    """texts[id]: the token as the model's files write it."""
    pieces: Sequence[bytes]
    """pieces[id]: the bytes that the token adds to a text."""
    special: frozenset[int]
    """Ids that steer the model and are no part of a reply's text."""
    bos_id: int | None
    eos_id: int | None
    """The end-of-text token that the model's files name first."""
    eos_ids: frozenset[int]
    """Every id that ends a reply, `eos_id` among them."""
    prefix: tuple[int, ...]
    """Ids that the model wants before every text, BOS as a rule."""
    suffix: tuple[int, ...]
    """Ids that the model wants after every text."""
    plain: tokenizers.Tokenizer
    """Encodes text in which the names of special tokens are ordinary text."""
    parsing: tokenizers.Tokenizer
    """Encodes text in which the names of special tokens are those tokens."""


def longest_token(vocabulary: Vocabulary) -> int | None:
    """The most bytes of a text that one token can stand for.

    None where that has no bound: a vocabulary without a token for each byte makes one unknown token of any
    stretch, and a normalizer other than those that replace or prepend a text may shorten it.
    """
    pieces = {*vocabulary.pieces}
    if any(bytes([byte]) not in pieces for byte in range(256)):
        return None
    normalizer = vocabulary.parsing.normalizer
    shrinks = 1 if normalizer is None else _shrinks(normalizer)
    if shrinks is None:
        return None
    names = {vocabulary.texts[id].encode() for id in vocabulary.special if id < len(vocabulary.texts)}
    return shrinks * max(map(len, pieces | names))


def _shrinks(normalizer: Any) -> int | None:
    """By which factor, at most, it shortens a text, in bytes."""
    state = json.loads(normalizer.__getstate__())
    parts = state.get("normalizers", [state])
    factor = 1
    for part in parts:
        if part["type"] in ("NFC", "NFKC"):
            factor *= COMPOSED
        elif part["type"] != "Prepend" and not (
            part["type"] == "Replace" and part["pattern"] == {"String": " "} and part["content"]
        ):
            return None
    return factor


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level vocabularies write for the bytes 0..255.

    A byte that is a visible Latin-1 character stands for itself; the others take the characters from
    U+0100 on, in order (Radford et al. 2019, the GPT-2 encoder).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = []
    num_hidden = 0
    for byte in range(256):
        if byte in visible:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + num_hidden))
            num_hidden += 1
    return alphabet


def byte_level_pieces(texts: Iterable[str]) -> list[bytes]:
    """Bytes of tokens written in the byte alphabet; a token with a character outside it is plain text."""
    alphabet = byte_alphabet()
    # Characters below U+0100 that are not in the alphabet must fail the Latin-1 step, not pass as bytes.
    table = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for byte, char in enumerate(alphabet)}
    pieces = []
    for text in texts:
        try:
            pieces.append(text.translate(table).encode("latin-1"))
        except UnicodeEncodeError:
            pieces.append(text.encode())
    return pieces


def byte_token(text: str) -> bytes | None:
    """The byte that `<0xAB>` stands for; None for any other text."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        return bytes.fromhex(text[3:5])
    except ValueError:
        return None
