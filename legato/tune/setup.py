"""What the tuner chooses between, and the same in words and as flags. Knows not how good a choice is."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from legato.config import EngineSettings, ModelSettings, Settings

Policy = Literal["fair", "fcfs", "shortest", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings that are searched, named as in `EngineSettings`; None: that setting's default."""

    tpot_target_ms: float = 0.0
    """0: no target."""
    max_batch_tokens: int | None = None
    prefill_chunk: int | None = None
    policy: Policy = "fair"
    max_running: int | None = None

    @classmethod
    def of(cls, engine: EngineSettings) -> "Setup":
        """The target of the settings is a number, not automatic."""
        assert engine.tpot_target_ms != "auto"
        return cls(
            tpot_target_ms=engine.tpot_target_ms,
            max_batch_tokens=engine.max_batch_tokens,
            prefill_chunk=engine.prefill_chunk,
            policy=engine.policy,
            max_running=engine.max_running,
        )

    def on(self, engine: EngineSettings) -> EngineSettings:
        """`engine` with these settings. The setup has to be `possible`."""
        return engine.model_copy(update=asdict(self))

    @property
    def possible(self) -> bool:
        """Whether all that run fit in one step."""
        engine = self.on(EngineSettings())
        return engine.running_limit <= engine.token_limit

    def in_words(self) -> str:
        """Such as "target 100 ms, fair, at most 64 run"."""
        engine = self.on(EngineSettings())
        if self.prefill_chunk == 0:
            budget = "no chunking"
        elif self.tpot_target_ms:
            budget = f"target {self.tpot_target_ms:g} ms"
        else:
            budget = f"budget {engine.token_limit}"
        chunk = f", chunks of at most {self.prefill_chunk}" if self.prefill_chunk else ""
        return f"{budget}{chunk}, {self.policy}, at most {engine.running_limit} run"


def serve_command(settings: Settings) -> str:
    """`legato serve MODEL` with a flag for each setting of model and engine that is not its default."""
    words = ["legato", "serve", settings.model.model]
    words += [*_flags(settings.model, without=("model",)), *_flags(settings.engine)]
    return shlex.join(words)


def _flags(section: EngineSettings | ModelSettings, without: tuple[str, ...] = ()) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in without or value == field.default:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", str(value).removesuffix(".0"))
