"""Whatever is done to a model's files, the model loads or is refused in one line that names the file.

The whole road is taken (files, spec, tokenizer, template, weights, decoder), as a server would. No damage may
raise anything else, take long or take memory (F-01, F-02, F-04, F-16, F-19 and their kin).
"""

import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_gguf import Contents, convert, write_gguf
from tiny_models import BOS, EOS, SMALL, SPECIAL, TEXTS

from legato.config import EngineSettings, ModelSettings
from legato.engine.build import build
from legato.errors import ConfigError, ModelError
from legato.models.gguf_file import GgufFile, GgufTensor

MAX_SECONDS, MAX_GROWTH = 5.0, 400 * 2**20
many = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refusal(model: Path) -> str | None:
    """The one line with which `model` is refused; None if it loads."""
    started = time.thread_time()
    message = None
    try:
        build(
            ModelSettings(model=str(model), weights="dense"),
            EngineSettings(num_blocks=4, attention="reference", calibrate=False),
            cache_dir=model.parent / "cache",
        )
    except ModelError as error:
        message = error.message
    except ConfigError as error:  # a size so large that the model would not fit
        if not error.message.startswith("memory: this model needs "):
            raise
    assert time.thread_time() - started < MAX_SECONDS
    if message is not None:
        assert message.startswith(str(model)), message
        assert "\n" not in message
        assert len(message) < 700 + len(str(model))
    return message


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH


@pytest.fixture(scope="module")
def whole(model_folder: Path) -> Path:
    assert refusal(model_folder) is None
    assert len(list(model_folder.glob("model-*.safetensors"))) >= 3
    return model_folder


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def contents(request: pytest.FixtureRequest, published_model: Callable[..., Any]) -> Contents:
    """With each kind of tokenizer."""
    return convert(published_model("LlamaConfig", SMALL)).but(
        metadata={
            "tokenizer.ggml.model": request.param,
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": TEXTS,
            "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL) + [1],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.scores": [-float(id) for id in range(len(TEXTS))],
            "tokenizer.ggml.bos_token_id": BOS,
            "tokenizer.ggml.eos_token_id": EOS,
            "tokenizer.chat_template": "{{ messages[0].content }}",
            "general.sampling.temp": 0.5,
        }
    )


@pytest.fixture(scope="module")
def gguf(contents: Contents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", contents)
    assert refusal(path) is None
    return path


def copied(whole: Path, file: str, content: bytes) -> Path:
    """The folder with one file's content changed. One copy serves all: each call undoes the last one's."""
    folder = whole.with_name("damaged")
    if not folder.exists():
        shutil.copytree(whole, folder)
    for entry in whole.iterdir():
        if (folder / entry.name).read_bytes() != entry.read_bytes():
            shutil.copy(entry, folder)
    (folder / file).write_bytes(content)
    return folder


def changed(gguf: Path, content: bytes) -> Path:
    path = gguf.with_name("damaged.gguf")
    path.write_bytes(content)
    return path


SHARD = "model-00002-of-"
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "model.safetensors.index.json",
)


def name_of(whole: Path, file: str) -> str:
    return next(entry.name for entry in whole.iterdir() if entry.name.startswith(file))


# Cut, emptied, removed, replaced


@many
@given(file=st.sampled_from([*JSON_FILES, SHARD]), share=st.floats(0, 1, exclude_max=True))
def test_a_cut_file_is_named(whole: Path, file: str, share: float) -> None:
    file = name_of(whole, file)
    content = (whole / file).read_bytes().rstrip()
    message = refusal(copied(whole, file, content[: int(len(content) * share)]))
    assert message is not None
    assert file in message


@many
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_cut_gguf_is_refused(gguf: Path, share: float) -> None:
    """F-01"""
    content = gguf.read_bytes().rstrip(b"\0")
    assert refusal(changed(gguf, content[: int(len(content) * share)])) is not None


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def absurdly_large(path: Path) -> None:
    os.truncate(path, 2**40)  # no block of the disk is taken


DAMAGES = (empty, Path.unlink, folder_instead, pipe_instead, link_to_nothing, absurdly_large)
OPTIONAL = {
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", [*JSON_FILES, SHARD])
def test_a_file_that_is_not_there_or_something_else_is_named(
    file: str, damage: Callable[[Path], None], whole: Path, tmp_path: Path
) -> None:
    """F-04"""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    file = name_of(whole, file)
    damage(folder / file)
    message = refusal(folder)
    if file in OPTIONAL and damage in (Path.unlink, link_to_nothing):
        assert message is None
    else:
        assert message is not None
        assert file in message


@pytest.mark.parametrize("damage", [empty, folder_instead, pipe_instead], ids=lambda damage: damage.__name__)
def test_a_gguf_that_is_something_else_is_refused(
    damage: Callable[[Path], None], gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(gguf, path)
    damage(path)
    assert refusal(path) is not None


# Changed bytes and numbers

EDGES = st.sampled_from([0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


def header_end(file: str, content: bytes) -> int:
    if file.endswith(".safetensors"):
        return 8 + int.from_bytes(content[:8], "little")
    return len(content)


@many
@given(file=st.sampled_from([*JSON_FILES, SHARD]), changes=st.data())
def test_flipped_bytes_in_headers_are_survived(whole: Path, file: str, changes: st.DataObject) -> None:
    file = name_of(whole, file)
    content = bytearray((whole / file).read_bytes())
    places = st.integers(0, header_end(file, content) - 1)
    for place, value in changes.draw(
        st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)
    ):
        content[place] = value
    refusal(copied(whole, file, bytes(content)))


def tensors_of(gguf: Path) -> list[GgufTensor]:
    return list(GgufFile(gguf).tensors.values())


@many
@given(number=EDGES, share=st.floats(0, 1, exclude_max=True), width=st.sampled_from(["<I", "<Q"]))
def test_any_number_in_the_head_of_a_gguf_may_be_absurd(
    gguf: Path, number: int, share: float, width: str
) -> None:
    """F-02: counts, lengths, types, dimensions and offsets, wherever they stand."""
    content = bytearray(gguf.read_bytes())
    start_of_data = len(content) - sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors_of(gguf))
    place = 4 + int((start_of_data - 4) * share)
    struct.pack_into(width, content, place, number % 256 ** struct.calcsize(width))
    refusal(changed(gguf, bytes(content)))


# Wrong types and values in JSON

JUNK = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1.5,
        float("nan"),
        1e308,
        10**30,
        2**31 - 1,
        "",
        "two\nlines",
        "\ud800",
        "<s>",
        [],
        {},
        [[]],
        [None],
        [1, 2, 3],
        {"a": 1},
    ]
)


