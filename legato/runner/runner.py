"""Runs a `StepPlan` on a device. Knows model, cache and sampler; never sees a Sequence or a Scheduler."""

import time
from collections.abc import Callable

import torch

from legato.core.plan import StepPlan, StepResult
from legato.errors import ConfigError, StepError
from legato.models.decoder import Decoder
from legato.runner.exactness import ExactnessCheck, ExactnessReport
from legato.runner.inputs import build_inputs
from legato.runner.kv_cache import KVCache
from legato.runner.sampler import sample
from legato.runner.score import score

_FLOAT16_ENDS = (
    "K and V are kept as float16, which ends at 65504: if they are larger, --kv-dtype float32 helps"
)


class TorchRunner:
    """One model with its KV cache. The blocks' contents are the only state that lives from step to step."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock` gives seconds; only differences are used."""
        self._decoder = decoder
        self._cache = cache
        self._clock = clock

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Store K and V of every token of the batch, sample the rows of `plan.sample`, and score what
        `plan.score` asks for.

        The LM head is computed for these rows only: none in a step of middle chunks that nobody wants scored.
        `elapsed` covers all of it, the device's work included. Raises StepError when a row's logits allow no
        choice.
        """
        began = self._clock()
        device = self._decoder.device
        inputs = build_inputs(plan, block_size=self.block_size, device=device)
        hidden = self._decoder.hidden(inputs.token_ids, inputs.positions, inputs.batch, self._cache.layers)
        logits = self._decoder.logits(hidden[inputs.rows])
        try:
            sampled = sample(logits, plan.sample)
        except StepError as error:
            if self._cache.dtype == torch.float16 and logits.isnan().any():
                raise StepError(f"{error.message}; {_FLOAT16_ENDS}") from error
            raise
        scored = score(self._decoder, hidden, plan)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return StepResult(sampled, self._clock() - began, scored)

    def check_exactness(self, seconds: float, seed: int) -> ExactnessReport:
        """Compare logits over random schedules for about `seconds`; the cache's contents are lost."""
        deadline = self._clock() + seconds
        check = ExactnessCheck(self._decoder, self._cache, seed=seed)
        return check.run(lambda _: self._clock() < deadline)


def choose_device(name: str) -> torch.device:
    """The device for "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:N".

    Raises ConfigError for any other name and for a CUDA device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (name != "cuda" and not (index.isascii() and index.isdigit())):
        raise ConfigError(f'device: {name!r} is not one of "auto", "cpu", "cuda", "cuda:N"', param="device")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise ConfigError(
            f"device: {name!r} asked for, this machine has {count} CUDA devices", param="device"
        )
    return torch.device(name)
