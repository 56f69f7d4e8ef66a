"""A process that tries out grammars from strangers, so that one that never ends, or takes all memory, or
crashes the library, costs this process and nothing else.

Run as a script, and alone: it imports nothing of Legato. It reads one JSON object a line and answers each
with one. The first is {"num_ids", "memory_bytes", "seconds", "limits"}, the others are {"format", "text"};
answers have "error", "" for none, and "grammar", the text in the library's own form.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from


class Bytes:
    """A vocabulary of the bytes, an end, and ids that mean nothing."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self, num_ids: int) -> None:
        texts = [bytes([byte]) for byte in range(256)]
        self.tokens = [*texts, b"<eos>", *[b""] * (num_ids - 257)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def tried(tokens: LLTokenizer, job: Mapping[str, str], limits: LLParserLimits) -> dict[str, str]:
    """The answer to one line."""
    try:
        grammar = grammar_from(job["format"], job["text"])  # type: ignore[arg-type]
    except ValueError as error:
        return {"error": str(error) or "not a grammar", "grammar": ""}
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # whether there is any reply of this form
    return {"error": matcher.get_error(), "grammar": grammar}


def main() -> None:
    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"], first["memory_bytes"]))
    tokens = LLTokenizer(TokenizerWrapper(Bytes(max(first["num_ids"], 257))))
    limits = LLParserLimits(**first["limits"])
    print(json.dumps({"error": "", "grammar": ""}), flush=True)
    for line in sys.stdin:
        signal.alarm(first["seconds"])  # ends this process, should nobody be left to do it
        print(json.dumps(tried(tokens, json.loads(line), limits)), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
