"""One front for both kinds of model files: open them, see the `ModelSpec`, then ask for the weights.

It chooses the loader and knows nothing else; which dtype and device are good is the caller's business.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from legato.models.config_json import spec_from_folder
from legato.models.content import Receipts, check_files, receipts_in
from legato.models.examine import ExaminedWeights, Weights, check_bytes
from legato.models.gguf_file import GgufFile
from legato.models.gguf_loader import GgufWeights
from legato.models.gguf_spec import spec_from_gguf
from legato.models.gguf_split import open_gguf
from legato.models.safetensors_loader import SafetensorsWeights, with_own_head
from legato.models.source import ModelFiles
from legato.models.spec import ModelSpec
from legato.models.split_name import split_name


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose description has been read. Its tokenizer lies in `gguf.metadata` or in the folder."""

    name: str
    spec: ModelSpec
    source: GgufFile | Path
    """The opened GGUF file, or the folder in Hugging Face form."""
    unknown: tuple[Path, ...] = ()
    """Its files of whose content nothing is known: it is examined as it is read."""
    receipts: Receipts | None = None
    """Where to note that they were good."""

    @property
    def gguf(self) -> GgufFile | None:
        return self.source if isinstance(self.source, GgufFile) else None

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Weights:
        """Every tensor of the spec under Legato's name (`ModelSpec.tensor_shapes`). Raises ModelError."""
        weights: Weights = (
            GgufWeights(self.source, self.spec, dtype=dtype, device=device)
            if isinstance(self.source, GgufFile)
            else SafetensorsWeights(self.source, self.spec, dtype=dtype, device=device)
        )
        if not self.unknown:
            return weights
        if self.gguf is not None:
            check_bytes(self.gguf.path, self.gguf)
        else:
            for path in self.unknown:
                check_bytes(path, None)
        return ExaminedWeights(
            weights, self.source.path if isinstance(self.source, GgufFile) else self.source
        )

    def note_good(self) -> None:
        """All weights were read, and nothing was wrong with them: later starts need not examine them."""
        if self.receipts is not None:
            for path in self.unknown:
                self.receipts.write(path)


def weight_files(files: ModelFiles) -> list[Path]:
    """The files that hold a model's weights."""
    if files.kind == "folder":
        return sorted(files.path.glob("*.safetensors"))
    split = split_name(files.path.name)
    return [files.path] if split is None else [files.path.with_name(part) for part in split.parts]


def open_checked(
    files: ModelFiles, *, cache_dir: Path, progress: Callable[[str], None] = lambda _: None
) -> OpenedModel:
    """As `open_model`, after a look at whether the files hold what they should. Raises ModelError."""
    receipts = receipts_in(cache_dir)
    unknown = check_files(weight_files(files), receipts, progress)
    return replace(open_model(files), unknown=tuple(unknown), receipts=receipts)


def open_model(files: ModelFiles) -> OpenedModel:
    """Read what the model is made of, and check it; the weights stay on disk. Raises ModelError."""
    if files.kind == "gguf":
        gguf = open_gguf(files.path)
        return OpenedModel(name=files.name, spec=spec_from_gguf(gguf), source=gguf)
    spec = with_own_head(files.path, spec_from_folder(files.path))
    return OpenedModel(name=files.name, spec=spec, source=files.path)
