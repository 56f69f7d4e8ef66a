"""What a grammar costs: to compile, and the mask of each token, with the demo model's vocabulary.

    python -m benchmarks.grammar [MODEL]

Prints one line for each grammar: milliseconds to compile (the trial in its own process included),
microseconds of a mask along one reply, median and 99th percentile over 20 replies.
"""

import argparse
import statistics
import time
from pathlib import Path

from legato.models.load import open_model
from legato.models.source import resolve
from legato.text.grammar import Grammars, choice_source, json_source, regex_source
from legato.text.tokenizer import tokenizer_from_gguf

REPLIES = 20
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = '{"name": "Hello w\u00f6rld, this is a text", "age": 45, "tags": ["a", "bcd", "another one"]}'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="gemma3-270m", help="of which a GGUF file's vocabulary")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "legato")
    options = parser.parse_args()
    opened = open_model(resolve(options.model, cache_dir=options.cache_dir))
    if opened.gguf is None:
        parser.error("not a GGUF file")
    tokenizer = tokenizer_from_gguf(opened.gguf.metadata, opened.spec.vocab_size)
    began = time.perf_counter()
    grammars = Grammars(tokenizer, opened.spec.vocab_size)
    print(f"vocabulary of {opened.spec.vocab_size} tokens: {time.perf_counter() - began:.2f} s")
    grammars.compile(choice_source(["warm"])).result()
    for name, source, reply in (
        ("schema", json_source(grammars.schema(SCHEMA, strict=True)), PERSON),
        ("any JSON", json_source(grammars.schema({}, strict=True)), PERSON),
        ("any text", regex_source("(?s:.*)"), PERSON),
        (
            "10,000 choices",
            choice_source([f"choice number {i}" for i in range(10_000)]),
            "choice number 4711",
        ),
    ):
        began = time.perf_counter()
        grammar = grammars.compile(source).result()
        compiled = time.perf_counter() - began
        ids, times = tokenizer.encode(reply, add_special_tokens=False), []
        for _ in range(REPLIES):
            matcher = grammar.matcher()
            for i in range(len(ids) + 1):
                began = time.perf_counter()
                matcher.mask(ids[:i])
                times.append(time.perf_counter() - began)
        median, p99 = 1e6 * statistics.median(times), 1e6 * statistics.quantiles(times, n=100)[-1]
        print(f"{name}: compiled in {1e3 * compiled:.1f} ms, a mask {median:.0f} us, p99 {p99:.0f} us")


if __name__ == "__main__":
    main()
