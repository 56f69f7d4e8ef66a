"""Hand-made GGUF metadata of two small tokenizers, and a slow SentencePiece to compare with."""

from collections.abc import Mapping
from itertools import pairwise

from legato.text.vocabulary import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SCORED_PIECES = [
    "\u2581",
    *"abcdehilnorstw",
    "in",
    "\u2581i",
    "he",
    "ll",
    "\u2581he",
    "lo",
    "llo",
    "\u2581\u2581",
]
"""Ordinary pieces of the SentencePiece vocabulary, the best-scored pair first after the single characters."""
NUM_SCORED_SPECIAL = 4 + 256
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w", "o r", "\u0120w or", "\u0120 \u0120"]


def scored_metadata(**changes: object) -> dict[str, object]:
    """SentencePiece: 0 <unk>, 1 <s>, 2 </s>, 3 user-defined `<b>`, 4..259 the bytes, then SCORED_PIECES.

    `changes` replace values: `tokens=...` stands for "tokenizer.ggml.tokens".
    """
    tokens = ["<unk>", "<s>", "</s>", "<b>", *(f"<0x{byte:02X}>" for byte in range(256)), *SCORED_PIECES]
    return _with_changes(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * NUM_SCORED_SPECIAL
            + [-float(i) for i in range(len(SCORED_PIECES))],
            "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, USER_DEFINED]
            + [BYTE] * 256
            + [NORMAL] * len(SCORED_PIECES),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        },
        changes,
    )


def merged_metadata(**changes: object) -> dict[str, object]:
    """Byte-level: 0..255 bytes, results of MERGES, `<|im_start|>`, `<|im_end|>`, user-defined `<tool>`."""
    results = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*byte_alphabet(), *results, "<|im_start|>", "<|im_end|>", "<tool>"]
    return _with_changes(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [NORMAL] * (256 + len(results)) + [CONTROL, CONTROL, USER_DEFINED],
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        },
        changes,
    )


def _with_changes(metadata: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    return {key: value for key, value in changed.items() if value is not ...}


def slow_pieces(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece by its definition: join the best-scored neighbours, leftmost first, until none join."""
    pieces = list(text)
    while True:
        joins = [
            (-scores[left + right], position)
            for position, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not joins:
            return pieces
        _, position = min(joins)
        pieces[position : position + 2] = [pieces[position] + pieces[position + 1]]
