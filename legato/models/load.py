"""One front for both kinds of model files: open them, see the `ModelSpec`, then ask for the weights.

It chooses the loader and knows nothing else; which dtype and device are good is the caller's business.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from legato.models.config_json import spec_from_folder
from legato.models.gguf_file import GgufFile
from legato.models.gguf_loader import GgufWeights, spec_from_gguf
from legato.models.safetensors_loader import SafetensorsWeights
from legato.models.source import ModelFiles
from legato.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose description has been read. Its tokenizer lies in `gguf.metadata` or in the folder."""

    name: str
    spec: ModelSpec
    source: GgufFile | Path
    """The opened GGUF file, or the folder in Hugging Face form."""

    @property
    def gguf(self) -> GgufFile | None:
        return self.source if isinstance(self.source, GgufFile) else None

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> GgufWeights | SafetensorsWeights:
        """Every tensor of the spec under Legato's name (`ModelSpec.tensor_shapes`). Raises ModelError."""
        if isinstance(self.source, GgufFile):
            return GgufWeights(self.source, self.spec, dtype=dtype, device=device)
        return SafetensorsWeights(self.source, self.spec, dtype=dtype, device=device)


def open_model(files: ModelFiles) -> OpenedModel:
    """Read what the model is made of, and check it; the weights stay on disk. Raises ModelError."""
    if files.kind == "gguf":
        gguf = GgufFile(files.path)
        return OpenedModel(name=files.name, spec=spec_from_gguf(gguf), source=gguf)
    return OpenedModel(name=files.name, spec=spec_from_folder(files.path), source=files.path)
