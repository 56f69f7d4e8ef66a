"""The library's parameters: defaults, what each may be, and that everything else is refused in our words."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato import RequestError, SamplingParams
from legato.core import request
from legato.engine.params import model_defaults
from legato.text.fake import FakeTokenizer
from legato.text.sampling_defaults import SamplingDefaults

TOKENIZER: Any = FakeTokenizer()


def test_without_arguments_it_is_openais_sampling_and_sixteen_tokens() -> None:
    params = SamplingParams()
    assert params.for_engine(TOKENIZER) == request.SamplingParams(
        max_tokens=16, stop_token_ids=TOKENIZER.eos_ids
    )
    assert params.detokenize_options.stop == ()


def test_collections_may_be_what_is_at_hand() -> None:
    eos = TOKENIZER.eos_ids
    params = SamplingParams(
        stop="a", stop_token_ids=[5], logit_bias={3: 1.5}, allowed_token_ids=[7, 8], top_k=-1
    )
    ours = params.for_engine(TOKENIZER)
    assert params.detokenize_options.stop == ("a",)
    assert ours.stop_token_ids == {5} | eos
    assert (ours.logit_bias, ours.allowed_token_ids, ours.top_k) == (((3, 1.5),), {7, 8}, 0)
    more = SamplingParams(stop=["a", "b"], stop_token_ids={5}, ignore_eos=True, logit_bias=[(3, 1.5)])
    assert more.detokenize_options.stop == ("a", "b")
    assert more.for_engine(TOKENIZER).stop_token_ids == {5}
    assert more.for_engine(TOKENIZER).logit_bias == ours.logit_bias


def test_bad_words_are_texts_or_ids() -> None:
    """A text is banned as it begins a reply, and as it follows a space."""
    params = SamplingParams(bad_words=["hi", [5, 6]])
    forms = [tuple(TOKENIZER.encode(form, add_special_tokens=False)) for form in ("hi", " hi")]
    assert params.for_engine(TOKENIZER).bad_words == (*forms, (5, 6))


def test_a_models_own_sampling_holds_where_nothing_is_said() -> None:
    model = SamplingDefaults(temperature=0.7, top_k=20)
    assert model_defaults(model, top_k=3) == SamplingParams(temperature=0.7, top_k=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_token": 3}, "SamplingParams: max_token: no such parameter; did you mean max_tokens?"),
        ({"max_tokens": "3"}, r"SamplingParams: max_tokens: must be a valid integer \(not '3'\)"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": True}, "max_tokens: must be a valid integer"),
        ({"temperature": -1}, "temperature must be at least 0, not -1"),
        ({"temperature": None}, "temperature: must be a valid number"),
        ({"top_p": 2}, "top_p must be at most 1, not 2"),
        ({"top_k": -2}, "top_k must be at least 0, not -2"),
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": [1]}, "SamplingParams: stop must be a text or a list of texts"),
        ({"stop": b"x"}, "stop must be a text or a list of texts"),
        ({"frequency_penalty": math.nan}, "frequency_penalty: must be a finite number"),
        ({"stop": ["x"] * 17}, "17 stop strings; at most 16"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be numbers by token id"),
        ({"bad_words": "hi"}, "bad_words must be a list of texts or of lists of token ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids allows no token"),
        ({"constraint": "a+"}, "constraint must be a compiled grammar"),
    ],
)
def test_what_is_wrong_is_told_with_what_was_expected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_parameters_by_place_are_refused() -> None:
    with pytest.raises(RequestError, match="takes parameters by name"):
        SamplingParams(16)  # type: ignore[call-arg]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none()), max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.floats(), max_size=2),
    st.just(object()),
    st.just(math.nan),
)


@given(st.sampled_from(sorted(SamplingParams.model_fields)), JUNK)
def test_no_value_of_any_parameter_is_another_kind_of_error(name: str, value: object) -> None:
    """Taken, then usable; or refused by a `RequestError` that names the parameter."""
    refusal, params = "", None
    try:
        params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    except RequestError as error:
        refusal = error.message
    if params is None:
        assert name in refusal
    else:
        assert isinstance(params.for_engine(TOKENIZER), request.SamplingParams)
