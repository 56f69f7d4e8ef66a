"""Grammars: what they allow, what they cost, and what is refused. Case J-07 throughout."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from grammar_rig import EOS, compiled, ids_of, raw_schema, takes
from tiny_vocabularies import merged_metadata, scored_metadata

from legato.errors import ConstraintError, QueueFullError, RequestError, UnavailableError
from legato.text import grammar_trial
from legato.text.fake import FakeTokenizer
from legato.text.grammar import (
    Grammar,
    GrammarLimits,
    Grammars,
    choice_source,
    grammar_source,
    json_source,
    regex_source,
)
from legato.text.grammar_trial import Source, WorkLimits
from legato.text.tokenizer import Tokenizer, tokenizer_from_gguf

ENDLESS = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40))


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (choice_source(["yes", 'n"\\\n/ö 🦊', ""]), ["yes", 'n"\\\n/ö 🦊', ""], ["ye", "yess", "no"]),
        (regex_source(r"[a-c]+/\d{2,3}"), ["ab/12", "c/123"], ["ab/1", "/12", "ab/1234", "xab/12"]),
        (regex_source("^(a+)+b$"), ["ab", "aaaab"], ["aaaa", "b"]),
        (grammar_source('root ::= "a" tail\ntail ::= [0-9]+ | "z"'), ["a1", "az"], ["a", "z"]),
        (grammar_source('start: "a" TAIL\nTAIL: /[0-9]+/'), ["a1"], ["a", "az"]),
        (raw_schema(json.dumps({"enum": [1, "b", None]})), ["1", '"b"', "null"], ["2", "b"]),
        (raw_schema(json.dumps({})), ['{"a": [1.5e3, true]}', '"é\\n"'], ["{", "'a'", "1,", "NaN"]),
    ],
    ids=["choice", "regex", "anchored regex", "GBNF", "Lark", "enum", "any JSON"],
)
def test_a_grammar_takes_its_texts_and_no_others(
    grammars: Grammars, source: Source, good: list[str], bad: list[str]
) -> None:
    grammar = compiled(grammars, source)
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


class TestMatcher:
    def test_a_mask_is_a_function_of_the_tokens_alone(self, grammars: Grammars) -> None:
        """Asked in any order, with jumps and repetitions, as after a preemption or in a replay."""
        grammar = compiled(grammars, json_source(grammars.schema({"type": "object"}, strict=True)))
        texts = (
            b'{"name": ["x\\n", 5, {"a": null}], "b": -1.5}',
            b'{"other": "text", "of": ["its", "kind"]}',
        )
        beginnings = [text[:i] for text in texts for i in range(len(text) + 1)]
        expected = [grammar.matcher().mask(beginning) for beginning in beginnings]
        once, rng = grammar.matcher(), random.Random(1)
        for i in [*range(len(beginnings)), *(rng.randrange(len(beginnings)) for _ in range(200))]:
            assert once.mask(beginnings[i]) == expected[i]

    def test_replies_of_one_request_do_not_disturb_each_other(self, grammars: Grammars) -> None:
        grammar = compiled(grammars, choice_source(["abc", "xyz"]))
        first, second = grammar.matcher(), grammar.matcher()
        assert [ids_of(first.mask(b"abc"[:i])) for i in range(4)] == [[97, 120], [98], [99], [EOS]]
        assert ids_of(second.mask(b"")) == [97, 120]
        assert ids_of(second.mask(b"x")) == [ord("y")]

    def test_a_token_that_was_not_allowed_is_an_error_and_forgotten(self, grammars: Grammars) -> None:
        matcher = compiled(grammars, choice_source(["abc"])).matcher()
        with pytest.raises(ConstraintError, match="after 2 tokens"):
            matcher.mask(b"ax")
        assert ids_of(matcher.mask(b"a")) == [ord("b")]

    def test_work_without_bound_at_one_token_is_an_error(self) -> None:
        """An ambiguous grammar: the parser's rows grow with every token."""
        grammars = Grammars(FakeTokenizer(), 258, limits=GrammarLimits(work=WorkLimits(step_max_items=500)))
        matcher = compiled(grammars, grammar_source('start: e\ne: e e | e e e | "a"')).matcher()
        with pytest.raises(ConstraintError, match="limit 500"):
            any(matcher.mask(b"a" * i) == b"" for i in range(200))


