"""The vocabulary in the metadata of a GGUF file.

Two kinds: "llama" (SentencePiece: pieces with scores, bytes as a fallback) and "gpt2" (byte-level merges).
Token types decide what is matched in a text before the merges: user-defined tokens always, control tokens
only where special tokens are parsed. Does not know files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import tokenizers
from tokenizers import AddedToken, normalizers
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from legato.errors import ModelError
from legato.text.pre_tokenizers import word_rule
from legato.text.vocabulary import (
    END_TEXTS,
    WORD_MARK,
    Vocabulary,
    byte_level_pieces,
    byte_token,
)

_STRIKE_END = "</s>"
"""Ends a text in Llama 2, but is the end of struck-out text in Gemma and an ordinary word in Qwen: matched
like a control token, yet it ends a reply and is hidden only where the file says so."""


class _Kind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merging:
    """What the two kinds of vocabulary do differently."""

    model: BPE
    normalizer: Normalizer | None
    pre_tokenizer: PreTokenizer | None
    pieces: list[bytes]
    """The bytes of each token if it is an ordinary one."""
    wants_bos: bool

    def encoder(self, matched: set[str]) -> tokenizers.Tokenizer:
        """An encoder that finds the `matched` texts before it merges. All encoders share one model."""
        encoder = tokenizers.Tokenizer(self.model)
        if self.normalizer is not None:
            encoder.normalizer = self.normalizer
        if self.pre_tokenizer is not None:
            encoder.pre_tokenizer = self.pre_tokenizer
        encoder.add_tokens([AddedToken(text, normalized=False) for text in sorted(matched)])
        return encoder


def vocabulary_from_gguf(metadata: Mapping[str, object], num_ids: int = 0) -> Vocabulary:
    """Builds the vocabulary; ModelError names the metadata key that is missing, wrong or not supported.

    A model may have more ids (`num_ids`) than its vocabulary has tokens.
    """
    name = metadata.get("tokenizer.ggml.model")
    if name not in ("llama", "gpt2"):
        raise ModelError(f"tokenizer.ggml.model is {name!r}; the supported ones are llama, gpt2")
    texts = _strings(metadata, "tokenizer.ggml.tokens")
    if not texts:
        raise ModelError("tokenizer.ggml.tokens is empty")
    kinds = _kinds(metadata, texts)
    merging = _by_scores(metadata, texts, kinds) if name == "llama" else _by_merges(metadata, texts)
    bos_id = _id(metadata, "tokenizer.ggml.bos_token_id", len(texts))
    eos_id = _id(metadata, "tokenizer.ggml.eos_token_id", len(texts))
    declared = [_id(metadata, f"tokenizer.ggml.{end}_token_id", len(texts)) for end in ("eot", "eom")]
    eos_ids = {id for id in (eos_id, *declared) if id is not None}
    eos_ids.update(id for id, text in enumerate(texts) if text in END_TEXTS)
    hidden = _ids_of(kinds, _Kind.CONTROL, _Kind.UNKNOWN, _Kind.UNUSED)
    always = {texts[id] for id in _ids_of(kinds, _Kind.USER_DEFINED)} - {_STRIKE_END}
    if_parsed = {texts[id] for id in _ids_of(kinds, _Kind.CONTROL, _Kind.UNKNOWN)} | (
        {_STRIKE_END} & set(texts)
    )
    add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", merging.wants_bos)
    add_eos = _flag(metadata, "tokenizer.ggml.add_eos_token", False)
    return Vocabulary(
        size=max(len(texts), num_ids),
        texts=texts,
        pieces=_pieces(texts, kinds, merging.pieces),
        special=frozenset({*hidden, *eos_ids}),
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(eos_ids),
        prefix=(bos_id,) if add_bos and bos_id is not None else (),
        suffix=(eos_id,) if add_eos and eos_id is not None else (),
        plain=merging.encoder(always),
        parsing=merging.encoder(always | if_parsed),
    )


def _by_scores(metadata: Mapping[str, object], texts: list[str], kinds: list[int]) -> _Merging:
    """SentencePiece's rule: of all neighbours that join to a piece, join those with the best-scored piece.

    The merges of a BPE model say the same: every way to cut a piece into two pieces is a merge, ranked by
    the score of the whole. Pieces of equal score, which trained vocabularies do not have among ordinary
    pieces, merge in the order of their ids.
    """
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(texts))
    # A special token must never grow out of plain text, so those pieces are no merge's result.
    mergeable = _ids_of(kinds, _Kind.NORMAL, _Kind.UNDEFINED, _Kind.USER_DEFINED, _Kind.UNUSED)
    best_first = sorted(mergeable, key=lambda id: scores[id], reverse=True)
    known = {texts[id] for id in best_first}
    merges = []
    for id in best_first:
        text = texts[id]
        for cut in range(len(text) - 1, 0, -1):
            left = text[:cut]
            if left in known:
                right = text[cut:]
                if right in known:
                    merges.append((left, right))
    unknown_id = _id(metadata, "tokenizer.ggml.unknown_token_id", len(texts))
    marks = normalizers.Replace(" ", WORD_MARK)
    starts_with_space = _flag(metadata, "tokenizer.ggml.add_space_prefix", True)
    return _Merging(
        model=_bpe(
            vocab={text: id for id, text in enumerate(texts)},
            merges=merges,
            byte_fallback=True,
            unk_token=None if unknown_id is None else texts[unknown_id],
        ),
        normalizer=normalizers.Sequence([normalizers.Prepend(WORD_MARK), marks])
        if starts_with_space
        else marks,
        pre_tokenizer=None,
        pieces=[text.replace(WORD_MARK, " ").encode() for text in texts],
        wants_bos=True,
    )


def _by_merges(metadata: Mapping[str, object], texts: list[str]) -> _Merging:
    """GPT-2's rule: words of a text in the byte alphabet, merged in the order of the list of merges."""
    rule = word_rule(metadata.get("tokenizer.ggml.pre", "default"))
    merges = []
    for number, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelError(
                f"tokenizer.ggml.merges[{number}] is {merge!r}, not two tokens and a space between"
            )
        merges.append((left, right))
    return _Merging(
        model=_bpe(
            vocab={text: id for id, text in enumerate(texts)}, merges=merges, ignore_merges=rule.whole_words
        ),
        normalizer=None,
        pre_tokenizer=rule.build(),
        pieces=byte_level_pieces(texts),
        wants_bos=rule.add_bos,
    )


