"""Runs a `StepPlan` on a device. Knows model, cache and sampler; never sees a Sequence or a Scheduler."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from legato.core.plan import Sampled, SampleRow, StepPlan, StepResult
from legato.core.stopping import FinishReason
from legato.models.decoder import Decoder
from legato.runner.exactness import ExactnessCheck, ExactnessReport
from legato.runner.inputs import build_inputs
from legato.runner.kv_cache import KVCache
from legato.runner.sampler import sample
from legato.runner.score import score

logger = logging.getLogger(__name__)

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
        `elapsed` covers all of it, the device's work included. A row whose logits allow no choice gets a
        fault, which is logged.
        """
        began = self._clock()
        device = self._decoder.device
        inputs = build_inputs(plan, block_size=self.block_size, device=device)
        hidden = self._decoder.hidden(inputs.token_ids, inputs.positions, inputs.batch, self._cache.layers)
        logits = self._decoder.logits(hidden[inputs.rows])
        sampled = sample(logits, plan.sample)
        if any(one.fault is not None for one in sampled):
            sampled = tuple(map(self._explained, plan.sample, sampled, logits))
        scored = score(self._decoder, hidden, plan)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return StepResult(sampled, self._clock() - began, scored)

    def _explained(self, row: SampleRow, sampled: Sampled, logits: Tensor) -> Sampled:
        """What came of a row; a fault of its logits is logged, with the remedy if there is one."""
        fault = sampled.fault
        if fault is None or fault.reason is not FinishReason.ERROR:
            return sampled
        if self._cache.dtype == torch.float16 and logits.isnan().any():
            fault = fault._replace(message=f"{fault.message}; {_FLOAT16_ENDS}")
        logger.error("request %s: %s", row.request_id, fault.message)
        return replace(sampled, fault=fault)

    def check_exactness(self, seconds: float, seed: int) -> ExactnessReport:
        """Compare logits over random schedules for about `seconds`; the cache's contents are lost."""
        deadline = self._clock() + seconds
        check = ExactnessCheck(self._decoder, self._cache, seed=seed)
        return check.run(lambda _: self._clock() < deadline)
