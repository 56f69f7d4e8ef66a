"""Text that grows token by token is the text of all tokens, and no piece holds half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabularies import scored_metadata

from legato.errors import RequestError
from legato.text.detokenizer import Detokenizer
from legato.text.fake import FakeTokenizer
from legato.text.tokenizer import Tokenizer, tokenizer_from_gguf

BYTES = FakeTokenizer()
PIECES = tokenizer_from_gguf(scored_metadata())


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", ["\u010f", "\U0001f600", "a\u010fb\U0001f600c"])
def test_a_character_of_several_tokens_comes_whole(text: str) -> None:
    """Case A-01."""
    pieces = pieces_of(BYTES, list(text.encode()))
    assert "".join(pieces) == text
    assert all(piece in ("", *text) for piece in pieces)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0xC4], ["", "\ufffd"]),
        ([0xC4, 0x41], ["", "\ufffdA", ""]),
        ([0xF0, 0x9F, 0x98], ["", "", "", "\ufffd"]),
        ([0xFF, 0x41], ["\ufffd", "A", ""]),
        ([0xED, 0xA0, 0x80], ["", "", "\ufffd\ufffd\ufffd", ""]),
        ([0xC4, 257, 0x8F], ["", "", "\u010f", ""]),
    ],
)
def test_bytes_that_are_no_text_become_replacement_characters(ids: list[int], expected: list[str]) -> None:
    """Case A-02: a reply may end inside a character or hold stray bytes."""
    assert pieces_of(BYTES, ids) == expected
    assert "".join(expected) == BYTES.decode(ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 257)), st.booleans())
def test_joined_pieces_are_the_decoded_whole(ids: list[int], skip_special: bool) -> None:
    """Cases A-01 and A-02 for any bytes at all."""
    joined = "".join(pieces_of(BYTES, ids, skip_special=skip_special))
    assert joined == BYTES.decode(ids, skip_special=skip_special)


@settings(deadline=None)
@given(st.lists(st.integers(0, PIECES.vocab_size - 1)), st.text(alphabet="hello \u010f"))
def test_joined_pieces_are_what_a_reply_adds_to_its_prompt(reply: list[int], text: str) -> None:
    """Case A-07: no space is lost between prompt and reply or between pieces."""
    prompt = PIECES.encode(text)
    joined = "".join(pieces_of(PIECES, reply))
    assert PIECES.decode(prompt) + joined == PIECES.decode([*prompt, *reply])


def test_special_tokens_are_shown_where_asked() -> None:
    assert pieces_of(BYTES, [256, 0x41], skip_special=False) == ["<bos>", "A", ""]


def test_an_id_out_of_range_is_refused_and_the_text_goes_on() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.push(0xC4)
    with pytest.raises(RequestError):
        detokenizer.push(258)
    assert detokenizer.push(0x8F) == "\u010f"
