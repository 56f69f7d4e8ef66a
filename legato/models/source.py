"""From what a user calls a model to its files on this machine: packaged name, path, or Hugging Face hub id.

It finds and fetches; it does not know what a file holds. Weights come from safetensors or GGUF only: files
that hold pickles (.bin, .pt, .pth) run code when they are read, so they are neither fetched nor loaded.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from legato.config.suggest import did_you_mean
from legato.errors import ModelError
from legato.models.packaged import PACKAGED_MODELS, PackagedModel, assemble, find_packaged
from legato.models.split_name import first_part, split_name
from legato.text.sampling_defaults import SamplingDefaults

HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
# Sub-folders hold other formats of the same weights, and so does Mistral's consolidated file.
HUB_FILES_IGNORED = ("*/*", "consolidated*")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")

# Words joined by single dots or dashes: so never "..", "--" or a leading dot, as the hub itself demands.
_NAME = r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*"
_HUB_ID = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?::(?P<file>(?:{_NAME}/)*{_NAME}\.gguf))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model lies. The files are there; whether they are whole is seen when they are opened."""

    name: str
    """What clients call the model unless the server is told another name."""
    kind: Literal["gguf", "folder"]
    path: Path
    """The GGUF file (of a split one the first part), or the folder with config.json, tokenizer files and
    *.safetensors."""
    sampling: SamplingDefaults | None = None
    """What the makers want where a request is silent, if that is known besides the files."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on the Hugging Face hub, and one GGUF file of it."""

    repo: str
    file: str | None


def locate(model: str) -> PackagedModel | Path | HubId:
    """What `model` names; nothing is read, joined or fetched. Raises ModelError if it names nothing.

    It is, in this order: the name of a packaged model; the path of a GGUF file, of a folder in Hugging Face
    form or of a folder with one GGUF file; a hub id `org/name`, or `org/name:FILE.gguf` for one GGUF file of
    that repository. Of a split GGUF file any part may be named.
    """
    packaged = find_packaged(model)
    if packaged is not None:
        return packaged
    local = _existing_path(model)
    if local is not None:
        return local
    hub_id = _HUB_ID.fullmatch(model)
    # "models/x.gguf" has the shape of a hub id, but who writes it means a file that is not there.
    if hub_id is not None and (hub_id["file"] or not model.lower().endswith(".gguf")):
        return HubId(hub_id["repo"], hub_id["file"])
    names = [known.name for known in PACKAGED_MODELS]
    raise ModelError(
        f"model {model[:200]!r}: no such file or folder, and not a known name ({', '.join(names)}) "
        f"or a hub id (org/name or org/name:FILE.gguf){did_you_mean(model, names)}"
    )


def resolve(model: str, *, cache_dir: Path) -> ModelFiles:
    """The files of `model` (see `locate`), assembled under `cache_dir` or fetched from the hub if need be.

    The hub's own cache, token and HF_ENDPOINT apply. Raises ModelError."""
    place = locate(model)
    if isinstance(place, PackagedModel):
        path = assemble(place, cache_dir=cache_dir)
        return ModelFiles(name=place.name, kind="gguf", path=path, sampling=place.sampling)
    return _from_hub(place.repo, place.file) if isinstance(place, HubId) else _local(place)


def find_files(model: str, *, cache_dir: Path, progress: Callable[[str], None]) -> ModelFiles:
    """The same as `resolve`; reports to `progress` first."""
    progress(f"finding {model}")
    return resolve(model, cache_dir=cache_dir)


def _existing_path(model: str) -> Path | None:
    if not model.strip():
        return None
    try:
        path = Path(model).expanduser().absolute()
        path.stat()
    except (OSError, ValueError, RuntimeError):  # absent, unreadable, too long; a zero byte; no such user
        return None
    return path


def _local(path: Path) -> ModelFiles:
    return _folder(path) if path.is_dir() else _gguf(path)


