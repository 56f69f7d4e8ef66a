"""One step's decision, frozen: who runs, with how many tokens, and why the others do not."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from legato.core.request import RequestId


class Reason(Enum):
    """Why a sequence gets no token in a step."""

    BUDGET = "budget"
    """The step is full."""
    POLICY = "policy"
    """The prefill policy leaves it out of this step, as `WholePrompt` does when the rest is too long."""
    BLOCKS = "blocks"
    """Too few blocks are free for its whole need."""
    MAX_RUNNING = "max_running"
    """As many sequences run as may."""
    PREEMPTED = "preempted"
    """It lost its blocks to an older sequence in this step."""
    PREEMPTION = "preemption"
    """Nothing is admitted in a step that preempted."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions start .. start + length of one sequence. A decode is a chunk of one at its end."""

    request_id: RequestId
    start: int
    length: int
    last: bool
    """Whether it reaches the newest known token: then, and only then, its logits become a token."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Schedule:
    """What `Scheduler.schedule` decided. Nothing has changed yet: `Scheduler.commit` makes it so."""

    step: int
    """Number of the step; a schedule can be committed only as the next step of its scheduler."""
    now: float
    """Seconds on the engine's clock when it was decided."""
    decodes: tuple[Chunk, ...] = ()
    """Oldest sequence first."""
    chunks: tuple[Chunk, ...] = ()
    """Prompts already started, then new ones; oldest first in both."""
    admitted: tuple[RequestId, ...] = ()
    """Leave the queue in this step; each has a chunk."""
    preempted: tuple[RequestId, ...] = ()
    """Lose their blocks in this step, youngest first."""
    left_out: tuple[tuple[RequestId, Reason], ...] = ()
    """Every running sequence without a token, and the head of the queue if it was not admitted, with the
    reason. Everyone further back in the queue waits behind that head."""

    @cached_property
    def runs(self) -> tuple[Chunk, ...]:
        """Everything that runs, in the order of the batch: decodes first."""
        return self.decodes + self.chunks

    @cached_property
    def num_tokens(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - len(self.decodes)
