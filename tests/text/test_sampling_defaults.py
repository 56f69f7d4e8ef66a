"""F-22: what a model's own files say of sampling, and that nothing else is made of it."""

import json
from pathlib import Path

import pytest

from legato.errors import ModelError
from legato.text.sampling_defaults import (
    SamplingDefaults,
    sampling_defaults_from_folder,
    sampling_defaults_from_gguf,
)

FILE = {"temperature": 0.1, "top_k": 1, "top_p": 0.001, "repetition_penalty": 1.05}


def read(folder: Path, content: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return sampling_defaults_from_folder(folder)


def test_a_file_is_read_field_by_field_and_shown_in_words(tmp_path: Path) -> None:
    defaults = read(tmp_path, FILE | {"do_sample": True, "eos_token_id": [1, 2], "min_p": None})
    assert defaults == SamplingDefaults(temperature=0.1, top_k=1, top_p=0.001, repetition_penalty=1.05)
    assert defaults.changed == FILE
    assert str(defaults) == "temperature 0.1, top_p 0.001, top_k 1, repetition_penalty 1.05"


def test_without_a_word_all_is_openais(tmp_path: Path) -> None:
    for defaults in (
        sampling_defaults_from_folder(tmp_path),
        read(tmp_path, {}),
        sampling_defaults_from_gguf({}),
    ):
        assert defaults == SamplingDefaults()
        assert (defaults.changed, str(defaults)) == ({}, "OpenAI's")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", [1.0]),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_p", float("inf")),
        ("repetition_penalty", 0),
    ],
)
def test_a_value_that_no_request_could_have_refuses_the_model(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, {key: value})
    assert caught.value.message.startswith(f"{tmp_path / 'generation_config.json'}: {key} is {value!r}")
    assert "\n" not in caught.value.message


def test_a_gguf_file_has_them_under_its_own_names() -> None:
    metadata: dict[str, object] = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.mirostat": 2,
    }
    expected = SamplingDefaults(temperature=0.5, top_k=40, repetition_penalty=1.1)
    assert sampling_defaults_from_gguf(metadata) == expected
    with pytest.raises(ModelError, match=r"general\.sampling: temperature is \[\]"):
        sampling_defaults_from_gguf({"general.sampling.temp": []})