def _bpe(
    *,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    byte_fallback: bool = False,
    ignore_merges: bool = False,
    unk_token: str | None = None,
) -> BPE:
    try:
        return BPE(
            vocab=vocab,
            merges=merges,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
            unk_token=unk_token,
        )
    except Exception as error:  # the library raises bare Exception for merges of unknown tokens
        raise ModelError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error


def _kinds(metadata: Mapping[str, object], texts: list[str]) -> list[int]:
    """The type of each token, control for every token that ends a reply in all models."""
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        kinds = [int(_Kind.NORMAL)] * len(texts)
    else:
        kinds = [int(kind) for kind in _numbers(metadata, key, len(texts))]
    return [
        int(_Kind.CONTROL) if text in END_TEXTS else kind for kind, text in zip(kinds, texts, strict=True)
    ]


def _ids_of(kinds: list[int], *wanted: _Kind) -> list[int]:
    return [id for id, kind in enumerate(kinds) if kind in wanted]


def _pieces(texts: list[str], kinds: list[int], ordinary: list[bytes]) -> list[bytes]:
    """The bytes of each token: what is neither ordinary nor a byte is its own name."""
    pieces = list(ordinary)
    for id, kind in enumerate(kinds):
        if kind == _Kind.BYTE:
            byte = byte_token(texts[id])
            if byte is None:
                raise ModelError(
                    f"tokenizer.ggml.tokens[{id}] is a byte token but reads {texts[id]!r}, not <0x00>..<0xFF>"
                )
            pieces[id] = byte
        elif kind not in (_Kind.NORMAL, _Kind.UNDEFINED):
            pieces[id] = texts[id].encode()
    return pieces


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{key} is {_described(value)}, not a list of strings")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise ModelError(f"{key} has text that is not Unicode") from None
    return value


def _numbers(metadata: Mapping[str, object], key: str, count: int) -> list[float]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
        raise ModelError(f"{key} is {_described(value)}, not a list of numbers")
    if len(value) != count:
        raise ModelError(f"{key} has {len(value)} entries, tokenizer.ggml.tokens has {count}")
    if not all(map(math.isfinite, value)):
        raise ModelError(f"{key} has an entry that is not finite")
    return value


def _id(metadata: Mapping[str, object], key: str, size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ModelError(f"{key} is {value!r}, not an id of the {size} tokens")
    return value


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {_described(value)}, not true or false")
    return value


def _described(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
