"""F-22: sampling that a model recommends is one documented rule, with limits and a file name in errors."""

import json
from pathlib import Path

import pytest

from legato.errors import ModelError
from legato.models.generation_config import FILE, sampling_defaults


def folder_with(tmp_path: Path, content: object) -> Path:
    (tmp_path / FILE).write_text(json.dumps(content))
    return tmp_path


def test_the_five_sampling_fields_are_taken_and_nothing_else(tmp_path: Path) -> None:
    wanted = {"temperature": 0.1, "top_k": 1, "top_p": 0.001, "min_p": 0.0, "repetition_penalty": 1.05}
    other = {
        "do_sample": True,
        "max_new_tokens": 5,
        "eos_token_id": [1, 2],
        "num_beams": 4,
        "typical_p": None,
    }
    assert sampling_defaults(folder_with(tmp_path, wanted | other)) == wanted


def test_null_is_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(folder_with(tmp_path, {"temperature": None, "top_k": 20})) == {"top_k": 20}


def test_a_folder_without_the_file_and_a_file_recommend_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(tmp_path / "model.gguf") == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("top_k", 1.5), ("min_p", True)],
)
def test_what_no_request_may_ask_for_is_refused_with_the_file(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ModelError, match=f"{FILE}: {name} is .*--generation-config none"):
        sampling_defaults(folder_with(tmp_path, {name: value}))
