"""The state of the scheduler. Only `Scheduler` changes it; its methods here are queries.

Decision, admission, plan and invariants read the state. So does the engine, between two steps.
"""

from dataclasses import dataclass, field
from itertools import accumulate

from legato.core.block_pool import BlockPool
from legato.core.budget import Budget
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.prefill_policy import PrefillPolicy
from legato.core.prefix_index import Digest
from legato.core.request import RequestId
from legato.core.schedule import Reason, Schedule
from legato.core.scheduling_policy import SchedulingPolicy
from legato.core.sequence import Sequence
from legato.core.waiting_queue import WaitingQueue
from legato.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step and of a sequence. Raises `ConfigError` for limits that contradict each other."""

    max_batch_tokens: int
    """The token budget: the most tokens in one step."""
    max_running: int
    """The most sequences that hold blocks. At most the token budget, so that every decode fits in every
    step."""
    max_model_len: int
    """The most tokens of a prompt and its reply together."""
    vocab_size: int
    """Token ids are in 0 .. vocab_size - 1."""
    min_chunk: int = 1
    """The budget does not cut the later chunks of a step shorter than this. The first chunk takes what is
    left."""
    prefix_cache: bool = True
    """Whether requests share computed blocks. If not, each shares only with itself, after a preemption."""
    strict: bool = False
    """Admit by the most that a request may ask for, so that no sequence is ever preempted."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_model_len", "vocab_size", "min_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"max_running ({self.max_running}) is above max_batch_tokens ({self.max_batch_tokens}): "
                "the decodes of all running sequences must fit in one step",
                param="max_running",
            )


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """Everything that the scheduler knows."""

    config: SchedulerConfig
    pool: BlockPool
    prefill_policy: PrefillPolicy
    budget: Budget
    policy: SchedulingPolicy
    output_lengths: OutputLengthEstimator
    waiting: WaitingQueue
    running: dict[RequestId, Sequence] = field(default_factory=dict)
    """The sequences that hold blocks, in the order of admission."""
    in_flight: Schedule | None = None
    """The schedule that was committed and is not complete."""
    held_back: list[list[int]] = field(default_factory=list)
    """Blocks of sequences that were aborted while the step in flight still writes to them."""
    step: int = 0
    """The number of committed steps."""
    num_left_waiting: int = 0
    """How many sequences the last step left in the queue. It does not count later arrivals."""
    virtual_time: float = 0.0
    """The tokens that every prompt would have received so far if all had shared every step equally; see
    `Fair`."""
    caution: float = 0.0
    """0: admit by the expected need. 1: by the full need, as right after a preemption. See `admission`."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def get(self, request_id: RequestId) -> Sequence | None:
        """The sequence of a request that runs or waits, if there is one."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def sequence(self, request_id: RequestId) -> Sequence:
        """The sequence of a request that runs or waits. Raises KeyError if there is none."""
        return self.running.get(request_id) or self.waiting[request_id]

    def shareable(self, sequence: Sequence) -> list[Digest]:
        """The digests of the blocks that a sequence may take from the prefix cache, in order.

        The block of the last known token is never among them. So no block that is shared is ever written.
        """
        return sequence.chain[1 : sequence.num_cacheable // self.pool.block_size + 1]

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The blocks of a waiting sequence that are in the prefix cache."""
        return self.pool.find(self.shareable(sequence))

    def tokens_ahead(self) -> dict[RequestId, int]:
        """For each prompt, the tokens to compute until its first token: its own and those of prompts ahead.

        Cache hits and waits for blocks are not predicted.
        """
        started = [s for s in self.running.values() if not s.num_generated]
        prompts = [(self.policy.key(s), s, s.num_remaining) for s in started]
        waiting = self.waiting.head(len(self.waiting))
        prompts += [(key, s, s.num_uncached_at_arrival) for key, s in waiting]
        prompts.sort()
        return dict(zip([s.id for _, s, _ in prompts], accumulate(num for _, _, num in prompts), strict=True))

    def explain(self, schedule: Schedule) -> dict[RequestId, Reason]:
        """Why each sequence that a schedule leaves out is left out. Call it before the schedule is
        committed."""
        reasons = dict(schedule.left_out)
        if schedule.queue_reason is not None:
            others = (i for i in self.waiting if i not in schedule.admitted and i not in reasons)
            reasons |= dict.fromkeys(others, schedule.queue_reason)
        return reasons
