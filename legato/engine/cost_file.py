"""A file of measured step costs: the samples of a calibration, and the machine and settings that were
measured.

`legato serve` caches such files, so that it calibrates only once. `legato tune` writes them. `legato
simulate` and `legato serve --simulate` read them. The format is JSON, so that people can read it and other
programs can write it.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from legato.config.bounded_file import read_bounded
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost, StepShape
from legato.errors import ConfigError

Count = Annotated[int, Field(ge=0, le=10**12)]
Size = Annotated[int, Field(ge=1, le=10**9)]
MAX_SAMPLES = 100_000


class Sample(BaseModel):
    """A measured step: the fields of `StepShape`, and its seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    num_decodes: Count
    num_prefill: Count
    decode_context: Count
    prefill_pairs: Count
    samples: bool
    num_scored: Count = 0
    seconds: Annotated[float, Field(ge=1e-9, le=3600)]

    @property
    def shape(self) -> StepShape:
        return StepShape(
            self.num_decodes,
            self.num_prefill,
            self.decode_context,
            self.prefill_pairs,
            self.samples,
            self.num_scored,
        )


class CostFile(BaseModel):
    """The content of a cost file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    format: Literal[1] = 1
    model: str
    """The name of the model."""
    measured_on: dict[str, str]
    """The machine and the choices that affect costs."""
    vocab_size: Size
    max_model_len: Size
    block_size: Size
    num_blocks: Size
    samples: Annotated[tuple[Sample, ...], Field(min_length=1, max_length=MAX_SAMPLES)]
    """In the order of measurement."""
    sha256: str | None = None
    """The digest of all other fields. Legato writes it. Files of other programs need not have it."""

    def digest(self) -> str:
        """The expected value of `sha256`."""
        content = json.dumps(self.model_dump(exclude={"sha256"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def cost_model(self) -> CostModel:
        """A cost model that has learned from the samples."""
        return CostModel([(sample.shape, sample.seconds) for sample in self.samples])

    def ratios(self, cost: StepCost) -> tuple[float, ...]:
        """measured / predicted of each sample, sorted: how much steps of the same shape vary."""
        return tuple(sorted(sample.seconds / cost.seconds(sample.shape) for sample in self.samples))


def read_cost_file(path: Path) -> CostFile:
    """Raises `ConfigError` that names the file and the problem."""
    try:
        content = read_bounded(path)
    except (OSError, ValueError) as error:  # ValueError: not a valid file name.
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cost file {path}: cannot be read ({reason})") from None
    try:
        costs = CostFile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"cost file {path}: {where + ': ' if where else ''}{first['msg']}") from None
    if costs.sha256 is not None and costs.sha256 != costs.digest():
        raise ConfigError(
            f"cost file {path}: its content was changed after it was measured; remove the field sha256 to "
            "use it anyway"
        )
    return costs


def write_cost_file(path: Path, costs: CostFile) -> None:
    """Write a file atomically. Raises `ConfigError` if it cannot be written; an existing file then stays."""
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = costs.model_copy(update={"sha256": costs.digest()}).model_dump()
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise ConfigError(f"cost file {path}: cannot be written ({error.strerror})") from None