class TestTokens:
    """Which ids are allowed where bytes are."""

    @pytest.fixture(params=["scored", "merged"])
    def tokenizer(self, request: pytest.FixtureRequest) -> Tokenizer:
        return tokenizer_from_gguf(scored_metadata() if request.param == "scored" else merged_metadata(), 999)

    def test_a_json_string_holds_no_special_token_and_every_way_to_spell_text(
        self, tokenizer: Tokenizer
    ) -> None:
        grammar = compiled(Grammars(tokenizer, 999), raw_schema('{"type": "string"}'))
        allowed = {*ids_of(grammar.matcher().mask(spelled(tokenizer, '"')))}
        vocabulary = tokenizer.vocabulary
        assert not allowed & vocabulary.special
        pieces = {id: tokenizer.token_bytes(id, skip_special=False) for id in range(999)}
        plain = {id for id, piece in pieces.items() if piece.isalnum() and id not in vocabulary.special}
        assert plain <= allowed
        assert all(pieces[id] and pieces[id] not in b'\n\r\t"' for id in allowed - {*_escapes(pieces)})

    def test_every_end_of_text_token_ends_and_names_of_special_tokens_are_no_ends(
        self, tokenizer: Tokenizer
    ) -> None:
        matcher = compiled(Grammars(tokenizer, 999), choice_source(["he"])).matcher()
        assert {*ids_of(matcher.mask(spelled(tokenizer, "he")))} == tokenizer.eos_ids

    def test_ids_past_the_models_are_never_allowed(self) -> None:
        tokenizer = tokenizer_from_gguf(scored_metadata())
        mask = compiled(Grammars(tokenizer, 100), regex_source("(?s:.*)")).matcher().mask(())
        assert max(ids_of(mask)) < 100
        assert set(ids_of(mask)) & tokenizer.eos_ids


