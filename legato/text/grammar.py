"""Grammars: which tokens may come next, so that a reply has a given form.

A wrapper of llguidance, which computes the mask of a 262,144-token vocabulary in some 50 microseconds. It
follows bytes, so a token is allowed wherever its bytes are; special tokens are no bytes and come only where a
grammar names them. Does not know requests or HTTP.
"""

import json
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from threading import BoundedSemaphore, Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from legato.errors import ConstraintError, QueueFullError, RequestError
from legato.text.grammar_trial import Schema, Source, Trial, Tried, WorkLimits, reason, schema_at
from legato.text.grammar_worker import Bytes
from legato.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MOST_LOGGED = 20
"""Keywords that are left out of schemas, in one line of the log."""
LONGEST_LOGGED = 200
"""Characters of a keyword's path in the log."""
_TEXT_STEP = re.compile(r'\["(?:[^"\\]|\\.)*"\]')
"""A step of a path that is no identifier."""

WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
"""Between the parts of a JSON text, if anything. Bounded: small models write blanks without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """The most that a grammar may be and cost."""

    source_bytes: int = 262_144
    """Of a grammar, of a schema, or of the schemas of all tools together; bytes of UTF-8."""
    depth: int = 64
    """Objects and lists in each other in a schema."""
    compile_s: float = 5.0
    compile_memory_bytes: int = 1 << 30
    waiting: int = 256
    """Grammars that wait to be compiled, the one that is being compiled included."""
    wait_s: float = 10.0
    """Before it is compiled. Many that are quick pass, and a few that take long do not hold up the others."""
    cached: int = 32
    """Grammars that are kept compiled."""
    work: WorkLimits = field(default_factory=WorkLimits)


class Grammars:
    """Compiles grammars for one vocabulary, one at a time in a thread of its own, and keeps the last ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, limits: GrammarLimits | None = None) -> None:
        """Token ids run from 0 to vocab_size - 1. Takes most of a second for a large vocabulary, in which no
        other thread runs: at start-up."""
        self.limits = limits or GrammarLimits()
        self._tokens = _library_tokens(tokenizer, vocab_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="legato-grammar")
        self._trial = Trial(
            num_ids=vocab_size,
            seconds=self.limits.compile_s,
            memory_bytes=self.limits.compile_memory_bytes,
            limits=self.limits.work,
        )
        self._compiled: OrderedDict[Source, Grammar] = OrderedDict()
        self._lock = Lock()
        self._places = BoundedSemaphore(self.limits.waiting)

    def compile(self, source: Source, *, quiet: bool = False) -> "Future[Grammar]":
        """The grammar of `source`, at once if it is a known one. From any thread. What is left out of it is
        logged, if not `quiet`.

        It fails with `RequestError`: the reason, or the limit and what is asked for; with `QueueFullError` if
        it waited for too long. Raises `QueueFullError` if too many wait.
        """
        known = self._known(source)
        if known is not None:
            done: Future[Grammar] = Future()
            done.set_result(known)
            return done
        if not self._places.acquire(blocking=False):
            most = self.limits.waiting
            raise self._busy(f"{most} grammars wait to be compiled, at most {most} may")
        future = self._thread.submit(self._compile, source, time.monotonic(), quiet)
        future.add_done_callback(lambda _: self._places.release())
        return future

    def _known(self, source: Source) -> "Grammar | None":
        with self._lock:
            known = self._compiled.get(source)
            if known is not None:
                self._compiled.move_to_end(source)
        return known

    def _busy(self, problem: str) -> QueueFullError:
        return QueueFullError(problem, retry_after_s=math.ceil(self.limits.compile_s))

    def _compile(self, source: Source, asked: float, quiet: bool) -> "Grammar":
        """`asked`: when."""
        if self._tokens is None:
            raise RequestError("not possible with a model that has no end-of-text token")
        if (known := self._known(source)) is not None:  # by now: others asked for the same
            return known
        if time.monotonic() - asked > self.limits.wait_s:
            raise self._busy(f"grammars wait for more than {self.limits.wait_s:g} s to be compiled")
        texts = [source.text, *(schema.text for schema in source.schemas)]
        size = sum(len(text.encode()) for text in texts)
        most = self.limits.source_bytes
        if size > most:
            raise RequestError(f"has {size} bytes, at most {most} possible")
        tried = self._trial.run(source)
        grammar = Grammar(self._tokens, tried, self.limits.work)
        if tried.left_out and not quiet:
            more = len(tried.left_out) - MOST_LOGGED
            listed = ", ".join(map(_for_log, tried.left_out[:MOST_LOGGED]))
            listed += f" and {more} more" if more > 0 else ""
            logger.warning("schema keywords that cannot be followed were left out: %s", listed)
        with self._lock:
            self._compiled[source] = grammar
            while len(self._compiled) > self.limits.cached:
                self._compiled.popitem(last=False)
        return grammar

    def schema(self, schema: Mapping[str, object], *, strict: bool, name: str = "") -> Schema:
        """A schema for a grammar (`schema_at`), or as one (`json_source`). Where not `strict`, keywords that
        cannot be followed are left out. `name` is the field that has it.

        Raises `RequestError` for a schema that is nested too deeply.
        """
        depth, most = _depth(schema), self.limits.depth
        if depth > most:
            problem = f"is nested {depth} deep, at most {most} possible"
            raise RequestError(f"{name}: {problem}" if name else problem, param=name or None)
        options = {"whitespace_pattern": WHITESPACE}
        return Schema(text=json.dumps({**schema, "x-guidance": options}), strict=strict, name=name)