def places(value: object, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of long lists and of vocabularies only the beginning."""
    yield start
    if isinstance(value, Mapping):
        for key in list(value)[:30]:
            yield from places(value[key], (*start, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 3)):
            yield from places(value[i], (*start, i))


def put(value: Any, place: tuple[Any, ...], new: object) -> Any:
    if not place:
        return new
    value[place[0]] = put(value[place[0]], place[1:], new)
    return value


@settings(many, max_examples=250)
@given(file=st.sampled_from(JSON_FILES), junk=JUNK, data=st.data())
def test_any_value_may_be_of_any_type(whole: Path, file: str, junk: object, data: st.DataObject) -> None:
    content = json.loads((whole / file).read_bytes())
    place = data.draw(st.sampled_from(list(places(content))))
    refusal(copied(whole, file, json.dumps(put(content, place, junk)).encode()))


# Headers of safetensors


def head(content: bytes) -> tuple[dict[str, Any], bytes]:
    end = header_end(".safetensors", content)
    return json.loads(content[8:end]), content[end:]


def with_head(text: str, data: bytes) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


@many
@given(
    junk=JUNK
    | st.sampled_from(["F32", "F64", "I64", "F8_E4M3", [0, 2**63], [4, 0], [2**62, 4], [0, 0], [-1]]),
    data=st.data(),
)
def test_any_value_in_the_head_of_a_safetensors_file_may_be_wrong(
    whole: Path, junk: object, data: st.DataObject
) -> None:
    file = name_of(whole, SHARD)
    header, rest = head((whole / file).read_bytes())
    place = data.draw(st.sampled_from(list(places(header))))
    content = with_head(json.dumps(put(header, place, junk)), rest)
    message = refusal(copied(whole, file, content))
    assert message is None or file in message or "index" in message


def overlapping(header: dict[str, Any], names: list[str]) -> str:
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    return json.dumps(header)


def with_a_hole(header: dict[str, Any], names: list[str]) -> str:
    del header[names[0]]
    return json.dumps(header)


def twice(header: dict[str, Any], names: list[str]) -> str:
    text = json.dumps(header)
    return f"{text[:-1]}, {json.dumps(names[0])}: {json.dumps(header[names[0]] | {'shape': [1, 1]})}}}"


def product_that_wraps_around(header: dict[str, Any], names: list[str]) -> str:
    header[names[0]]["shape"] = [2**32, 2**32, 4]
    return json.dumps(header)


def of_many_lines(header: dict[str, Any], names: list[str]) -> str:
    header["a\nname\n" * 1000] = header.pop(names[0])
    return json.dumps(header)


def deeply_nested(header: dict[str, Any], names: list[str]) -> str:  # noqa: ARG001
    return "[" * 50_000


@pytest.mark.parametrize(
    "damage",
    [overlapping, with_a_hole, twice, product_that_wraps_around, of_many_lines, deeply_nested],
    ids=lambda damage: damage.__name__,
)
def test_a_crafted_head_is_refused(damage: Callable[..., str], whole: Path) -> None:
    file = name_of(whole, SHARD)
    header, rest = head((whole / file).read_bytes())
    names = sorted(header.keys() - {"__metadata__"})
    message = refusal(copied(whole, file, with_head(damage(header, names), rest)))
    assert message is not None
    assert file in message


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**62, 2**63, 2**64 - 1])
def test_an_absurd_length_of_a_head_is_refused(length: int, whole: Path) -> None:
    file = name_of(whole, SHARD)
    content = struct.pack("<Q", length) + (whole / file).read_bytes()[8:]
    message = refusal(copied(whole, file, content))
    assert message is not None
    assert file in message


# Tensors that hold no numbers


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float, whole: Path, tmp_path: Path) -> None:
    """F-18: it would make every logit a NaN."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    path = folder / name_of(whole, SHARD)
    tensors = load_file(path)
    name = min(name for name in tensors if name.endswith("proj.weight"))
    tensors[name].view(-1)[-1] = bad
    save_file(tensors, path)
    assert refusal(folder) == f"{path}: tensor {name} holds numbers that are not finite as float32"


# Wrong types in the metadata of a GGUF

GGUF_JUNK = st.sampled_from(
    [None, True, 0, 2**32 - 1, 1.5, float("nan"), "", "two\nlines", [0], [1.5], ["x"]]
)


@settings(many, max_examples=250)
@given(data=st.data(), junk=GGUF_JUNK)
def test_any_metadata_of_a_gguf_may_be_of_any_type(
    contents: Contents, gguf: Path, data: st.DataObject, junk: object
) -> None:
    key = data.draw(st.sampled_from(sorted(contents.metadata)))
    refusal(write_gguf(gguf.with_name("damaged.gguf"), contents.but(metadata={key: junk})))
