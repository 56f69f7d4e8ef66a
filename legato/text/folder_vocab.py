"""The vocabulary in a Hugging Face model folder.

tokenizer.json makes the encoder, and says what stands before and after every text (transformers 5 does not
heed `add_bos_token` beside it either); which ids BOS and EOS are is spread over tokenizer_config.json,
special_tokens_map.json, generation_config.json and config.json, all of them optional. Does not know models.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from legato.errors import ModelError
from legato.text.json_object import JsonObject, read_json_object
from legato.text.vocabulary import END_TEXTS, WORD_MARK, Vocabulary, byte_level_pieces, byte_token

_log = logging.getLogger(__name__)


def vocabulary_from_folder(folder: Path, num_ids: int | None = None) -> Vocabulary:
    """Builds the vocabulary; ModelError names the file that is missing, damaged or not supported.

    `num_ids`: rows of the model's embedding. It may have more (padding) or fewer than the tokenizer has
    tokens: Gemma 3 1B has a token for images and no row for it. What has no row is no id of the vocabulary.
    """
    path = folder / "tokenizer.json"
    spec = read_json_object(path)
    parsing = _parse(path)
    ids = parsing.get_vocab(with_added_tokens=True)
    added = parsing.get_added_tokens_decoder()
    texts = _texts(ids, path)
    pieces = _pieces(texts, spec.get("decoder"), path)
    for id, token in added.items():
        pieces[id] = token.content.encode()
    special = {id for id, token in added.items() if token.special}

    size = len(texts) if num_ids is None else num_ids
    if size < len(texts):
        _log.warning("%s: the model has no embedding for its tokens from id %d on", path, size)
    bos, eos = _ends(folder, ids, size)
    eos_ids = {*eos, *(id for id in special if texts[id] in END_TEXTS and id < size)}
    prefix, suffix = _frame(parsing, path)
    if max([*prefix, *suffix], default=0) >= size:
        raise ModelError(f"{path}: puts ids around a text that the model does not have (0..{size - 1})")
    return Vocabulary(
        size=size,
        texts=texts,
        pieces=pieces,
        special=frozenset(special | eos_ids),
        bos_id=bos[0] if bos else None,
        eos_id=eos[0] if eos else None,
        eos_ids=frozenset(eos_ids),
        prefix=prefix,
        suffix=suffix,
        plain=_plain_twin(parsing),
        parsing=parsing,
    )


def _parse(path: Path) -> tokenizers.Tokenizer:
    with _faults_of(path):
        parsing = tokenizers.Tokenizer.from_file(str(path))
    parsing.no_truncation()
    parsing.no_padding()
    return parsing


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """What the library makes of a damaged file: a bare Exception, or a panic, which is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelError(f"{path}: is damaged ({' '.join(str(error).split())[:200]})") from error


def _ends(folder: Path, ids: Mapping[str, int], size: int) -> tuple[list[int], list[int]]:
    """The model's BOS ids and EOS ids, the most trusted source first."""
    config = read_json_object(folder / "config.json", optional=True)
    generation_config = read_json_object(folder / "generation_config.json", optional=True)
    numbered = [generation_config, config, config.section("text_config")]
    tokenizer_config = read_json_object(folder / "tokenizer_config.json", optional=True)
    named = [tokenizer_config, read_json_object(folder / "special_tokens_map.json", optional=True)]
    bos = _named_ids(named, "bos_token", ids)
    # "bos_token": null says that there is none, whatever number config.json has.
    if "bos_token" not in tokenizer_config.values:
        bos += _numbered_ids(numbered, "bos_token_id")
    eos = [*_named_ids(named, "eos_token", ids), *_numbered_ids(numbered, "eos_token_id")]
    if max([*bos, *eos], default=0) >= size:
        raise ModelError(f"{folder}: BOS and EOS ids {sorted({*bos, *eos})} are not all in 0..{size - 1}")
    return bos, eos


def _texts(ids: Mapping[str, int], path: Path) -> list[str]:
    """texts[id], "" where no token has that id."""
    size = max(ids.values(), default=-1) + 1
    if size == 0:
        raise ModelError(f"{path} has no tokens")
    if size > 2 * len(ids) + 1000:
        raise ModelError(f"{path} is damaged: its {len(ids)} tokens have ids up to {size - 1}")
    texts = [""] * size
    for text, id in ids.items():
        texts[id] = text
    return texts


def _pieces(texts: list[str], decoder: object, path: Path) -> list[bytes]:
    """The bytes of each token, from the decoder of tokenizer.json.

    Steps that look at neighbours (Strip, which drops the space at the start of a text) are left out: a
    token's bytes do not depend on where it stands.
    """
    byte_fallback = False
    marked = texts
    for step in _decoder_steps(decoder):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "ByteLevel":
            return byte_level_pieces(texts)
        if kind == "Metaspace":
            marked = [text.replace(str(step.get("replacement", WORD_MARK)), " ") for text in marked]
        elif kind == "Replace" and isinstance(pattern, dict) and "String" in pattern:
            marked = [text.replace(str(pattern["String"]), str(step.get("content"))) for text in marked]
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind not in ("Fuse", "Strip"):
            raise ModelError(
                f"{path} has the decoder {kind!r}; the supported ones are ByteLevel, Metaspace, "
                "ByteFallback, Fuse, Strip and Replace of a string"
            )
    pieces = [text.encode() for text in marked]
    if byte_fallback:
        pieces = [byte_token(text) or piece for text, piece in zip(texts, pieces, strict=True)]
    return pieces


def _decoder_steps(decoder: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(decoder, dict):
        yield {"type": None}
    elif decoder.get("type") == "Sequence" and isinstance(decoder.get("decoders"), list):
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder


def _plain_twin(parsing: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same encoder, but the names of special tokens are plain text to it. Both share one model."""
    twin = tokenizers.Tokenizer(parsing.model)
    if parsing.normalizer is not None:
        twin.normalizer = parsing.normalizer
    if parsing.pre_tokenizer is not None:
        twin.pre_tokenizer = parsing.pre_tokenizer
    twin.add_tokens([token for _, token in sorted(parsing.get_added_tokens_decoder().items())])
    twin.encode_special_tokens = True
    return twin


def _frame(parsing: tokenizers.Tokenizer, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text."""
    with _faults_of(path):  # some show only in use
        encoding = parsing.encode("a", add_special_tokens=True)
    is_text = [mask == 0 for mask in encoding.special_tokens_mask]
    if True not in is_text:
        return tuple(encoding.ids), ()
    start, end = is_text.index(True), len(is_text) - is_text[::-1].index(True)
    return tuple(encoding.ids[:start]), tuple(encoding.ids[end:])


def _named_ids(sources: Sequence[JsonObject], key: str, ids: Mapping[str, int]) -> list[int]:
    """Ids of the token texts under `key`, in the order of the sources; a text may be no token."""
    found = []
    for source in sources:
        value = source.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found += [ids[text]] if text in ids else []
        elif text is not None:
            raise source.error(key, "a text, or an object with the text as its content")
    return found


def _numbered_ids(sources: Sequence[JsonObject], key: str) -> list[int]:
    """Numbers under `key`, each of which may be one number or a list of them; a negative one means none."""
    found: list[int] = []
    for source in sources:
        value = source.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for number in values:
            if type(number) is not int:
                raise source.error(key, "an integer or a list of integers")
            found += [number] if number >= 0 else []
    return found
