"""Vocabularies from hand-made GGUF metadata: every rule by hand, a slow oracle, hostile metadata."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    SCORED_PIECES,
    UNUSED,
    merged_metadata,
    scored_metadata,
    slow_pieces,
)

from legato.errors import ModelError, RequestError
from legato.text.origins import Origin, written
from legato.text.pre_tokenizers import WORD_RULES, word_rule
from legato.text.tokenizer import Tokenizer, tokenizer_from_gguf
from legato.text.vocabulary import byte_alphabet


@pytest.fixture(scope="module")
def scored() -> Tokenizer:
    return tokenizer_from_gguf(scored_metadata())


@pytest.fixture(scope="module")
def merged() -> Tokenizer:
    return tokenizer_from_gguf(merged_metadata())


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.special_text(id) for id in ids]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("hello", ["<s>", "\u2581he", "llo"], id="best score first"),
        pytest.param("", ["<s>"], id="empty"),
        pytest.param("he  in", ["<s>", "\u2581he", "\u2581\u2581", "in"], id="two spaces"),
        pytest.param("\u010f", ["<s>", "\u2581", "<0xC4>", "<0x8F>"], id="bytes for what is no piece"),
        pytest.param("\0", ["<s>", "\u2581", "<0x00>"], id="NUL"),
        pytest.param("<s>", ["<s>", "\u2581", "<0x3C>", "s", "<0x3E>"], id="the name of a control token"),
        pytest.param("a<b>a", ["<s>", "\u2581", "a", "<b>", "\u2581", "a"], id="user-defined token"),
    ],
)
def test_scored_pieces_are_found_by_hand(scored: Tokenizer, text: str, expected: list[str]) -> None:
    assert names(scored, scored.encode(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("hello", ["hello"], id="merges in order"),
        pytest.param("hello hello", ["hello", "\u0120", "hello"], id="no merge over the edge of a word"),
        pytest.param(" world", ["\u0120wor", "l", "d"], id="space with the word"),
        pytest.param("", [], id="empty"),
        pytest.param("\0", ["\u0100"], id="NUL"),
        pytest.param("12", ["1", "2"], id="digits"),
        pytest.param("<|im_end|>", list("<|im_end|>"), id="the name of a control token"),
        pytest.param("<tool>h", ["<tool>", "h"], id="user-defined token"),
    ],
)
def test_byte_level_merges_are_found_by_hand(merged: Tokenizer, text: str, expected: list[str]) -> None:
    assert names(merged, merged.encode(text)) == expected


def test_special_tokens_are_read_only_where_asked(scored: Tokenizer, merged: Tokenizer) -> None:
    assert names(scored, scored.encode("a</s>a", parse_special=True))[2:] == ["a", "</s>", "\u2581", "a"]
    assert names(merged, merged.encode("<|im_start|>h", parse_special=True)) == ["<|im_start|>", "h"]


def test_bos_is_added_once_and_only_where_asked(scored: Tokenizer) -> None:
    """Case F-09: neither a chat's prompt nor a completion's gets a second BOS."""
    assert scored.encode("a", add_special_tokens=False)[0] != 1
    assert scored.encode("<s>a", parse_special=True).count(1) == 1
    assert scored.encode_chat(written("<s>a", Origin.TEMPLATE)).count(1) == 1
    assert scored.encode_chat(written("a", Origin.TEMPLATE)).count(1) == 0


def test_eos_is_added_where_the_model_wants_it() -> None:
    tokenizer = tokenizer_from_gguf(scored_metadata(add_eos_token=True, add_bos_token=False))
    ids = tokenizer.encode("a")
    assert (ids[-1], 1 in ids, tokenizer.add_eos, tokenizer.add_bos) == (2, False, True, False)


def test_no_space_is_put_before_the_text_of_a_model_that_wants_none() -> None:
    tokenizer = tokenizer_from_gguf(scored_metadata(add_space_prefix=False))
    assert names(tokenizer, tokenizer.encode("hello")) == ["<s>", "he", "llo"]


def test_every_end_of_turn_token_ends_a_reply() -> None:
    """Case F-10 for a GGUF file: EOS, EOT and EOM of the metadata, and turn ends known by name."""
    metadata = merged_metadata(eos_token_id=0, eot_token_id=1, eom_token_id=2)
    tokenizer = tokenizer_from_gguf(metadata)
    end_of_turn = tokenizer.encode("<|im_end|>", parse_special=True)
    assert tokenizer.eos_ids == {0, 1, 2, *end_of_turn}
    assert tokenizer.eos_id == 0
    assert tokenizer.decode([0, 1, 2, *end_of_turn]) == ""


def test_a_turn_end_that_the_file_calls_ordinary_is_special_all_the_same() -> None:
    metadata = merged_metadata()
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    tokenizer = tokenizer_from_gguf(merged_metadata(token_type=[*types[:-2], NORMAL, types[-1]]))
    [id] = tokenizer.encode("<|im_end|>", parse_special=True)
    assert id in tokenizer.eos_ids
    assert id not in tokenizer.encode("<|im_end|>")


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=" hello<b>\u010f\u2581", max_size=40))
def test_scored_pieces_are_those_of_the_slow_definition(text: str) -> None:
    tokenizer = tokenizer_from_gguf(scored_metadata(token_type=..., add_space_prefix=False))
    scores = {piece: -float(i) for i, piece in enumerate(SCORED_PIECES)}
    expected = []
    for piece in slow_pieces(text.replace(" ", "\u2581"), scores):
        expected += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    assert names(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == expected


@st.composite
def grown_vocabularies(draw: st.DrawFn) -> list[str]:
    """Pieces as training grows them, each of two earlier ones, then scored in any order."""
    pieces = ["a", "b"]
    for _ in range(draw(st.integers(1, 14))):
        piece = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if piece not in pieces:
            pieces.append(piece)
    return draw(st.permutations(pieces))


@settings(deadline=None, max_examples=200)
@given(grown_vocabularies(), st.text(alphabet="ab", max_size=40))
def test_any_scores_give_the_pieces_of_the_slow_definition(pieces: list[str], text: str) -> None:
    scores = {piece: -float(i) for i, piece in enumerate(pieces)}
    tokenizer = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": list(scores.values()),
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    assert names(tokenizer, tokenizer.encode(text)) == slow_pieces(text, scores)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_byte_level_decodes_every_text_to_itself(text: str) -> None:
    tokenizer = tokenizer_from_gguf(merged_metadata())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True), skip_special=False) == text


def test_the_byte_alphabet_is_the_one_that_the_library_decodes() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    [(written, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("\0 \u00ad\u00e9z")
    assert written == "".join(byte_alphabet()[byte] for byte in "\0 \u00ad\u00e9z".encode())


def test_token_bytes_are_those_that_the_token_adds(scored: Tokenizer, merged: Tokenizer) -> None:
    space_he = scored.encode("he", add_special_tokens=False)[0]
    assert scored.token_bytes(space_he) == b" he"
    assert (scored.token_bytes(1), scored.token_bytes(1, skip_special=False)) == (b"", b"<s>")
    assert scored.token_bytes(4 + 0xC4) == b"\xc4"
    assert (scored.special_text(1), scored.special_text(None)) == ("<s>", "")
    assert merged.token_bytes(0xC4) == b"\xc4"


def test_unused_tokens_add_no_text() -> None:
    metadata = scored_metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokenizer = tokenizer_from_gguf(scored_metadata(token_type=[*types[:-1], UNUSED]))
    assert tokenizer.decode([len(tokens) - 1]) == ""


def test_a_decoded_reply_continues_its_prompt(scored: Tokenizer) -> None:
    """Case A-07: the space at the start of a reply is text, whatever stands before it."""
    mark = scored.encode("a", add_special_tokens=False)[0]
    prompt = scored.encode("hello")
    for reply in ([mark, scored.encode("he", add_special_tokens=False)[0]], scored.encode("he"), [mark]):
        whole = scored.decode([*prompt, *reply])
        assert whole == scored.decode(prompt) + scored.decode(reply)
    assert scored.decode([mark]) == " "


@pytest.mark.parametrize("id", [-1, 10**9, 2**70])
def test_ids_out_of_range_are_refused(scored: Tokenizer, id: int) -> None:
    for use in (scored.token_bytes, scored.special_text):
        with pytest.raises(RequestError, match=f"token id {id} is not in 0"):
            use(id)
    with pytest.raises(RequestError):
        scored.decode([1, id])


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(scored: Tokenizer, merged: Tokenizer, text: str) -> None:
    for tokenizer in (scored, merged):
        with pytest.raises(RequestError, match="lone surrogate") as refused:
            tokenizer.encode(text)
        assert text not in str(refused.value)


@pytest.mark.parametrize("text", [" " * 300_000, "\n" * 300_000, "a" * 300_000, "\U0001f600" * 100_000])
def test_long_runs_of_one_character_are_encoded(scored: Tokenizer, merged: Tokenizer, text: str) -> None:
    assert merged.decode(merged.encode(text)) == text
    assert scored.decode(scored.encode(text)) == " " + text


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("gpt-2", ["I", "'", "VE", " don", "'t", " ", " 1234", "!", "\n", "\n", "xAb"]),
        ("smollm", ["I", "'", "VE", " don", "'t", "  ", "1", "2", "3", "4", "!", "\n", "\n", "xAb"]),
        ("qwen2", ["I", "'VE", " don", "'t", " ", " ", "1", "2", "3", "4", "!\n\n", "xAb"]),
        ("llama-bpe", ["I", "'VE", " don", "'t", " ", " ", "123", "4", "!\n\n", "xAb"]),
        ("tekken", ["I", "'VE", " don", "'t", " ", " ", "1", "2", "3", "4", "!\n\n", "x", "Ab"]),
        (
            "deepseek-coder",
            ["I", "'", "VE", " don", "'", "t", "  ", "1", "2", "3", "4", "!", "\n", "\n", "xAb"],
        ),
        ("deepseek-v3", ["I", "'VE", " don", "'t", "  ", "123", "4", "!\n\n", "xAb"]),
        ("default", ["I", "'", "VE", " don", "'", "t", " ", " ", "123", "4", "!", "\n", "\n", "xAb"]),
    ],
)
def test_words_are_cut_by_the_rule_of_the_family(rule: str, expected: list[str]) -> None:
    text = "I'VE don't  1234!\n\nxAb"
    words = [text[start:end] for _, (start, end) in word_rule(rule).build().pre_tokenize_str(text)]
    assert words == expected


@pytest.mark.parametrize("rule", sorted(WORD_RULES))
def test_no_rule_loses_text_or_hangs(rule: str) -> None:
    tokenizer = tokenizer_from_gguf(merged_metadata(pre=rule))
    for text in (
        "A" * 50_000,
        "\u4e2d" * 50_000,
        "1" * 50_000,
        " \t" * 50_000,
        "'" * 50_000,
        "e\u0301 \u0130\u01c5",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_word_that_is_a_token_is_taken_whole_by_llama_3() -> None:
    """No merge leads to "who"."""
    metadata = merged_metadata(pre="llama-bpe")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    more: dict[str, object] = {"tokens": [*tokens, "who"], "token_type": [*types, NORMAL]}
    llama, qwen = (tokenizer_from_gguf(merged_metadata(pre=pre, **more)) for pre in ("llama-bpe", "qwen2"))
    assert llama.encode("who") == [len(tokens)]
    assert len(qwen.encode("who")) == 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": ...}, "tokenizer.ggml.model is None; the supported ones are llama, gpt2"),
        ({"model": "bert"}, "'bert'; the supported ones are llama, gpt2"),
        ({"model": ["llama"]}, "tokenizer.ggml.model is"),
        ({"tokens": ...}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is of type str, not a list of strings"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is of type list, not a list of strings"),
        ({"tokens": ["\ud800"]}, "not Unicode"),
        ({"tokens": ["a"]}, "entries, tokenizer.ggml.tokens has 1"),
        ({"scores": ...}, "tokenizer.ggml.scores is missing"),
        ({"scores": ["x"]}, "tokenizer.ggml.scores is of type list, not a list of numbers"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries"),
        ({"scores": [float("nan")] * (260 + len(SCORED_PIECES))}, "not finite"),
        ({"token_type": 3}, "tokenizer.ggml.token_type is of type int"),
        (
            {"token_type": [BYTE] * (260 + len(SCORED_PIECES))},
            r"tokens\[0\] is a byte token but reads '<unk>'",
        ),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000, not an id of the"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"add_bos_token": 1}, "add_bos_token is of type int, not true or false"),
    ],
)
def test_wrong_metadata_is_refused_by_key(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as refused:
        tokenizer_from_gguf(scored_metadata(**changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pre": "no-such-rule"}, "'no-such-rule'; the supported pre-tokenizers are .*qwen2"),
        ({"pre": 7}, "tokenizer.ggml.pre is 7"),
        ({"merges": ...}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, r"tokenizer.ggml.merges\[0\] is 'ab'"),
        ({"merges": ["h e", "no pe"]}, "do not fit tokenizer.ggml.tokens"),
    ],
)
def test_wrong_merges_are_refused_by_key(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        tokenizer_from_gguf(merged_metadata(**changes))


def test_empty_and_repeated_tokens_do_no_harm() -> None:
    tokenizer = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["", "a", "a", ""],
            "tokenizer.ggml.scores": [0, 0, 0, 0],
            "tokenizer.ggml.token_type": [CONTROL, NORMAL, NORMAL, 4],
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    assert tokenizer.decode(tokenizer.encode("aza")) == "aa"
