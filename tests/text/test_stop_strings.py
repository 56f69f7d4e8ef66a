"""Stop strings in text that comes in pieces, against reading the whole text character by character."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.errors import RequestError
from legato.text.stop import MAX_STOP_CHARS, MAX_STOP_STRINGS, StopStrings


def whole_text(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The shown text and the stop string found: the first to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pushes", "expected"),
    [
        (["DEFGHIJ"], ["DEF", "G", "HI", "J"], ["", "", "", ""]),
        (["DEFGHIJ"], ["DEF", "G", "HI", "K"], ["", "", "", "DEFGHIK"]),
        (["END"], ["a E", "N x", "END more", "END"], ["a ", "EN x", "", ""]),
        (["aab"], ["aaa", "ab"], ["a", "a"]),
        (["b", "abc"], ["xabc"], ["xa"]),
        (["ab", "b"], ["xab"], ["x"]),
        ([], ["ab", "c"], ["ab", "c"]),
    ],
)
def test_text_that_may_become_a_stop_string_is_held_back(
    stops: list[str], pushes: list[str], expected: list[str]
) -> None:
    """Case A-04."""
    search = StopStrings(stops)
    assert [search.push(text) for text in pushes] == expected
    assert (search.matched, search.flush()) == (whole_text("".join(pushes), stops)[1], "")


def test_held_text_is_shown_at_the_end() -> None:
    search = StopStrings(["END"])
    assert (search.push("the EN"), search.flush(), search.flush()) == ("the ", "EN", "")
    assert search.matched is None


small_text = st.text(alphabet="ab\u010f", max_size=40)
small_stops = st.lists(st.text(alphabet="ab\u010f", min_size=1, max_size=6), max_size=4)


@given(st.lists(small_text, max_size=12), small_stops)
def test_the_outcome_does_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    """Case A-04 for any stop strings; and nothing is shown that the whole text would not show."""
    shown, stop = whole_text("".join(pieces), stops)
    search = StopStrings(stops)
    so_far = ""
    for piece in pieces:
        so_far += search.push(piece)
        assert shown.startswith(so_far)
    assert (so_far + search.flush(), search.matched) == (shown, stop)


@given(small_text, small_stops)
def test_no_more_text_is_held_than_the_longest_stop_string_could_use(text: str, stops: list[str]) -> None:
    search = StopStrings(stops)
    shown = search.push(text)
    if search.matched is None:
        assert len(text) - len(shown) < max(map(len, stops), default=1)


def test_long_replies_take_linear_time() -> None:
    search = StopStrings(["a" * 999 + "b", "b" * 1000])
    start = time.monotonic()
    shown = sum(len(search.push("a")) for _ in range(200_000))
    assert shown == 200_000 - 999
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("stops", "complaint"),
    [
        ([""], "a stop string is empty"),
        (["", "END"], "a stop string is empty"),
        (["x"] * 1000, f"1000 stop strings; at most {MAX_STOP_STRINGS}"),
        (["x" * 1_000_000], f"1000000 characters; at most {MAX_STOP_CHARS}"),
    ],
)
def test_useless_and_excessive_stop_strings_are_refused(stops: list[str], complaint: str) -> None:
    """Case B-21."""
    with pytest.raises(RequestError, match=complaint) as refused:
        StopStrings(stops)
    assert refused.value.param == "stop"


def test_as_many_and_as_long_stop_strings_as_allowed_are_taken() -> None:
    """Case B-21: none at all means none, and the limits themselves are allowed."""
    assert StopStrings([]).push("text") == "text"
    stops = [chr(ord("e") + i) * MAX_STOP_CHARS for i in range(MAX_STOP_STRINGS)]
    assert StopStrings(stops).push("text") == "tex"
