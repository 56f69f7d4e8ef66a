"""One step's decision, frozen: who runs, with how many tokens, and why the others do not."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from legato.core.budget import Limit
from legato.core.cost import StepCost, StepShape, shape_of
from legato.core.request import RequestId


class Reason(Enum):
    """Why a sequence gets no token in a step."""

    BUDGET = "budget"
    """The step's tokens go to decodes and to prompts that come before it in the order."""
    TURN = "turn"
    """It is so far back in the queue that the step does not look at it."""
    POLICY = "policy"
    """The prefill policy leaves it out of this step, as `WholePrompt` does when the rest is too long."""
    MIN_CHUNK = "min_chunk"
    """What is left of the step is too little for a chunk that does not end its prompt, or, so far into a
    text, for any."""
    BLOCKS = "blocks"
    """Too few blocks are free for its expected need, or it is behind one that may not be overtaken."""
    PARTIAL = "partial"
    """Prompts that are computed in part hold as many blocks as such prompts may."""
    PREFIX = "prefix"
    """It waits for a prefix that another sequence is computing in this step."""
    MAX_RUNNING = "max_running"
    """As many sequences run as may."""
    PREEMPTED = "preempted"
    """It lost its blocks to another sequence in this step."""
    PREEMPTION = "preemption"
    """Nothing is admitted in a step that preempted."""


class Chunk(NamedTuple):
    """Positions start .. start + length of one sequence. A decode is a chunk of one at its end."""

    request_id: RequestId
    start: int
    length: int
    last: bool
    """Whether it reaches the newest known token: then, and only then, its logits become a token."""
    num_scored: int = 0
    """Positions whose logits give log-probabilities of prompt tokens."""

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
    """In the order in which they were admitted."""
    chunks: tuple[Chunk, ...] = ()
    """Prompts in the order of the policy. The first chunk of one that was just admitted starts where its
    cached prefix ends."""
    admitted: tuple[RequestId, ...] = ()
    """Leave the queue in this step; each has a chunk."""
    preempted: tuple[RequestId, ...] = ()
    """Lose their blocks in this step."""
    left_out: tuple[tuple[RequestId, Reason], ...] = ()
    """Every running sequence without a token, and those at the head of the queue that were looked at, with
    the reason of each."""
    queue: Reason | None = None
    """Why all others in the queue wait; None if there are none."""
    num_behind: int = 0
    """How many these are."""
    budget: int = 0
    """Tokens that it could hold, decodes included, of prompts at their start."""
    limit: Limit = Limit.TOKENS
    """What set the budget."""
    target: float | None = None
    """Seconds that it should take at most; None if nobody in it waits for a next token by a target."""
    margin: float = 1.0
    """Times `predicted`, it holds for almost every step: so much is kept below the target."""
    cost: StepCost | None = None
    """The prices that it was decided by, if the budget knows time."""

    @property
    def runs(self) -> tuple[Chunk, ...]:
        """Everything that runs, in the order of the batch: decodes first."""
        return self.decodes + self.chunks

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @cached_property
    def shape(self) -> StepShape:
        """What its time depends on."""
        shape, num = shape_of([chunk[1:4] for chunk in self.chunks]), len(self.decodes)
        context = sum([run.start for run in self.decodes]) + num
        return StepShape(
            shape.num_decodes + num,
            shape.num_prefill,
            shape.decode_context + context,
            shape.prefill_pairs,
            shape.samples or num > 0,
            sum([chunk.num_scored for chunk in self.chunks]),
        )

    @cached_property
    def predicted(self) -> float | None:
        """Seconds that it is expected to take."""
        return None if self.cost is None else self.cost.seconds(self.shape)

    @cached_property
    def reasons(self) -> dict[RequestId, Reason]:
        """`left_out` to look up in. Who waits and is not in it waits for `queue`."""
        return dict(self.left_out)

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.length for chunk in self.chunks])
