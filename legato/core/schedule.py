"""The decision for one step: which sequences run, with how many tokens, and why the others do not."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from legato.core.budget import LimitedBy
from legato.core.request import RequestId
from legato.cost.step_cost import StepCost, StepShape, shape_of


class Reason(Enum):
    """Why a sequence gets no token in a step."""

    BUDGET = "budget"
    """Decodes and prompts that come first use all tokens of the step."""
    NOT_EXAMINED = "turn"
    """It is so far back in the queue that the step does not examine it."""
    POLICY = "policy"
    """The prefill policy leaves it out, as `WholePrompt` does if the rest of the prompt is too long."""
    MIN_CHUNK = "min_chunk"
    """The rest of the step is too small for a chunk that does not end its prompt, or for any chunk."""
    BLOCKS = "blocks"
    """Too few blocks are free for its expected need, or it is behind a sequence that must not be
    overtaken."""
    PARTIAL = "partial"
    """Partly computed prompts hold as many blocks as they may."""
    PREFIX = "prefix"
    """It waits for a prefix that another sequence computes in this step."""
    MAX_RUNNING = "max_running"
    """`max_running` sequences run."""
    PREEMPTED = "preempted"
    """It lost its blocks to another sequence in this step."""
    PREEMPTION = "preemption"
    """No sequence is admitted in a step that preempts one."""


class Chunk(NamedTuple):
    """Positions start .. start + length of one sequence. A decode is a chunk of one token at the end."""

    request_id: RequestId
    start: int
    length: int
    is_last: bool
    """Whether it reaches the last known token. Only then a token is sampled from its logits."""
    num_scored: int = 0
    """Positions whose logits give log-probabilities of prompt tokens."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Schedule:
    """The decision of `Scheduler.schedule`. It changes nothing until `Scheduler.commit`."""

    step: int
    """The number of the step. A schedule can be committed only as the next step of its scheduler."""
    now: float
    """When it was decided, in seconds on the engine's clock."""
    decodes: tuple[Chunk, ...] = ()
    """In the order of admission."""
    chunks: tuple[Chunk, ...] = ()
    """Prompts, in the order of the scheduling policy. The first chunk of an admitted prompt starts where its
    cached prefix ends."""
    admitted: tuple[RequestId, ...] = ()
    """Sequences that leave the queue in this step. Each has a chunk."""
    preempted: tuple[RequestId, ...] = ()
    """Sequences that lose their blocks in this step."""
    left_out: tuple[tuple[RequestId, Reason], ...] = ()
    """Every running sequence without a token, and the waiting sequences that were examined, with reasons."""
    queue_reason: Reason | None = None
    """Why all other waiting sequences wait. None if there are none."""
    num_not_examined: int = 0
    """The number of these other waiting sequences."""
    token_budget: int = 0
    """The size of the step in tokens, decodes included, if all its prompts were at position 0."""
    limited_by: LimitedBy = LimitedBy.TOKENS
    """The limit of its prompt tokens."""
    target: float | None = None
    """The most seconds that it should take. None if none of its decodes has a target."""
    margin: float = 1.0
    """`predicted` times the margin holds for almost every step. The target is compared with that product."""
    cost: StepCost | None = None
    """The prices that it was decided with, if the budget knows them."""

    @property
    def runs(self) -> tuple[Chunk, ...]:
        """Everything that runs, in the order of the batch: decodes first."""
        return self.decodes + self.chunks

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.length for chunk in self.chunks])

    @cached_property
    def shape(self) -> StepShape:
        """Everything that its time depends on."""
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
        """The predicted seconds. None without prices."""
        return None if self.cost is None else self.cost.seconds(self.shape)

    @cached_property
    def reasons(self) -> dict[RequestId, Reason]:
        """`left_out` as a dict. For a waiting sequence that it does not contain, the reason is
        `queue_reason`."""
        return dict(self.left_out)
