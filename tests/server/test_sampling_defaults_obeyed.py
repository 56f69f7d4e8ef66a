"""F-22: a request's own fields win over the model's, each for itself, and the model's are shown."""

from dataclasses import asdict

import pytest
from server_rig import ScriptedRunner, ask, build_service

from legato.sampling_params import SamplingParams
from legato.text.sampling_defaults import SamplingDefaults

MODELS = SamplingDefaults(temperature=0.1, top_k=1, top_p=0.001, min_p=0.25, repetition_penalty=1.05)
PROMPTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def drawn_with(path: str, defaults: SamplingDefaults, **body: object) -> SamplingParams:
    """The parameters of the row that a request is sampled with."""
    runner = ScriptedRunner()
    service = build_service(runner, sampling_defaults=defaults)
    assert ask(path, PROMPTS[path] | {"max_tokens": 1} | body, service=service).status_code == 200
    ((row,),) = (plan.sample for plan in runner.plans if plan.sample)
    return row.params


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, asdict(MODELS)),
        ({"temperature": None, "top_k": None}, asdict(MODELS)),
        ({"temperature": 1.5}, asdict(MODELS) | {"temperature": 1.5}),
        ({"temperature": 1, "top_k": 0}, asdict(MODELS) | {"temperature": 1.0, "top_k": 0}),
        ({"top_k": -1, "top_p": 1, "min_p": 0}, asdict(MODELS) | {"top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        ({"repetition_penalty": 1}, asdict(MODELS) | {"repetition_penalty": 1.0}),
    ],
)
def test_each_field_is_the_requests_or_else_the_models(
    path: str, body: dict[str, object], expected: dict[str, float]
) -> None:
    params = asdict(drawn_with(path, MODELS, **body))
    assert {name: params[name] for name in expected} == expected


@pytest.mark.parametrize("path", PROMPTS)
def test_with_none_all_is_openais(path: str) -> None:
    params = asdict(drawn_with(path, SamplingDefaults()))
    assert {name: params[name] for name in asdict(MODELS)} == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_the_model_card_shows_them() -> None:
    service = build_service(sampling_defaults=MODELS)
    (card,) = ask("/v1/models", method="GET", service=service).json()["data"]
    assert card["sampling_defaults"] == asdict(MODELS)
