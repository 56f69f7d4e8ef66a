"""From token events to text: held-back characters, stop strings, stop tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.events import FinishEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.step_plan import TokenLogprobs
from legato.engine.output_processor import Delta, DetokenizeOptions, Finish, OutputProcessor
from legato.sampling_params import SamplingParams
from legato.text.fake import FakeTokenizer

TOKENIZER = FakeTokenizer()
A = RequestId("A")


def reply(*stops: str, min_tokens: int = 0) -> OutputProcessor:
    params = SamplingParams(max_tokens=1000, min_tokens=min_tokens)
    request = Request(id=A, prompt=(1,), params=params, arrival=0.0)
    return OutputProcessor(request, TOKENIZER, DetokenizeOptions(stop=stops))


def feed(reply: OutputProcessor, ids: list[int], end: FinishReason | None) -> list[Delta]:
    """Push tokens until the reply is finished; `end` is the engine's own finish on the last one."""
    deltas = []
    for i, token in enumerate(ids):
        last = i == len(ids) - 1
        deltas.append(reply.push(TokenEvent(A, TokenLogprobs(token), end if last else None)))
        if reply.is_finished:
            break
    return deltas


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    """A-01."""
    deltas = feed(reply(), list("aď😀b".encode()), FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["a", "", "ď", "", "", "", "😀", "b"]


def test_an_unfinished_character_at_the_end_is_shown_as_the_whole_decode_shows_it() -> None:
    """A-02."""
    ids = list("a😀".encode())[:-1]
    assert text(feed(reply(), ids, FinishReason.LENGTH)) == TOKENIZER.decode(ids) == "a�"


def test_a_stop_token_adds_no_text_but_is_reported() -> None:
    deltas = feed(reply(), [*b"ab", 99], FinishReason.STOP)
    assert text(deltas) == "ab"
    assert deltas[-1] == Delta("", TokenLogprobs(99), Finish(FinishReason.STOP, 99))


def test_a_first_token_that_ends_the_reply_gives_an_empty_text() -> None:
    """A-22."""
    deltas = feed(reply(), [257], FinishReason.STOP)
    assert text(deltas) == ""
    assert len(deltas) == 1


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    """A-04."""
    deltas = feed(reply("DEFGHIJ"), list(b"xDEFGHIJ"), None)
    assert [delta.text for delta in deltas] == ["x"] + [""] * 7
    assert deltas[-1].finish == Finish(FinishReason.STOP, "DEFGHIJ")


def test_held_back_text_comes_out_when_no_stop_string_follows() -> None:
    assert text(feed(reply("DEFG"), list(b"xDEF"), FinishReason.LENGTH)) == "xDEF"
    assert text(feed(reply("DEFG"), [*b"xDEF", 257], FinishReason.STOP)) == "xDEF"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_end_from_outside_keeps_its_reason_and_the_text_so_far(reason: FinishReason) -> None:
    it = reply("DEFG")
    deltas = feed(it, list(b"xDE"), None)
    deltas.append(it.push(FinishEvent(A, reason, "why")))
    assert text(deltas) == "xDE"
    assert deltas[-1].finish == Finish(reason, message="why")
    assert it.is_finished


@given(body=st.text("abé", max_size=30), stops=st.lists(st.text("abé", min_size=1, max_size=3), max_size=3))
def test_the_text_is_the_decode_cut_at_the_first_stop_string(body: str, stops: list[str]) -> None:
    ids = list(body.encode())
    if not ids:
        return
    deltas = feed(reply(*stops), ids, FinishReason.LENGTH)
    cuts = [body.index(stop) for stop in stops if stop in body]
    finish = deltas[-1].finish
    assert finish is not None
    if cuts:
        # A stop string is found as soon as its last character is there: the one that ends first wins.
        ends = min(body.index(stop) + len(stop) for stop in stops if stop in body)
        starts = [body.index(stop) for stop in stops if stop in body[:ends]]
        assert text(deltas) == body[: min(starts)]
        assert finish.reason is FinishReason.STOP
    else:
        assert text(deltas) == body
        assert finish.reason is FinishReason.LENGTH


MIN_TOKENS = {
    "early": (b"a.b", 2, "a.b"),
    "early, then late": (b"a.b.c", 2, "a.b"),
    "complete at token min_tokens": (b"ab.", 3, "ab."),
    "complete after token min_tokens": (b"abc.", 3, "abc"),
    "begun early": (b"abEND", 4, "ab"),
    "never": (b"..", 9, ".."),
}


@pytest.mark.parametrize(("body", "min_tokens", "shown"), MIN_TOKENS.values(), ids=MIN_TOKENS.keys())
def test_no_stop_string_counts_before_min_tokens(body: bytes, min_tokens: int, shown: str) -> None:
    """B-22."""
    deltas = feed(reply(".", "END", min_tokens=min_tokens), list(body), FinishReason.LENGTH)
    assert text(deltas) == shown
    stopped = shown != body.decode()
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@given(
    body=st.text("ab", min_size=1, max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 20),
)
def test_the_first_stop_string_complete_after_min_tokens_ends_the_reply(
    body: str, stops: list[str], min_tokens: int
) -> None:
    deltas = feed(reply(*stops, min_tokens=min_tokens), list(body.encode()), FinishReason.LENGTH)
    for end in range(min_tokens + 1, len(body) + 1):
        found = [stop for stop in stops if body[:end].endswith(stop)]
        if found:
            assert text(deltas) == body[: end - max(map(len, found))]
            assert len(deltas) == end
            return
    assert text(deltas) == body
