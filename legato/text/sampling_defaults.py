"""How a model's makers want it to be sampled: what a request that does not say gets.

Folders have it in generation_config.json, GGUF files under `general.sampling.*`. As in vLLM, each field holds
by itself, `do_sample` is not heeded (a temperature of 0 is what makes it greedy), and a request's own fields
always win (docs/decisions/0019).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from legato.text.json_object import JsonObject, read_json_object

_GGUF_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for the request fields of the same names. Without arguments: OpenAI's, which bend nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def changed(self) -> dict[str, float]:
        """The fields that are not OpenAI's."""
        values = asdict(self)
        return {
            field.name: values[field.name] for field in fields(self) if values[field.name] != field.default
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.changed.items()) or "OpenAI's"


def sampling_defaults_from_folder(folder: Path) -> SamplingDefaults:
    """Those of generation_config.json; OpenAI's for fields that are absent or null. Raises ModelError."""
    return _read(read_json_object(folder / "generation_config.json", optional=True))


def sampling_defaults_from_gguf(metadata: Mapping[str, object]) -> SamplingDefaults:
    """Those of a GGUF file's metadata. Raises ModelError that names the key."""
    prefix = "general.sampling."
    found = {name: metadata.get(prefix + key) for name, key in _GGUF_KEYS.items()}
    return _read(JsonObject(values=found, where="general.sampling"))


def _read(keys: JsonObject) -> SamplingDefaults:
    """Null is absent. The limits are those of the request fields."""
    said = {name: value for name, value in keys.values.items() if value is not None}
    keys = replace(keys, values=asdict(SamplingDefaults()) | said)
    return SamplingDefaults(
        temperature=keys.number_within("temperature", 0, 2),
        top_p=keys.number_within("top_p", 0, 1),
        top_k=keys.integer("top_k", least=-1),
        min_p=keys.number_within("min_p", 0, 1),
        repetition_penalty=keys.number_within("repetition_penalty", 0.01, 100),
    )
