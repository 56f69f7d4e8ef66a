"""Runs a `StepPlan` on a device. Knows model, cache and sampler; never sees a Sequence or a Scheduler."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import SampleRow, SamplingFailure, StepPlan, StepResult
from legato.models.decoder import Decoder
from legato.runner.exactness import ExactnessCheck, ExactnessReport
from legato.runner.inputs import build_inputs
from legato.runner.kv_cache import KVCache
from legato.runner.sampler import sample
from legato.runner.score import score

logger = logging.getLogger(__name__)

_FLOAT16_LIMIT = (
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
        `elapsed` covers all of it, the device's work included. A row whose logits allow no choice gets a
        `SamplingFailure`, which is logged.
        """
        began = self._clock()
        device = self._decoder.device
        inputs = build_inputs(plan, block_size=self.block_size, device=device)
        hidden = self._decoder.hidden(inputs.token_ids, inputs.positions, inputs.batch, self._cache.layers)
        logits = self._decoder.logits(hidden[inputs.rows])
        sampled = sample(logits, plan.sample)
        sampled = tuple(
            self._logged(row, result, logits[i]) if isinstance(result, SamplingFailure) else result
            for i, (row, result) in enumerate(zip(plan.sample, sampled, strict=True))
        )
        scored = score(self._decoder, hidden, plan)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return StepResult(sampled, self._clock() - began, scored)

    def _logged(self, row: SampleRow, failure: SamplingFailure, logits: Tensor) -> SamplingFailure:
        """Log a failure that is due to the logits of a row ([V]), and add the remedy if there is one."""
        if failure.reason is not FinishReason.ERROR:
            return failure
        if self._cache.dtype == torch.float16 and logits.isnan().any():
            failure = failure._replace(message=f"{failure.message}; {_FLOAT16_LIMIT}")
        logger.error("request %s: %s", row.request_id, failure.message)
        return failure

    def check_exactness(self, seconds: float, seed: int) -> ExactnessReport:
        """Compare logits over random schedules for about `seconds`; the cache's contents are lost."""
        deadline = self._clock() + seconds
        check = ExactnessCheck(self._decoder, self._cache, seed=seed)
        return check.run(lambda _: self._clock() < deadline)