def _for_log(path: str) -> str:
    """A path without names that are no identifiers: clients choose them, so they may be text of a prompt."""
    shown = _TEXT_STEP.sub("[...]", path)
    return shown if len(shown) <= LONGEST_LOGGED else shown[:LONGEST_LOGGED] + "..."


def json_source(schema: Schema) -> Source:
    """JSON that a schema describes."""
    return Source(format="json_schema", text=schema_at(0), schemas=(schema,))


def choice_source(choices: Sequence[str]) -> Source:
    """One of some texts."""
    # One token of the grammar, an automaton: as rules, each would be followed by itself.
    one_of = " | ".join(json.dumps(choice) for choice in choices)
    return Source(format="lark", text=f"start: ONE\nONE: {one_of}")


def regex_source(regex: str) -> Source:
    """A text all of which the expression matches (syntax of Rust's regex: no look-around, no references)."""
    return Source(format="regex", text=regex)


def grammar_source(text: str) -> Source:
    """GBNF (`root ::= ..`) or Lark (`start: ..`)."""
    return Source(format="grammar", text=text)


class Grammar:
    """A compiled grammar: a `Constraint` of the core."""

    def __init__(self, tokens: LLTokenizer, tried: Tried, limits: WorkLimits) -> None:
        """Raises `RequestError` if no reply can have it."""
        self.left_out = tried.left_out
        """Keywords of its schemas that it does not follow, as paths."""
        self._tried, self._limits = tried, limits
        self._beginning = self._new_matcher(tokens)
        if not self._beginning.is_error():
            self._beginning.compute_bitmask()  # its work is then done for every reply
        if self._beginning.is_error():
            raise RequestError(reason(self._beginning.get_error()))

    def matcher(self) -> "GrammarMatcher":
        return GrammarMatcher(self._beginning)

    def text_matcher(self) -> "TextMatcher":
        return TextMatcher(self._of_bytes.deep_copy())

    @cached_property
    def _of_bytes(self) -> LLMatcher:
        return self._new_matcher(LLTokenizer(TokenizerWrapper(Bytes(0))))

    def _new_matcher(self, tokens: LLTokenizer) -> LLMatcher:
        limits = LLParserLimits(**asdict(self._limits))
        return LLMatcher(tokens, self._tried.grammar, log_level=0, limits=limits)


class TextMatcher:
    """Follows a text, whatever its tokens."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def push(self, text: str) -> bool:
        """Whether the text so far, this included, is the beginning of one that has the form."""
        ids = list(text.encode())
        return self._matcher.try_consume_tokens(ids) == len(ids)


class GrammarMatcher:
    """Follows one reply: a `Matcher` of the core."""

    def __init__(self, beginning: LLMatcher) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._consumed: tuple[int, ...] = ()

    def mask(self, generated: Sequence[int]) -> bytes:
        """As the protocol says. Raises `ConstraintError` with the library's reason."""
        generated = tuple(generated)
        if generated[: len(self._consumed)] != self._consumed:
            self._restart()
        new = generated[len(self._consumed) :]
        if self._matcher.consume_tokens(list(new)):
            self._consumed = generated
            mask = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return mask
        error = self._matcher.get_error()
        self._restart()
        raise ConstraintError(f"after {len(generated)} tokens the grammar has no next one: {reason(error)}")

    def _restart(self) -> None:
        self._matcher, self._consumed = self._beginning.deep_copy(), ()


class _Adapter:
    """A tokenizer as the library asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        vocabulary = tokenizer.vocabulary
        pieces = vocabulary.pieces[:vocab_size]
        self.tokens = [*pieces, *[b""] * (vocab_size - len(pieces))]
        self.special_token_ids = sorted(id for id in vocabulary.special if id < vocab_size)
        self.bos_token_id = vocabulary.bos_id
        self.eos_token_id = eos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _library_tokens(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer | None:
    """None if no token ends a text: no reply of a given form could end."""
    eos_ids = sorted(id for id in tokenizer.eos_ids if id < vocab_size)
    if not eos_ids:
        return None
    adapter = TokenizerWrapper(_Adapter(tokenizer, vocab_size, eos_ids[0]))
    return LLTokenizer(adapter, n_vocab=vocab_size, eos_token=list(eos_ids))


def _depth(value: object) -> int:
    """How many objects and lists are in each other."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth
