"""`resolve` without a network: packaged models are joined once and whole, and paths are understood."""

import hashlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from legato.config import ModelSettings
from legato.errors import ModelError
from legato.models.packaged import PackagedModel, assemble, find_packaged
from legato.models.source import ModelFiles, resolve

PARTS = (b"first part, ", b"second part, ", b"third part")
WHOLE = b"".join(PARTS)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A packaged model of three tiny parts, installed in a folder on the import path."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(site)
    return install_parts(site, "legato_test_model")


def install_parts(site: Path, prefix: str) -> PackagedModel:
    for n, content in enumerate(PARTS, start=1):
        data = site / f"{prefix}_part{n}" / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise RuntimeError('a part must never be imported')")
        (data / f"part{n}.bin").write_bytes(content)
    return PackagedModel(
        name="tiny",
        extra="tiny",
        filename="tiny.gguf",
        parts=tuple((f"{prefix}_part{n}", f"data/part{n}.bin") for n in range(1, len(PARTS) + 1)),
        num_bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
    )


def files_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()} - {".lock"}


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    assert "\n" not in caught.value.message
    return caught.value.message


# Packaged models


def test_parts_are_joined_in_order_into_one_file(package: PackagedModel, tmp_path: Path) -> None:
    path = assemble(package, cache_dir=tmp_path / "cache")
    assert path.read_bytes() == WHOLE
    assert path.name == "tiny.gguf"
    assert files_below(tmp_path / "cache" / "models") == {"tiny.gguf"}


def test_a_second_call_neither_reads_the_parts_nor_writes(package: PackagedModel, tmp_path: Path) -> None:
    path = assemble(package, cache_dir=tmp_path)
    written = path.stat().st_mtime_ns
    for part in (tmp_path / "site-packages").rglob("*.bin"):
        part.unlink()
    assert assemble(package, cache_dir=tmp_path) == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", [b"", WHOLE[:-1], WHOLE + b"x"], ids=["empty", "cut", "too long"])
def test_a_cached_file_of_the_wrong_size_is_joined_again(
    package: PackagedModel, tmp_path: Path, damage: bytes
) -> None:
    path = assemble(package, cache_dir=tmp_path)
    path.write_bytes(damage)
    assert assemble(package, cache_dir=tmp_path).read_bytes() == WHOLE


def test_a_partial_file_of_a_killed_process_does_no_harm(package: PackagedModel, tmp_path: Path) -> None:
    path = assemble(package, cache_dir=tmp_path)
    path.unlink()
    path.with_name(".tiny.gguf.part").write_bytes(b"much longer than the model itself" * 9)
    assert assemble(package, cache_dir=tmp_path).read_bytes() == WHOLE
    assert files_below(path.parent) == {"tiny.gguf"}


def test_a_wrong_sha256_is_an_error_and_leaves_nothing_behind(package: PackagedModel, tmp_path: Path) -> None:
    next((tmp_path / "site-packages").rglob("part2.bin")).write_bytes(b"SECOND PART, ")
    message = error_of(lambda: assemble(package, cache_dir=tmp_path / "cache"))
    assert package.sha256[:16] in message
    assert "--force-reinstall" in message
    assert files_below(tmp_path / "cache" / "models") == set()


def test_a_package_that_is_not_installed_is_named_with_the_way_to_install_it(
    package: PackagedModel, tmp_path: Path
) -> None:
    part = next((tmp_path / "site-packages").rglob("part2.bin"))
    part.unlink()
    assert str(part) in error_of(lambda: assemble(package, cache_dir=tmp_path))
    absent = PackagedModel(
        name="absent",
        extra="coder",
        filename="absent.gguf",
        parts=(("legato_no_such_package", "data/part1.bin"),),
        num_bytes=1,
        sha256="0" * 64,
    )
    assert absent.missing_modules == ("legato_no_such_package",)
    message = error_of(lambda: assemble(absent, cache_dir=tmp_path))
    assert "legato_no_such_package" in message
    assert "pip install 'legato[coder]'" in message


