"""The GGUF container: what the library writes is read back, and whatever is wrong with a file is one error.

Damage is made for real: files are cut, bytes are changed, headers are built by hand (F-01 and F-02 of the
cases from other servers). No damage may cost memory or time.
"""

import os
import struct
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import Contents, write_gguf

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile

METADATA = {
    "a.bool": True,
    "a.integer": 4_000_000_000,
    "a.float": 1e-6,
    "a.text": "Gruß, 世界 🎼",
    "a.texts": ["", "one", "zwölf", "世界"],
    "a.integers": [1, -2, 3],
    "a.floats": [0.5, -0.25],
}
TENSORS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "vector": np.arange(5, dtype=np.float16),
}
CONTENTS = Contents(architecture="llama", metadata=METADATA, tensors=TENSORS)
UINT8, STRING, ARRAY = 0, 8, 9
F32 = 0


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "sample.gguf", CONTENTS)


def failure(path: Path) -> str:
    """The message of the one error that opening `path` must give; cheap and short."""
    tracemalloc.start()
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        GgufFile(path)
    elapsed = time.monotonic() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = caught.value.message
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    assert peak < 1_000_000
    assert elapsed < 5
    return message


def test_metadata_is_plain_python(sample: Path) -> None:
    file = GgufFile(sample)
    read = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert read == METADATA
    assert {key: type(value) for key, value in read.items()} == {k: type(v) for k, v in METADATA.items()}
    assert file.architecture == "llama"


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (gguf.GGUFValueType.UINT8, 255),
        (gguf.GGUFValueType.INT8, -128),
        (gguf.GGUFValueType.UINT16, 65535),
        (gguf.GGUFValueType.INT16, -32768),
        (gguf.GGUFValueType.UINT32, 2**32 - 1),
        (gguf.GGUFValueType.INT32, -(2**31)),
        (gguf.GGUFValueType.FLOAT32, 1e-5),
        (gguf.GGUFValueType.BOOL, False),
        (gguf.GGUFValueType.STRING, "x"),
        (gguf.GGUFValueType.UINT64, 2**64 - 1),
        (gguf.GGUFValueType.INT64, -(2**63)),
        (gguf.GGUFValueType.FLOAT64, 0.1),
    ],
)
def test_every_value_type_is_read_alone_and_in_an_array(
    tmp_path: Path, value_type: gguf.GGUFValueType, value: object
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    writer.add_key_value("alone", value, value_type)
    writer.add_key_value("many", [value, value], gguf.GGUFValueType.ARRAY, sub_type=value_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "f.gguf").metadata
    assert metadata["alone"] == value
    # An array keeps its float32 numbers as they are; a number alone gets its shortest decimal.
    assert metadata["many"] == (pytest.approx([value] * 2) if isinstance(value, float) else [value] * 2)


def test_tensors_have_their_shape_type_and_bytes(sample: Path) -> None:
    tensors = GgufFile(sample).tensors
    assert list(tensors) == ["matrix", "vector"]
    assert tensors["matrix"].shape == (3, 4)
    assert tensors["vector"].kind == gguf.GGMLQuantizationType.F16
    for name, expected in TENSORS.items():
        assert tensors[name].data.tobytes() == expected.tobytes()
        assert not tensors[name].data.flags.writeable


def test_the_demo_model_opens_at_once(gemma_path: Path) -> None:
    started = time.monotonic()
    assert len(GgufFile(gemma_path).metadata["tokenizer.ggml.tokens"]) == 262_144
    assert time.monotonic() - started < 2


@pytest.mark.big  # the library needs 8 s to read this file
def test_the_demo_model_is_as_the_library_reads_it(gemma_path: Path) -> None:
    file = GgufFile(gemma_path)
    reader = gguf.GGUFReader(gemma_path)
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.kind == tensor.tensor_type
        assert len(ours.data) == tensor.n_bytes
        assert bytes(ours.data[:64]) == tensor.data.tobytes()[:64]
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata.keys() == theirs.keys()
    for key, value in theirs.items():
        assert file.metadata[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


# Typed reads


@pytest.mark.parametrize(
    ("key", "kind", "problem"),
    [
        ("absent", int, "metadata key absent is missing"),
        ("a.text", int, "metadata key a.text is a str, not a int"),
        ("a.bool", int, "metadata key a.bool is a bool, not a int"),
        ("a.float", int, "metadata key a.float is a float, not a int"),
        ("a.texts", str, "metadata key a.texts is a list, not a str"),
    ],
)
def test_a_missing_key_or_a_wrong_type_names_file_and_key(
    sample: Path, key: str, kind: type[int] | type[str], problem: str
) -> None:
    with pytest.raises(ModelError) as caught:
        GgufFile(sample).get(key, kind)
    assert caught.value.message == f"{sample}: {problem}"


def test_a_default_is_for_an_absent_key_only(sample: Path) -> None:
    file = GgufFile(sample)
    assert file.get("absent", int, 7) == 7
    assert file.get("a.integer", int, 7) == 4_000_000_000
    assert file.get("a.integer", float) == 4e9
    with pytest.raises(ModelError):
        file.get("a.text", int, 7)


# Not a file, or not this kind of file


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in failure(tmp_path / "absent.gguf")
    assert "is a folder" in failure(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a file" in failure(tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is empty"),
        (b"GG", "starts with b'GG'"),
        (b"PK\x03\x04 a zip archive", "starts with b'PK\\x03\\x04'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "starts with b'vers'"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(64), "version 99 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    ],
)
def test_what_is_no_gguf_says_what_it_is(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(content)
    assert problem in failure(path)


# Headers built by hand (F-02, F-03)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: bytes = b"t", dims: Sequence[int] = (4,), kind: int = F32, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def header(tensors: Sequence[bytes] = (), fields: Sequence[bytes] = ()) -> bytes:
    counts = struct.pack("<QQ", len(tensors), len(fields))
    return b"GGUF" + struct.pack("<I", 3) + counts + b"".join(fields) + b"".join(tensors)


NUMBER = field(b"k", UINT8, b"\x07")
HOSTILE = {
    "a dimension of 0": (header([entry(dims=(4, 0))]), "they must be positive"),
    "no dimensions": (header([entry(dims=())]), "has 0 dimensions"),
    "99 dimensions": (header([entry(dims=(1,) * 99)]), "has 99 dimensions"),
    "2**32 - 1 dimensions": (header([text(b"t") + b"\xff" * 40]), "has 4294967295 dimensions"),
    "absurd dimensions": (header([entry(dims=(2**63, 2**63, 2**63))]), "truncated: tensor 't'"),
    "an unknown tensor type": (header([entry(kind=9999)]), "unknown type 9999"),
    "a row that is no whole number of blocks": (header([entry(dims=(33,), kind=2)]), "multiple of 32"),
    "a tensor without a name": (header([entry(name=b"")]), "a name are needed"),
    "a tensor twice": (header([entry(), entry()]) + bytes(64), "is there twice"),
    "an offset that is not aligned": (header([entry(offset=1)]) + bytes(64), "not a multiple of 32"),
    "an offset beyond the end": (header([entry(offset=2**63)]) + bytes(64), "truncated: tensor 't'"),
    "tensors that share their bytes": (
        header([entry(name=b"t%d" % i, dims=(64,)) for i in range(99)]) + bytes(288),
        "its tensors overlap",
    ),
    "a tensor that begins within another": (
        header([entry(name=b"a", dims=(16,)), entry(name=b"b", offset=32)]) + bytes(96),
        "its tensors overlap: 'b' starts at 32, after 'a' at 0 with 64 bytes it must be 64",
    ),
    "a gap between tensors": (
        header([entry(name=b"a"), entry(name=b"b", offset=64)]) + bytes(128),
        "its tensors leave a gap: 'b' starts at 64, after 'a' at 0 with 16 bytes it must be 32",
    ),
    "a gap before the first tensor": (header([entry(offset=32)]) + bytes(96), "leave a gap"),
    "an entry that is missing": (header([entry()]) + bytes(128), "bytes belong to no tensor"),
    "an offset that wraps around": (header([entry(offset=2**64 - 32)]) + bytes(64), "truncated: tensor 't'"),
    "an offset of one less than the size": (header([entry(offset=63)]) + bytes(64), "not a multiple of 32"),
    "2**63 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(64), "claims 9223372036854775808"),
    "2**63 fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(64), "claims 9223372036854775808"),
    "an empty key": (header(fields=[field(b"", UINT8, b"\x07")]) + bytes(8), "has no key"),
    "a key twice": (header(fields=[NUMBER, NUMBER]), "a repeated key 'k'"),
    "a key of 2**62 bytes": (header(fields=[struct.pack("<Q", 2**62) + bytes(64)]), "truncated or damaged"),
    "text of 2**62 bytes": (header(fields=[field(b"k", STRING, struct.pack("<Q", 2**62))]), "needs 46116"),
    "a key that is not UTF-8": (header(fields=[field(b"\xff\xfe", UINT8, b"\x07")]), "not UTF-8"),
    "text that is not UTF-8": (header(fields=[field(b"k", STRING, text(b"\xc4"))]), "not UTF-8"),
    "a list with text that is not UTF-8": (
        header(fields=[field(b"k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xc4"))]),
        "not UTF-8",
    ),
    "an unknown value type": (header(fields=[field(b"k", 99, bytes(8))]), "unknown value type 99"),
    "a list of lists": (
        header(fields=[field(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32))]),
        "unknown value type 9",
    ),
    "a list of 2**62 texts": (
        header(fields=[field(b"k", ARRAY, struct.pack("<IQ", STRING, 2**62) + bytes(32))]),
        "claims 4611686018427387904 strings",
    ),
    "a list of 2**62 numbers": (
        header(fields=[field(b"k", ARRAY, struct.pack("<IQ", UINT8, 2**62) + bytes(32))]),
        "claims 4611686018427387904 numbers",
    ),
    "a list with a text beyond the end": (
        header(fields=[field(b"k", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"x" * 16))]),
        "truncated",
    ),
    "a list with a text of 2**62 bytes": (
        header(fields=[field(b"k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 2**62))]),
        "truncated or damaged",
    ),
    "an alignment of 0": (header(fields=[field(b"general.alignment", 4, bytes(4))]), "not a power of two"),
    "an alignment of 24": (
        header(fields=[field(b"general.alignment", 4, struct.pack("<I", 24))]),
        "not a power of two",
    ),
    "an alignment that is text": (
        header(fields=[field(b"general.alignment", STRING, text(b"32"))]),
        "not a power of two",
    ),
    "an alignment of 2**31": (
        header([entry()], [field(b"general.alignment", 4, struct.pack("<I", 2**31))]),
        "truncated: tensor 't'",
    ),
    "a name of many lines": (header([entry(name=b"\n" * 10_000, kind=9999)]), "unknown type 9999"),
}


@pytest.mark.parametrize(("content", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_short_error(tmp_path: Path, content: bytes, problem: str) -> None:
    """F-02, F-03"""
    path = tmp_path / "f.gguf"
    path.write_bytes(content)
    assert problem in failure(path)


def test_a_big_alignment_is_obeyed(tmp_path: Path) -> None:
    content = header([entry()], [field(b"general.alignment", 4, struct.pack("<I", 4096))])
    path = tmp_path / "f.gguf"
    path.write_bytes(content.ljust(4096, b"\0") + np.arange(4, dtype="<f4").tobytes())
    assert GgufFile(path).tensors["t"].data.tobytes() == np.arange(4, dtype="<f4").tobytes()


def test_a_file_of_metadata_only_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(header(fields=[NUMBER]))
    file = GgufFile(path)
    assert file.metadata == {"k": 7}
    assert file.tensors == {}


# Cut and changed files (F-01)


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_cut_file_never_loads(sample: Path, share: float) -> None:
    whole = sample.read_bytes()
    # The writer pads the last tensor; what is cut must reach into its 10 bytes of data.
    end = len(whole) - 32 + TENSORS["vector"].nbytes
    path = sample.with_name("cut.gguf")
    path.write_bytes(whole[: int(end * share)])
    failure(path)


def test_a_cut_in_the_data_names_the_tensor_and_both_sizes(sample: Path) -> None:
    whole = sample.read_bytes()
    needed = len(whole) - 32 + TENSORS["vector"].nbytes
    path = sample.with_name("cut.gguf")
    path.write_bytes(whole[: needed - 1])
    message = failure(path)
    assert f"truncated: tensor 'vector' ends at byte {needed}" in message
    assert f"the file has {needed - 1} bytes and needs {needed}" in message
    path.write_bytes(whole[:needed])
    assert GgufFile(path).tensors.keys() == TENSORS.keys()


@settings(max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_changed_bytes_give_an_error_or_a_file(sample: Path, changes: list[tuple[float, int]]) -> None:
    content = bytearray(sample.read_bytes())
    for share, value in changes:
        content[int(len(content) * share)] = value
    path = sample.with_name("changed.gguf")
    path.write_bytes(content)
    with suppress(ModelError):
        tensors = GgufFile(path).tensors.values()
        assert sum(len(tensor.data) for tensor in tensors) <= len(content)
