"""Hugging Face folders, with small tokenizers trained here and compared with the library's own answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from legato.errors import ModelError, RequestError
from legato.text.origins import Origin, written
from legato.text.tokenizer import Tokenizer, tokenizer_from_folder

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello there \u010f\u00e9"] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<|eot_id|>"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """Spaces as U+2581; characters that the corpus lacks as bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL))
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    spec["model"]["byte_fallback"] = True
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoder
    return tokenizer


MARKS = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
MARKS_AND_STRIP = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
KINDS = {
    "byte level": byte_level,
    "byte fallback": lambda: byte_fallback(MARKS),
    "byte fallback and strip": lambda: byte_fallback(MARKS_AND_STRIP),
}


def write(folder: Path, tokenizer: tokenizers.Tokenizer, **files: object) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer_from_folder(folder)


@pytest.fixture(scope="module", params=KINDS, ids=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and the library's for the same folder."""
    theirs = KINDS[request.param]()
    return write(tmp_path_factory.mktemp("model"), theirs), theirs


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(
        alphabet=st.one_of(st.sampled_from("the hello <tool>\u010f"), st.characters(codec="utf-8")),
        max_size=50,
    )
)
def test_ids_and_texts_are_those_of_the_library(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assume(not any(special in text for special in SPECIAL))  # the library reads them, ours only where asked
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    whole = ours.decode(ids, skip_special=False)
    # The library's Strip drops one space at the start of a text; here a token's bytes never depend on place.
    assert theirs.decode(ids, skip_special_tokens=False) in (whole, whole.removeprefix(" "))
    marks_spaces = not isinstance(theirs.decoder, decoders.ByteLevel)
    assert whole == (text.replace("\u2581", " ") if marks_spaces else text)


def test_special_tokens_are_read_only_where_asked(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    text = "hello<s></s><tool>"
    parsed = ours.encode(text, parse_special=True)
    assert parsed == theirs.encode(text).ids
    plain = ours.encode(text)
    assert not {1, 2} & set(plain)
    assert plain[-1] == parsed[-1] == theirs.token_to_id("<tool>")
    assert ours.decode(plain) == text
    assert ours.decode(parsed) == "hello<tool>"


def test_the_post_processor_says_what_stands_around_a_text(tmp_path: Path) -> None:
    theirs = byte_level()
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names: dict[str, object] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    ours = write(tmp_path, theirs, tokenizer_config=names)
    assert ours.encode("hello") == theirs.encode("hello").ids
    assert (ours.encode("")[0], ours.encode("")[-1]) == (1, 2)
    assert (ours.bos_id, ours.eos_id, ours.add_bos, ours.add_eos) == (1, 2, True, True)
    assert ours.encode("<s>hello", parse_special=True).count(1) == 1
    assert ours.encode("hello", add_special_tokens=False) == ours.encode_chat(
        written("hello", Origin.TEMPLATE)
    )


@pytest.mark.parametrize(
    ("files", "bos", "eos", "eos_ids"),
    [
        ({}, None, None, {3}),
        ({"generation_config": {"eos_token_id": [0, 2]}}, None, 0, {0, 2, 3}),
        ({"generation_config": {"eos_token_id": 2}, "config": {"eos_token_id": 0}}, None, 2, {0, 2, 3}),
        ({"tokenizer_config": {"eos_token": "</s>"}, "config": {"eos_token_id": [0]}}, None, 2, {0, 2, 3}),
        ({"special_tokens_map": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}}, 1, 2, {2, 3}),
        ({"config": {"bos_token_id": 1, "text_config": {"eos_token_id": 2}}}, 1, 2, {2, 3}),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 1}}, None, None, {3}),
        ({"tokenizer_config": {"eos_token": "no such token", "bos_token": {}}}, None, None, {3}),
        ({"generation_config": {"eos_token_id": None, "bos_token_id": -1}}, None, None, {3}),
    ],
)
def test_every_file_may_name_ids_that_end_a_reply(
    tmp_path: Path, files: dict[str, object], bos: int | None, eos: int | None, eos_ids: set[int]
) -> None:
    """Case F-10: all ids of a list count, wherever it stands."""
    tokenizer = write(tmp_path, byte_level(), **files)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (bos, eos, eos_ids)
    assert tokenizer.decode(sorted(eos_ids)) == ""


def test_ids_that_pad_the_embedding_matrix_add_no_text(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    tokenizer = tokenizer_from_folder(tmp_path, 10**12)
    assert tokenizer.vocab_size == 10**12
    assert tokenizer.decode([10**12 - 1]) == ""
    assert (tokenizer.token_bytes(400, skip_special=False), tokenizer.special_text(400)) == (b"", "")
    with pytest.raises(RequestError):
        tokenizer.decode([10**12])


def test_metaspace_decoders_write_spaces(tmp_path: Path) -> None:
    theirs = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.Metaspace()
    theirs.decoder = decoders.Metaspace()
    theirs.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=100, special_tokens=SPECIAL))
    ours = write(tmp_path, theirs)
    ids = ours.encode("the lazy dog")
    assert ids == theirs.encode("the lazy dog").ids
    assert ours.decode(ids) == " the lazy dog"


def test_truncation_and_padding_of_the_file_are_not_heeded(tmp_path: Path) -> None:
    theirs = byte_level()
    theirs.enable_truncation(2)
    theirs.enable_padding(length=50, pad_id=5)
    tokenizer = write(tmp_path, theirs)
    for parse_special in (False, True):
        ids = tokenizer.encode("the lazy dog", parse_special=parse_special)
        assert len(ids) < 12
        assert tokenizer.decode(ids) == "the lazy dog"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: is missing"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "holds a JSON list, not an object"),
        (b"{}", "is damaged"),
        (b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "is damaged"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=f"tokenizer.json.*{complaint}"):
        tokenizer_from_folder(tmp_path)


def test_ids_far_apart_are_refused_before_room_is_made_for_them(tmp_path: Path) -> None:
    spec = json.loads(byte_level().to_str())
    spec["model"]["vocab"] = {"a": 4_000_000_000}
    spec["model"]["merges"] = spec["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelError, match="1 tokens have ids up to 4000000000"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.CTC()])])
def test_decoders_that_look_beyond_one_token_are_refused(
    tmp_path: Path, decoder: decoders.Decoder | None
) -> None:
    theirs = byte_level()
    theirs.decoder = decoder
    with pytest.raises(ModelError, match="supported ones are ByteLevel"):
        write(tmp_path, theirs)


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "generation_config", "config"])
def test_damage_in_the_files_beside_it_is_refused_by_name(tmp_path: Path, name: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{name}.json").write_text("{")
    with pytest.raises(ModelError, match=f"{name}.json: not JSON"):
        tokenizer_from_folder(tmp_path)


def test_an_end_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="EOS ids \\[2, 99999\\] are not all in 0"):
        write(tmp_path, byte_level(), generation_config={"eos_token_id": [2, 99999]})