def test_a_cache_that_cannot_be_written_is_an_error(package: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    message = error_of(lambda: assemble(package, cache_dir=tmp_path / "cache"))
    assert str(tmp_path / "cache") in message
    assert str(len(WHOLE)) in message


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(package: PackagedModel, tmp_path: Path) -> None:
    """The real error of a full disk: /dev/full takes no byte."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    folder = tmp_path / "cache" / "models" / package.sha256[:16]
    folder.mkdir(parents=True)
    (folder / ".tiny.gguf.part").symlink_to("/dev/full")
    message = error_of(lambda: assemble(package, cache_dir=tmp_path / "cache"))
    assert "No space left on device" in message
    assert files_below(folder) == set()
    assert not (folder / ".tiny.gguf.part").is_symlink()


def _assemble_at(start: float, site: Path, package: PackagedModel, cache: Path) -> None:
    sys.path.insert(0, str(site))
    time.sleep(max(0.0, start - time.time()))
    if assemble(package, cache_dir=cache).read_bytes() != WHOLE:
        raise RuntimeError("the file was not whole")


def test_processes_that_start_together_all_get_the_whole_file(tmp_path: Path) -> None:
    package = install_parts(tmp_path / "site", "legato_test_race")
    spawn = multiprocessing.get_context("spawn")
    arguments = (time.time() + 2.0, tmp_path / "site", package, tmp_path / "cache")
    processes = [spawn.Process(target=_assemble_at, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert files_below(tmp_path / "cache" / "models") == {"tiny.gguf"}


@pytest.mark.parametrize("name", ["gemma3-270m", "gemma-3-270m", "demo", ModelSettings().model])
def test_the_demo_model_has_one_served_name(name: str, gemma_path: Path) -> None:
    cache_dir = gemma_path.parents[2]
    assert resolve(name, cache_dir=cache_dir) == ModelFiles(name="gemma3-270m", kind="gguf", path=gemma_path)


def test_the_demo_model_is_the_published_file(gemma_path: Path) -> None:
    model = find_packaged("demo")
    assert model is not None
    with gemma_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


@pytest.mark.big
def test_the_coder_model_is_the_published_file(qwen_path: Path) -> None:
    model = find_packaged("qwen2.5-coder-1.5b-instruct")
    assert model is not None
    with qwen_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


# Paths


def resolve_path(path: Path | str) -> ModelFiles:
    return resolve(str(path), cache_dir=Path("/nonexistent"))


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    path = fill(tmp_path, "some-model.Q4_K_M.gguf") / "some-model.Q4_K_M.gguf"
    assert resolve_path(path) == ModelFiles(name="some-model.Q4_K_M", kind="gguf", path=path)


def test_a_relative_path_and_a_home_path_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "m.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_path("m.gguf").path == tmp_path / "m.gguf"
    assert resolve_path("~/m.gguf").path == tmp_path / "m.gguf"


def test_a_folder_in_hugging_face_form_is_named_by_the_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "my-model", "config.json", "model.safetensors", "extra.gguf")
    assert resolve_path(folder) == ModelFiles(name="my-model", kind="folder", path=folder)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m", "config.json", "tiny.gguf", "README.md")
    assert resolve_path(folder) == ModelFiles(name="tiny", kind="gguf", path=folder / "tiny.gguf")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), "has no config.json; expected config.json with *.safetensors, or one GGUF file"),
        (("model.safetensors",), "has no config.json"),
        (("config.json", "tokenizer.json"), "has no *.safetensors"),
        (("config.json", "pytorch_model.bin"), "pickles only, which are never loaded"),
        (("consolidated.pth",), "pickles only, which are never loaded"),
        (("a.gguf", "b.gguf"), "holds 2 GGUF files"),
        (("m-00001-of-00002.gguf",), "1 of the 2 parts of m are missing: m-00002-of-00002.gguf"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_what_is_expected(
    tmp_path: Path, names: tuple[str, ...], expected: str
) -> None:
    folder = fill(tmp_path / "m", *names)
    message = error_of(lambda: resolve_path(folder))
    assert expected in message
    assert str(folder) in message


def test_a_split_gguf_with_missing_parts_is_refused_with_their_names(tmp_path: Path) -> None:
    name = "big-00002-of-00003.gguf"
    message = error_of(lambda: resolve_path(fill(tmp_path, name) / name))
    assert "2 of the 3 parts of big are missing: big-00001-of-00003.gguf, big-00003-of-00003.gguf" in message
    alone = "small-00001-of-00001.gguf"
    assert resolve_path(fill(tmp_path, alone) / alone).kind == "gguf"


@pytest.mark.parametrize(
    "model",
    [
        "",
        "  ",
        "no-such-model",
        "./no/such/folder",
        "/no/such/model.gguf",
        "models/absent.gguf",
        "org/name/extra",
        "org/..",
        "../name",
        "org/na--me",
        "org/name:../../etc/passwd.gguf",
        "org/name:weights.bin",
        "https://example.com/org/name",
        "~no-such-user/model",
        "nul\0byte",
        "x" * 5000,
    ],
)
def test_what_is_no_model_is_refused_with_the_forms_and_names(model: str) -> None:
    message = error_of(lambda: resolve_path(model))
    assert "gemma3-270m" in message
    assert "org/name:FILE.gguf" in message
    assert len(message) < 500
