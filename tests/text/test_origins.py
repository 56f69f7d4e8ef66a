"""Texts that know who wrote each character, through all that templates do with them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.text.origins import Origin, Written, joined, origins_of, with_origin, written
from legato.text.sandbox import Sandbox

CLIENT, TEMPLATE = Origin.CLIENT, Origin.TEMPLATE

TEXTS = st.text(alphabet="aA bB-\n\t\u00df\u0130", max_size=12)
"""Lower case and blanks stand for a client's characters, upper case and the hyphen for the template's."""


def origin(char: str) -> Origin:
    return TEMPLATE if char.isupper() or char == "-" else CLIENT


def known(text: str) -> Written:
    return Written(text, bytes(map(origin, text)))


def check(result: object, expected: object) -> None:
    """Texts are those of `str`, and each character has its origin still."""
    assert result == expected
    for text in (result,) if isinstance(result, str) else result:  # type: ignore[attr-defined]
        assert isinstance(text, Written)
        assert list(origins_of(text)) == [origin(char) for char in text]


OPERATIONS: dict[str, Callable[[str, str], object]] = {
    "+": lambda text, other: text + other,
    "str": lambda text, _: str(text),
    "* 3": lambda text, _: text * 3,
    "2 *": lambda text, _: 2 * text,
    "[1:]": lambda text, _: text[1:],
    "[:-2]": lambda text, _: text[:-2],
    "[::-1]": lambda text, _: text[::-1],
    "iter": lambda text, _: list(text),
    "join": lambda text, other: text.join([other, text, other]),
    "strip": lambda text, _: text.strip(),
    "strip chars": lambda text, _: text.strip("aA "),
    "lstrip": lambda text, _: text.lstrip(),
    "rstrip": lambda text, _: text.rstrip("\n-"),
    "split": lambda text, _: text.split(),
    "split once": lambda text, _: text.split(None, 1),
    "split at": lambda text, _: text.split("a"),
    "split at once": lambda text, _: text.split("A", 1),
    "rsplit": lambda text, _: text.rsplit(None, 1),
    "rsplit at": lambda text, _: text.rsplit("a", 1),
    "splitlines": lambda text, _: text.splitlines(),
    "splitlines, ends": lambda text, _: text.splitlines(True),
    "removeprefix": lambda text, _: text.removeprefix("a"),
    "removesuffix": lambda text, _: text.removesuffix("A"),
    "replace": lambda text, other: text.replace("a", other),
    "replace once": lambda text, other: text.replace("B", other, 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=TEXTS, other=TEXTS)
def test_operations_are_those_of_str_and_keep_origins(name: str, text: str, other: str) -> None:
    operation = OPERATIONS[name]
    check(operation(known(text), known(other)), operation(text, other))


@given(text=TEXTS)
def test_a_text_cut_at_a_separator_keeps_its_origins(text: str) -> None:
    for cut in (known(text).partition("A"), known(text).rpartition("A")):
        assert "".join(cut) == text
        assert joined("", cut) == text
        assert origins_of(joined("", cut)) == origins_of(known(text))
    assert known(text).partition("A") == text.partition("A")
    assert known(text).rpartition("A") == text.rpartition("A")


@given(text=TEXTS)
def test_a_change_of_case_keeps_origins_or_forgets_them(text: str) -> None:
    """Some letters become two; then nothing is known, and what is not known is a client's."""
    for method in (str.upper, str.lower, str.capitalize, str.title):
        changed = getattr(known(text), method.__name__)()
        assert changed == method(text)
        if len(changed) == len(text):
            assert origins_of(changed) == origins_of(known(text))
        else:
            assert set(origins_of(changed)) == {CLIENT}


def test_plain_text_on_the_left_keeps_the_origins_on_the_right() -> None:
    both = "ab" + written("CD", TEMPLATE)
    assert (both, origins_of(both)) == ("abCD", bytes((0, 0, 2, 2)))
    with pytest.raises(TypeError):
        written("a", TEMPLATE) + 5  # type: ignore[operator]


