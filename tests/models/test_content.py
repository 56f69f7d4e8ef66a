"""A model's file with wrong bytes is put right where that is possible, and else refused by name."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from legato.errors import ModelError
from legato.models import content
from legato.models.content import DamagedError, check_files, known_sha256, receipts_in
from legato.models.examine import ExaminedWeights, absurd_row, check_bytes, zero_runs
from legato.models.gguf_file import GgufFile
from legato.models.load import open_checked
from legato.models.packaged import PackagedModel, assemble, find_packaged
from legato.models.source import ModelFiles

MIB = 1 << 20


def zero(file: Path, start: int, end: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(bytes(end - start))


def invert(file: Path, start: int, end: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(start)
        part = opened.read(end - start)
        opened.seek(start)
        opened.write(bytes(byte ^ 255 for byte in part))


def quietly(change: Callable[[], object], file: Path) -> None:
    """As a disk does it: without a new time of change."""
    status = file.stat()
    change()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def read_all(path: Path, cache_dir: Path) -> bool:
    """Take every weight of a model, as a start does. Whether anything had to be examined."""
    kind = "folder" if path.is_dir() else "gguf"
    opened = open_checked(ModelFiles(name="m", kind=kind, path=path), cache_dir=cache_dir)  # type: ignore[arg-type]
    weights = opened.weights(dtype=torch.float32, device=torch.device("cpu"))
    for name in opened.spec.tensor_shapes():
        weights.pop(name)
    opened.note_good()
    return bool(opened.unknown)


@pytest.fixture
def demo(gemma_path: Path, tmp_path: Path) -> Path:
    """A copy of the demo model that a user could have: nothing is known of it."""
    return Path(shutil.copy(gemma_path, tmp_path / "mine.gguf"))


def test_a_users_file_is_examined_once(demo: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert read_all(demo, cache)
    receipts = receipts_in(cache)
    assert check_files([demo], receipts) == []
    os.utime(demo, (1, 1))
    assert check_files([demo], receipts) == [demo]


def test_a_receipt_that_is_damaged_costs_only_time(demo: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    receipts = receipts_in(cache)
    for damage in ("", "{}", "[" * 100_000, '{"file": [], "sample": "", "digest": ""}', "null", "[1]"):
        receipts.write(demo)
        assert check_files([demo], receipts) == []
        (receipt,) = (cache / "checked").iterdir()
        receipt.write_text(damage)
        assert check_files([demo], receipts) == [demo]
    receipt.unlink()
    receipt.mkdir()
    receipts.write(demo)
    assert check_files([demo], receipts) == [demo]
    shutil.rmtree(cache)
    cache.write_text("no folder")
    receipts.write(demo)
    assert check_files([demo], receipts) == [demo]


@pytest.mark.parametrize("seed", range(6))
def test_a_users_file_with_a_hole_is_refused_by_name(demo: Path, tmp_path: Path, seed: int) -> None:
    """Zeroed or inverted from somewhere on, for 8 KiB at least, among the weights, or to the end."""
    draw = random.Random(seed)
    size = demo.stat().st_size
    start = draw.randrange(MIB * 30, size - MIB)
    end = size if seed < 2 else min(start + draw.choice((8192, 100_000, MIB)), size)
    damage = (zero, invert)[seed % 2]
    damage(demo, start, end)
    with pytest.raises(ModelError, match=r"mine\.gguf: damaged: "):
        read_all(demo, tmp_path / "cache")
    assert not (tmp_path / "cache" / "checked").exists()


@pytest.mark.parametrize("damage", [zero, invert])
def test_bytes_that_change_behind_the_time_of_change_are_refused(
    demo: Path, tmp_path: Path, damage: Callable[[Path, int, int], None]
) -> None:
    receipts = receipts_in(tmp_path / "cache")
    receipts.write(demo)
    size = demo.stat().st_size
    quietly(lambda: damage(demo, size - 3000, size), demo)
    with pytest.raises(ModelError, match="bytes differ from those of an earlier start"):
        check_files([demo], receipts)


def test_a_folder_with_a_hole_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "model.safetensors"
    save_file({"a.weight": torch.randn(300, 123), "b.weight": torch.randn(40, 1000).bfloat16()}, file)
    check_bytes(file, None)
    zero(file, 70_000, 80_000)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: damaged: tensor '[ab]\.weight' has 1\d{4} zero"
    ):
        check_bytes(file, None)


def test_rows_of_zeros_are_fine(tmp_path: Path) -> None:
    """A padded vocabulary, pruned neurons, a layer that does nothing yet."""
    torch.manual_seed(0)
    padded, pruned = torch.randn(500, 123), torch.randn(500, 123)
    padded[400:] = 0
    pruned[10:60] = 0
    pruned[490:500] = 0
    tensors = {"padded": padded, "pruned": pruned, "nothing": torch.zeros(90, 123), "bias": torch.zeros(5000)}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        file = tmp_path / "model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, file)
        check_bytes(file, None)


@given(st.data())
def test_runs_of_zeros_are_found_to_the_byte(data: st.DataObject) -> None:
    size = data.draw(st.integers(5000, 60_000))
    start = data.draw(st.integers(0, size - 4200))
    end = data.draw(st.integers(start + 4200, size))
    offset = data.draw(st.integers(0, 7))  # tensors lie anywhere
    memory = np.full(size + offset, 255, np.uint8)[offset:]
    memory[start:end] = 0
    assert list(zero_runs(memory)) == [(start, end)] or end - start < 5120


def test_rows_of_other_scales_are_absurd_and_outliers_are_not() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    weight[7] *= 100
    weight[8] = 0
    weight[9] *= 1e-6
    assert absurd_row(weight) is None
    assert absurd_row(torch.zeros(4, 4)) is None
    weight[30] *= 1e5
    problem = absurd_row(weight)
    assert problem is not None
    assert problem.startswith("row 30: its numbers are ")

    class One:
        def pop(self, name: str, /) -> torch.Tensor:  # noqa: ARG002
            return weight

    with pytest.raises(ModelError, match=r"x\.gguf: damaged: layers\.0\.q, row 30: "):
        ExaminedWeights(One(), Path("x.gguf")).pop("layers.0.q")


@pytest.fixture
def packaged(gemma_path: Path, tmp_path: Path) -> tuple[PackagedModel, Path, Path]:
    """The demo model, its file in a cache folder of its own, and that folder."""
    model = find_packaged("gemma3-270m")
    assert model is not None
    target = tmp_path / "models" / model.sha256[:16] / model.filename
    target.parent.mkdir(parents=True)
    shutil.copy(gemma_path, target)
    return model, target, tmp_path


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: zero(file, file.stat().st_size - MIB, file.stat().st_size),
        lambda file: zero(file, 5000, 5008),
        lambda file: invert(file, 200_000_000, 200_000_001),
        lambda file: os.truncate(file, 1000),
        lambda file: file.write_bytes(b""),
        lambda file: quietly(lambda: zero(file, file.stat().st_size - MIB, file.stat().st_size), file),
    ],
    ids=["tail", "8 bytes", "1 byte inverted", "cut", "empty", "tail, quietly"],
)
def test_a_packaged_model_is_joined_anew(
    packaged: tuple[PackagedModel, Path, Path],
    damage: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, target, cache = packaged
    assert assemble(model, cache_dir=cache) == target
    damage(target)
    assert not caplog.records
    assert assemble(model, cache_dir=cache) == target
    assert "joining it anew" in caplog.text
    assert content.file_sha256(target) == model.sha256


def test_a_later_start_does_not_read_a_packaged_model_in_full(
    packaged: tuple[PackagedModel, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target, cache = packaged
    assemble(model, cache_dir=cache)
    monkeypatch.setattr(content, "file_sha256", None)
    assert assemble(model, cache_dir=cache) == target


@pytest.mark.parametrize("place", ["hub", "ollama", "local"])
def test_files_whose_digest_somebody_noted_are_held_to_it(tmp_path: Path, place: str) -> None:
    whole = b"weights" * 1000
    sha256 = hashlib.sha256(whole).hexdigest()
    file = tmp_path / "model.safetensors"
    if place == "hub":
        blob = tmp_path / "blobs" / sha256
        blob.parent.mkdir()
        blob.write_bytes(whole)
        file.symlink_to(blob)
    elif place == "ollama":
        file = tmp_path / f"sha256-{sha256}"
        file.write_bytes(whole)
    else:
        file.write_bytes(whole)
        note = tmp_path / ".cache/huggingface/download/model.safetensors.metadata"
        note.parent.mkdir(parents=True)
        note.write_text(f"commit\n{sha256}\n{file.stat().st_mtime + 1}\n")
    assert known_sha256(file) == sha256
    receipts = receipts_in(tmp_path / "cache")
    assert check_files([file], receipts) == []
    quietly(lambda: file.write_bytes(whole[:-1] + b"!"), file)
    with pytest.raises(
        DamagedError, match=rf"{file}: damaged: its SHA-256 is .*, it should be {sha256[:16]}"
    ):
        check_files([file], receipts)
    if place == "local":  # a file that was changed long after it was fetched is the user's own
        os.utime(file, (file.stat().st_mtime + 100,) * 2)
        assert known_sha256(file) is None
        assert check_files([file], receipts) == [file]


def test_receipts_do_not_hold_for_another_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for file in (one, other):
        file.write_bytes(b"x" * 100)
    receipts = receipts_in(tmp_path / "cache")
    receipts.write(one)
    assert receipts.matches(one)
    assert not receipts.matches(other)
    (receipt,) = (tmp_path / "cache" / "checked").iterdir()
    assert set(json.loads(receipt.read_text())) == {"file", "sample", "digest"}
    other.replace(one)  # the same size; another inode
    assert not receipts.matches(one)


def test_the_demo_model_has_no_holes(gemma_path: Path) -> None:
    check_bytes(gemma_path, GgufFile(gemma_path))
