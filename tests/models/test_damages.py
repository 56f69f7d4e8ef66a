"""Models whose digest is known, damaged at random: joined anew if packaged, else refused by name."""

import errno
import hashlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.errors import ModelError
from legato.models.content import check_files, receipts_in
from legato.models.packaged import PackagedModel, assemble

WHOLE = bytes(random.Random(0).choices(range(1, 256), k=30_000))
"""The content of a model file. It has no zeros, so that zeroing a byte changes it."""
SHA256 = hashlib.sha256(WHOLE).hexdigest()
PARTS = ("damaged_model_part1", "damaged_model_part2")
Damage = Callable[[Path], object]


def write_part(file: Path, start: int, change: Callable[[bytes], bytes]) -> None:
    content = bytearray(file.read_bytes())
    content[start : start + 4096] = change(bytes(content[start : start + 4096]))
    file.write_bytes(content)


def to_folder(file: Path) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """One that surely changes the file."""
    at = draw(st.integers(0, len(WHOLE) - 1))
    kinds: dict[str, Damage] = {
        "cut": lambda file: os.truncate(file, at),
        "zeroed": lambda file: write_part(file, at, lambda part: bytes(len(part))),
        "zeroed to the end": lambda file: file.write_bytes(WHOLE[:at] + bytes(len(WHOLE) - at)),
        "inverted": lambda file: write_part(file, at, lambda part: bytes(byte ^ 255 for byte in part)),
        "one bit": lambda file: file.write_bytes(WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :]),
        "longer": lambda file: file.write_bytes(WHOLE + WHOLE[: at + 1]),
        "foreign": lambda file: file.write_text("<html>"),
        "folder": to_folder,
    }
    damage = kinds[draw(st.sampled_from(sorted(kinds)))]
    keeps_time = draw(st.booleans())

    def apply(file: Path) -> None:
        status = file.stat()
        damage(file)
        if keeps_time:  # as a disk does it
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    return apply


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackagedModel]:
    """A small packaged model whose parts are installed."""
    folder = tmp_path_factory.mktemp("packages")
    for name, content in zip(PARTS, (WHOLE[:20_000], WHOLE[20_000:]), strict=True):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "part.bin").write_bytes(content)
    sys.path.insert(0, str(folder))
    yield PackagedModel(
        name="small",
        extra="small",
        filename="small.gguf",
        parts=tuple((name, "part.bin") for name in PARTS),
        num_bytes=len(WHOLE),
        sha256=SHA256,
    )
    sys.path.remove(str(folder))


@settings(deadline=None)
@given(damage=damages())
def test_a_packaged_model_is_whole_after_any_damage(
    model: PackagedModel, tmp_path_factory: pytest.TempPathFactory, damage: Damage
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    file = assemble(model, cache_dir=cache)
    damage(file)
    assert assemble(model, cache_dir=cache) == file
    assert file.read_bytes() == WHOLE
    assert receipts_in(cache).matches(file)


@settings(deadline=None)
@given(damage=damages(), receipt=damages())
def test_a_damaged_receipt_hides_no_damage(
    model: PackagedModel, tmp_path_factory: pytest.TempPathFactory, damage: Damage, receipt: Damage
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    file = assemble(model, cache_dir=cache)
    (noted,) = (cache / "checked").iterdir()
    damage(file)
    receipt(noted)
    assert assemble(model, cache_dir=cache).read_bytes() == WHOLE


@settings(deadline=None)
@given(damage=damages(), checked_before=st.booleans(), in_hub=st.booleans())
def test_other_files_of_a_known_digest_are_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, damage: Damage, checked_before: bool, in_hub: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    receipts = receipts_in(folder / "cache")
    blob = folder / (SHA256 if in_hub else f"sha256-{SHA256}")
    blob.write_bytes(WHOLE)
    file = blob
    if in_hub:
        file = folder / "model.safetensors"
        file.symlink_to(blob)
    if checked_before:
        assert check_files([file], receipts) == []
    damage(blob)
    with pytest.raises(ModelError, match=rf"^{file}: (damaged|cannot be read)") as caught:
        check_files([file], receipts)
    assert "\n" not in caught.value.message


def test_a_folder_in_a_packaged_models_place_is_kept_under_another_name(
    model: PackagedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = assemble(model, cache_dir=tmp_path)
    to_folder(file)
    assert assemble(model, cache_dir=tmp_path).read_bytes() == WHOLE
    (other,) = (path for path in file.parent.iterdir() if path.is_dir())
    assert (other / "inside").is_dir()
    assert [record.message for record in caplog.records] == [
        f"{file}: a folder, not the model; renamed to {other.name}"
    ]


def test_a_damaged_packaged_model_is_told_of_once(
    model: PackagedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = assemble(model, cache_dir=tmp_path)
    assert caplog.records == []
    os.truncate(file, 100)
    assemble(model, cache_dir=tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{file}: not the model that it should be; joining it anew from its packages"
    ]


def full_disk(path: Path) -> None:
    """Whatever is written to this path meets a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")


def test_a_full_disk_leaves_no_part_of_a_packaged_model(model: PackagedModel, tmp_path: Path) -> None:
    target = tmp_path / "models" / SHA256[:16] / "small.gguf"
    full_disk(target.with_name(".small.gguf.part"))
    with pytest.raises(ModelError) as caught:
        assemble(model, cache_dir=tmp_path)
    assert caught.value.message == (
        f"{target}: cannot be written ({os.strerror(errno.ENOSPC)}); needs 30000 bytes in a writable folder "
        "(LEGATO_CACHE_DIR names another)"
    )
    assert [path.name for path in target.parent.iterdir()] == [".lock"]
    assert assemble(model, cache_dir=tmp_path).read_bytes() == WHOLE


def test_a_full_disk_costs_a_receipt_and_nothing_else(
    model: PackagedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target = assemble(model, cache_dir=tmp_path)
    receipts = receipts_in(tmp_path)
    (receipt,) = receipts.folder.iterdir()
    receipt.unlink()
    full_disk(receipt.with_name(f"{receipt.name}.part{os.getpid()}"))
    assert assemble(model, cache_dir=tmp_path) == target
    assert "cannot be noted" in caplog.records[-1].message
    assert os.strerror(errno.ENOSPC) in caplog.records[-1].message
    assert not receipts.matches(target)
    assert list(receipts.folder.iterdir()) == []  # the part is gone: the next start can write it
    assert assemble(model, cache_dir=tmp_path) == target
    assert receipts.matches(target)