def _gguf(path: Path, *, name: str | None = None) -> ModelFiles:
    split = split_name(path.name)
    if split is None:
        return ModelFiles(name=name or path.stem, kind="gguf", path=path)
    return ModelFiles(name=name or split.base, kind="gguf", path=first_part(path.parent, split))


def _folder(path: Path) -> ModelFiles:
    """A folder that holds a model: config.json and safetensors, or else one GGUF file or the parts of one."""
    try:
        files = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    except OSError as error:
        raise ModelError(f"{path}: cannot be listed ({error.strerror})") from error
    if _has_safetensors(files):
        return ModelFiles(name=path.name, kind="folder", path=path)
    ggufs = [file for file in files if file.lower().endswith(".gguf")]
    # The parts of a split one count once.
    models = {(split.base, split.count) if (split := split_name(file)) else file for file in ggufs}
    if len(models) == 1:
        return _gguf(path / ggufs[0])
    if ggufs:
        raise ModelError(
            f"{path}: holds {len(ggufs)} GGUF files; name one of them, such as {path / ggufs[0]}"
        )
    if any(file.endswith(PICKLE_SUFFIXES) for file in files):
        raise ModelError(
            f"{path}: holds weights as pickles only, which are never loaded; convert to safetensors"
        )
    lacking = "*.safetensors" if "config.json" in files else "config.json"
    raise ModelError(f"{path}: has no {lacking}; expected config.json with *.safetensors, or one GGUF file")


def _has_safetensors(files: list[str]) -> bool:
    return "config.json" in files and any(file.endswith(".safetensors") for file in files)


def _from_hub(repo: str, file: str | None) -> ModelFiles:
    # Imported here because only this road needs it: a server that starts from a path need not wait for it.
    from huggingface_hub import snapshot_download

    if file is not None:
        return _gguf_from_hub(repo, file)
    folder = Path(
        _ask_hub(
            repo,
            lambda: snapshot_download(
                repo, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_FILES_IGNORED)
            ),
        )
    )
    if not folder.is_dir() or not _has_safetensors([entry.name for entry in folder.iterdir()]):
        raise ModelError(
            f"{repo}: the hub repository has no config.json with *.safetensors; pickled weights (.bin) are "
            f"never loaded, and one GGUF file is asked for as {repo}:FILE.gguf"
        )
    return ModelFiles(name=repo, kind="folder", path=folder)


def _gguf_from_hub(repo: str, file: str) -> ModelFiles:
    """One GGUF file of a repository; of a split one all parts, from one revision."""
    from huggingface_hub import hf_hub_download, snapshot_download

    split = split_name(file)
    if split is None:
        path = Path(_ask_hub(repo, lambda: hf_hub_download(repo, file)))
    else:
        parts = [str(PurePosixPath(file).with_name(part)) for part in split.parts]
        path = Path(_ask_hub(repo, lambda: snapshot_download(repo, allow_patterns=parts)), file)
        if not path.parent.is_dir():
            raise ModelError(f"{repo}: the hub repository has no such file: {file}")
    return _gguf(path, name=f"{repo}:{file}")


def _ask_hub(repo: str, fetch: Callable[[], str]) -> str:
    """What `fetch` returns; every way in which the hub can fail becomes one line."""
    from huggingface_hub import errors

    try:
        return fetch()
    except errors.GatedRepoError as error:
        reason = "is gated: accept its terms on the hub and log in (HF_TOKEN)"
        raise ModelError(f"{repo}: {reason}") from error
    except errors.RepositoryNotFoundError as error:
        reason = "neither a path here nor a repository on the hub (a private one needs HF_TOKEN)"
        raise ModelError(f"{repo}: {reason}") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached, and its cache on this machine does not hold the model"
        raise ModelError(f"{repo}: {reason}") from error
    except errors.EntryNotFoundError as error:
        raise ModelError(f"{repo}: the hub repository has no such file") from error
    # The client's errors, the disk's, and those of an HTTP library that differs between client versions.
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{repo}: fetching from the hub failed: {first_line[:300]}") from error
