"""A split GGUF model loads as one, from whichever part is named; parts that do not belong together do not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import SIZES, Contents, convert, write_gguf
from transformers import PreTrainedModel

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile
from legato.models.load import open_model, weight_files
from legato.models.source import resolve

Build = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def contents(published_model: Build) -> Contents:
    return convert(published_model("LlamaConfig", SIZES))


@pytest.fixture
def parts(contents: Contents, tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", contents, split=4)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert len(found) > 2
    assert [path.name for path in found] == [
        f"m-{i:05}-of-{len(found):05}.gguf" for i in range(1, len(found) + 1)
    ]
    return found


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(resolve(str(path), cache_dir=path.parent))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("named", ["first", "last", "folder"])
def test_all_parts_load_as_the_model_in_one_file(
    named: str, contents: Contents, parts: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = {"first": parts[0], "last": parts[-1], "folder": parts[0].parent}[named]
    files = resolve(str(path), cache_dir=path.parent)
    assert files.name == "m"
    assert weight_files(files) == parts
    whole = write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", contents)
    split, one = (open_model(found) for found in (files, resolve(str(whole), cache_dir=whole.parent)))
    assert split.spec == one.spec
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    weights, expected = split.weights(**cpu), one.weights(**cpu)  # type: ignore[arg-type]
    assert weights.keys() == expected.keys()
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


@pytest.mark.parametrize("missing", [0, 1, -1])
def test_a_missing_part_is_named(missing: int, parts: list[Path]) -> None:
    parts[missing].unlink()
    left = next(path for path in parts if path.exists())
    assert f"1 of the {len(parts)} parts of m are missing: {parts[missing].name}" in refusal(left)


def test_parts_in_the_wrong_order_are_refused(parts: list[Path]) -> None:
    parts[1].rename(parts[1].with_name("aside"))
    parts[2].rename(parts[1])
    parts[1].with_name("aside").rename(parts[2])
    assert f"{parts[1]}: split.no is 2; by its name it must be 1" in refusal(parts[0])


def test_a_part_of_another_model_is_refused(contents: Contents, parts: list[Path]) -> None:
    other = parts[0].parent / "other"
    other.mkdir()
    more = {**contents.tensors, "one more": np.ones(32, np.float32)}
    write_gguf(other / "m.gguf", Contents(architecture="llama", metadata={}, tensors=more), split=4)
    shutil.copy(sorted(other.iterdir())[1], parts[1])
    message = refusal(parts[0])
    assert message.startswith(f"{parts[1]}: ")
    assert "split.tensors.count" in message or "split.count" in message


def test_a_part_with_another_name_says_what_its_name_must_be(parts: list[Path], tmp_path: Path) -> None:
    alone = parts[0].rename(tmp_path / "alone.gguf")
    assert f"is part 1 of {len(parts)} of a split model; its name must end in -00001-of-" in refusal(alone)


def test_a_damaged_part_is_named(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[: len(content) // 2])
    assert refusal(parts[0]).startswith(f"{parts[1]}: ")


def test_a_tensor_in_two_parts_is_refused(parts: list[Path]) -> None:
    """Two names of one length, in two parts: the second becomes the first."""
    names = {path: list(GgufFile(path).tensors) for path in parts}
    first, second, path = next(
        (one, other, path)
        for path in parts[1:]
        for other in names[path]
        for one in names[parts[0]]
        if len(one) == len(other)
    )
    path.write_bytes(path.read_bytes().replace(second.encode(), first.encode()))
    assert "is also in an earlier part" in refusal(parts[0])


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00003-of-00002.gguf"])
def test_a_number_that_no_part_can_have_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(np.zeros(8, np.uint8).tobytes())
    assert "parts are numbered from 1 to 2" in refusal(tmp_path / name)