def with_signal_at(grammars: Grammars, sent: signal.Signals, *, jobs: int) -> None:
    """Send the signal to the process just before each of the next jobs."""
    trial, left = grammars._trial, [jobs]
    running = trial._running

    def struck() -> "subprocess.Popen[bytes]":
        process = running()
        if left[0]:
            left[0] -= 1
            process.send_signal(sent)
        return process

    trial._running = struck  # type: ignore[method-assign]


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of single bytes."""
    by_piece = {piece: id for id, piece in enumerate(tokenizer.vocabulary.pieces)}
    return [by_piece[bytes([byte])] for byte in text.encode()]


def _escapes(pieces: dict[int, bytes]) -> Iterable[int]:
    """Ids whose bytes leave the string, or begin an escape in it."""
    return (id for id, piece in pieces.items() if b'"' in piece or b"\\" in piece)


REFUSED = {
    "too large": (regex_source("a" * 300_000), r"has 300000 bytes, at most 262144"),
    "a schema of 1 MB": (
        raw_schema(json.dumps({"enum": ["x" * 100 + str(i) for i in range(10_000)]})),
        "at most 262144",
    ),
    "invalid regex": (regex_source("(a"), "unclosed group"),
    "look-around": (regex_source("(?=a)b"), "look-around"),
    "back reference": (regex_source(r"(a)\1"), "backreferences are not supported"),
    "deep regex": (regex_source("(" * 5000 + "a" + ")" * 5000), "nested"),
    "no grammar": (grammar_source("hello"), "."),
    "GBNF without a root": (grammar_source('a ::= "b"'), "root"),
    "GBNF with an unknown rule": (grammar_source("root ::= a"), "'a' not found"),
    "deep GBNF": (grammar_source("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000), "recursion"),
    "deep Lark": (grammar_source("start: " + "(" * 50_000 + '"a"' + ")" * 50_000), "nested"),
    "unknown rule": (grammar_source("start: x"), "unknown name"),
    "not JSON": (raw_schema("{"), "."),
    "unknown type": (raw_schema('{"type": "strang"}'), "Invalid type: strang"),
    "unknown keyword": (raw_schema('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    "no such reference": (raw_schema('{"$ref": "#/$defs/a"}'), r"\$defs/a"),
    "remote reference": (raw_schema('{"$ref": "http://localhost/x"}'), "not fetch"),
    "refers to itself": (raw_schema('{"$ref": "#"}'), "no text has this form"),
    "nothing fits": (raw_schema('{"enum": []}'), "Unsatisfiable"),
    "too many combinations": (
        raw_schema(
            json.dumps(
                {
                    "allOf": [
                        {"anyOf": [{"properties": {f"k{i}_{j}": {"type": "null"}}} for j in range(6)]}
                        for i in range(8)
                    ]
                }
            )
        ),
        "too large",
    ),
}


class TestLimits:
    @pytest.mark.parametrize(("source", "why"), REFUSED.values(), ids=REFUSED.keys())
    def test_what_cannot_be_is_refused_in_one_line(
        self, grammars: Grammars, source: Source, why: str
    ) -> None:
        with pytest.raises(RequestError, match=why) as refused:
            compiled(grammars, source)
        assert len(refused.value.message) <= 320
        assert "\n" not in refused.value.message

    @pytest.mark.parametrize(
        "source",
        [
            regex_source("(a{1,100}){1,100}"),
            regex_source("(.*a){25}b"),
            regex_source("|".join(f"word number {i}" for i in range(10_000))),
            choice_source([f"word number {i}" for i in range(10_000)]),
            raw_schema(json.dumps({"enum": [f"word number {i}" for i in range(10_000)]})),
            raw_schema(
                '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": '
                '"#/$defs/a"}}, "additionalProperties": false}}}'
            ),
            raw_schema('{"type": "string", "maxLength": 1000000}'),
        ],
        ids=[
            "nested counts",
            "nested stars",
            "10,000 ways",
            "10,000 choices",
            "10,000 values",
            "recursive schema",
            "long string",
        ],
    )
    def test_what_made_others_hang_compiles_or_fails_at_once(
        self, grammars: Grammars, source: Source
    ) -> None:
        began = time.monotonic()
        matcher, text = compiled(grammars, source).matcher(), b""
        for _ in range(8):
            text += bytes(ids_of(matcher.mask(text))[:1])
        assert time.monotonic() - began < grammars.limits.compile_s

    def test_a_grammar_that_never_ends_is_given_up_and_the_next_one_compiles(self) -> None:
        grammars = Grammars(FakeTokenizer(), 258, limits=GrammarLimits(compile_s=0.3))
        with pytest.raises(RequestError, match=r"within 0\.3 s and 1024 MiB"):
            compiled(grammars, grammar_source(ENDLESS))
        assert takes(compiled(grammars, choice_source(["a"])), "a")

    def test_the_process_is_started_again_where_it_died(self) -> None:
        grammars = Grammars(FakeTokenizer(), 258)
        compiled(grammars, choice_source(["a"]))
        process = grammars._trial._process
        assert process is not None
        os.kill(process.pid, 9)
        process.wait()
        assert takes(compiled(grammars, choice_source(["b"])), "b")

    @pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
    @pytest.mark.parametrize("large", [False, True])
    def test_a_process_that_somebody_ends_or_stops_at_work_is_replaced_and_the_grammar_tried_again(
        self, sent: signal.Signals, large: bool
    ) -> None:
        """Also where the job is longer than a pipe, so that a stopped process does not even read it."""
        grammars = Grammars(FakeTokenizer(), 258, limits=GrammarLimits(compile_s=30))
        with_signal_at(grammars, sent, jobs=1)
        began = time.monotonic()
        grammar = compiled(grammars, choice_source(["a" * 150_000 if large else "a", "b"]))
        assert takes(grammar, "b")
        assert time.monotonic() - began < 25

    @pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
    def test_one_whose_successor_fares_alike_is_no_fault_of_the_grammar(self, sent: signal.Signals) -> None:
        grammars = Grammars(FakeTokenizer(), 258, limits=GrammarLimits(compile_s=30))
        with_signal_at(grammars, sent, jobs=2)
        with pytest.raises(UnavailableError, match="killed or stopped"):
            compiled(grammars, choice_source(["a"]))
        assert takes(compiled(grammars, choice_source(["b"])), "b")

    def test_one_that_is_stopped_while_it_starts_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processes: list[subprocess.Popen[bytes]] = []

        def start(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
            processes.append(popen(*args, **options))
            if len(processes) == 1:
                processes[0].send_signal(signal.SIGSTOP)
            return processes[-1]

        popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", start)
        grammars = Grammars(FakeTokenizer(), 258)
        assert takes(compiled(grammars, choice_source(["a"])), "a")
        assert [process.poll() for process in processes] == [-signal.SIGKILL, None]

    def test_while_one_is_stopped_the_grammars_of_others_wait_for_a_moment_only(self) -> None:
        grammars = Grammars(FakeTokenizer(), 258, limits=GrammarLimits(compile_s=30))
        with_signal_at(grammars, signal.SIGSTOP, jobs=1)
        asked = [grammars.compile(choice_source([text])) for text in ("a", "b", "c")]
        assert all(takes(future.result(25), text) for future, text in zip(asked, "abc", strict=True))

    def test_one_that_crashes_by_itself_is_not_tried_again(self) -> None:
        grammars = Grammars(FakeTokenizer(), 258)
        with_signal_at(grammars, signal.SIGSEGV, jobs=1)
        with pytest.raises(RequestError, match="cannot be compiled within"):
            compiled(grammars, choice_source(["a"]))

    def test_of_endless_grammars_only_so_many_wait(self) -> None:
        limits = GrammarLimits(compile_s=0.3, waiting=2)
        grammars = Grammars(FakeTokenizer(), 258, limits=limits)
        endless = [grammar_source(f"{ENDLESS}\n// {i}") for i in range(2)]
        waiting = [grammars.compile(source) for source in endless]
        with pytest.raises(QueueFullError, match="2 grammars wait"):
            grammars.compile(choice_source(["a"]))
        for future in waiting:
            with pytest.raises(RequestError, match="within"):
                future.result()
        assert takes(compiled(grammars, choice_source(["a"])), "a")

    def test_of_endless_grammars_none_waits_for_long(self) -> None:
        limits = GrammarLimits(compile_s=0.3, wait_s=0.5)
        grammars = Grammars(FakeTokenizer(), 258, limits=limits)
        compiled(grammars, choice_source(["a"]))  # starts the process
        began = time.monotonic()
        waiting = [grammars.compile(grammar_source(f"{ENDLESS}\n// {i}")) for i in range(20)]
        errors = [future.exception() for future in waiting]
        assert time.monotonic() - began < 5, "20 x 0.3 s"
        assert isinstance(errors[0], RequestError)
        assert isinstance(errors[-1], QueueFullError)
        assert takes(compiled(grammars, choice_source(["b"])), "b")

    def test_what_many_ask_for_at_once_is_compiled_once(self) -> None:
        grammars = Grammars(FakeTokenizer(), 258)
        asked = [grammars.compile(choice_source(["a"])) for _ in range(5)]
        assert len({id(future.result()) for future in asked}) == 1

    def test_a_process_that_ends_while_it_is_asked_gives_no_answer_and_leaves_nothing_open(self) -> None:
        process = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.wait()
        answer, failure = grammar_trial._asked(process, {"text": "x" * 100_000}, time.monotonic() + 1)
        assert (answer, failure) == (None, grammar_trial._Failure.ENDED)
        grammar_trial._killed(process)
        assert process.stdin is not None
        assert process.stdin.closed

    def test_a_deep_schema_is_refused_with_both_numbers(self, grammars: Grammars) -> None:
        schema: dict[str, object] = {"type": "integer"}
        for _ in range(5000):
            schema = {"type": "array", "items": schema}
        with pytest.raises(RequestError, match="nested 5001 deep, at most 64"):
            grammars.schema(schema, strict=True)

    def test_keywords_that_are_not_supported_are_left_out_unless_strict(self, grammars: Grammars) -> None:
        schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
        assert takes(compiled(grammars, json_source(grammars.schema(schema, strict=False))), "[1, 1]")
        with pytest.raises(RequestError, match="uniqueItems"):
            compiled(grammars, json_source(grammars.schema(schema, strict=True)))

    def test_blanks_between_the_parts_of_json_come_to_an_end(self, grammars: Grammars) -> None:
        matcher = compiled(grammars, json_source(grammars.schema({"type": "object"}, strict=True))).matcher()
        text = b"{"
        while blanks := [id for id in ids_of(matcher.mask(text)) if id in b" \t\r\n"]:
            text += bytes(blanks[:1])
            assert len(text) < 50

    def test_a_model_without_an_end_of_text_has_no_grammars(self) -> None:
        metadata = merged_metadata(eos_token_id=None)
        tokens = [text for text in metadata["tokenizer.ggml.tokens"] if text != "<|im_end|>"]  # type: ignore[attr-defined]
        kinds = metadata["tokenizer.ggml.token_type"][: len(tokens)]  # type: ignore[index]
        tokenizer = tokenizer_from_gguf(
            {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
        )
        assert not tokenizer.eos_ids
        with pytest.raises(RequestError, match="no end-of-text token"):
            compiled(Grammars(tokenizer, tokenizer.vocab_size), choice_source(["a"]))


def test_the_last_grammars_stay_compiled_and_no_more() -> None:
    grammars = Grammars(FakeTokenizer(), 258, limits=GrammarLimits(cached=2))

    def ask(*texts: str) -> Sequence[Grammar]:
        return [compiled(grammars, choice_source([text])) for text in texts]

    a, b = ask("a", "b")
    assert ask("a", "b", "a") == [a, b, a]
    (c,) = ask("c")  # b was used less lately than a
    assert ask("c", "a") == [c, a]
    assert ask("b") != [b]