def test_operations_that_are_not_followed_make_a_text_of_a_client() -> None:
    text = written("A{}%s", TEMPLATE)
    for result in (text.format("x"), text % "x", text.center(9), text.swapcase(), f"{text}!", text.zfill(9)):
        assert set(origins_of(result)) == {CLIENT}


def test_texts_in_json_get_an_origin_and_keys_do_not() -> None:
    value = with_origin({"k": ["a", 1, None, {"x": "b"}]}, TEMPLATE)
    assert value == {"k": ["a", 1, None, {"x": "b"}]}
    assert isinstance(value, dict)
    assert origins_of(value["k"][0]) == origins_of(value["k"][3]["x"]) == bytes((2,))
    assert not any(isinstance(key, Written) for key in value)


def rendered(source: str, **variables: object) -> Written:
    sandbox = Sandbox()
    return sandbox.render(sandbox.compile_bounded(sandbox.parse(source)), variables)


@pytest.mark.parametrize(
    "source",
    [
        "A-{{ x }}-B",
        "{{ 'A' + x + 'B' }}{{ 'A' ~ x ~ 'B' }}",
        "{{ x | trim + 'A' }}{{ ('  AA ' ~ x).strip() }}",
        "{% set t = 'A' %}{{ t * 2 }}{{ x }}{{ t }}",
        "{% set t %}A{{ x }}B{% endset %}{{ t }}{{ t | upper | replace('A', 'BB') | length * 0 }}",
        "{% macro m(a, b='B') %}{{ b }}-{{ a }}-A{% endmacro %}{{ m(x) }}{{ m(x, 'AB') }}",
        "{% macro m() %}A{{ caller() }}B{% endmacro %}{% call m() %}-{{ x }}-{% endcall %}",
        "{% for t in ['A', x, 'B'] %}{{ t }}{% endfor %}{{ ['A', x] | join('-') }}{{ '-'.join([x, 'B']) }}",
        "{{ [{'k': 'A'}, {'k': x}] | join('-', attribute='k') }}",
        "{{ [{'k': 'A'}] | map(attribute='k') | first }}",
        "{{ {'k': 'A'}['k'] }}{{ {'k': 'A'}.k }}",
        "{% set n = namespace(t='') %}{% set n.t = n.t + 'A' + x %}{{ n.t }}",
        "{{ 'A' if x else 'B' }}{{ none or 'B' }}{{ y | default('A') }}{{ ('A', 'B') | last }}",
        "{{ x.split('b')[0] ~ 'A' ~ x.split('b')[-1] }}",
        "{{ x[:2] }}{{ x[0] }}{{ 'AB'[0] }}{{ 'AB' | reverse }}",
        "{{ x | replace('b', 'A') }}{{ 'AxA' | replace('x', x) }}{{ 'B' | safe }}{{ 'A' | string }}",
        "{% filter trim %} A{{ x }} {% endfilter %}{% block z %}A{{ x }}{% endblock %}",
        "{% for t in [1, 2] %}{{ loop.cycle('A', 'B') }}{% endfor %}",
        "{% for k, v in {'k': 'A'} | items %}{{ v }}{% endfor %}",
        "{% for t in 'AB' %}{{ t }}{% endfor %}{% for t in x %}{{ t }}{% endfor %}{{ 'A\nB' | list | join }}",
    ],
)
def test_templates_keep_apart_what_they_wrote(source: str) -> None:
    """What the template wrote is upper case or a hyphen in its source, what it was given is lower case."""
    result = rendered(source, x=written("ab b", CLIENT))
    counted = [
        (char, kind) for char, kind in zip(result, origins_of(result), strict=True) if char not in " \n0"
    ]
    assert counted
    assert counted == [(char, origin(char)) for char, _ in counted]


@pytest.mark.parametrize("way", ["._origins", "['_origins']", " | attr('_origins')"])
def test_a_template_cannot_reach_origins(way: str) -> None:
    assert rendered("{{ x" + way + " }}", x=written("ab", CLIENT)) == ""


def test_json_that_a_template_writes_is_a_clients() -> None:
    result = rendered("{{ {'A': x} | tojson }}", x="a")
    assert (result, set(origins_of(result))) == ('{"A": "a"}', {CLIENT})
