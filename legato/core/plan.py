"""From a committed `Schedule` to a `StepPlan`: the integers that a runner needs, and nothing else.

A mixed batch is one `ForwardSeq` per decode and one per chunk. There is no difference between the two but
their length: both put `tokens` at positions `start, start + 1, ..` of the blocks in `blocks`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from legato.core.cost import StepShape, shape_of
from legato.core.request import Matcher, RequestId, SamplingParams
from legato.core.stopping import FinishReason

if TYPE_CHECKING:
    from legato.core.schedule import Schedule
    from legato.core.scheduler import Scheduler


class ForwardSeq(NamedTuple):
    """A run of consecutive positions of one sequence."""

    request_id: RequestId
    tokens: tuple[int, ...]
    """The token at each position start .. start + len(tokens)."""
    start: int
    """Absolute position of the first token = positions computed before this step."""
    blocks: tuple[int, ...]
    """Block table: position p lives in block `blocks[p // block_size]`, at `p % block_size`."""

    @property
    def end(self) -> int:
        """Positions known to the cache after this step."""
        return self.start + len(self.tokens)

    def __repr__(self) -> str:
        """Without the tokens: prompts do not belong in logs."""
        return f"ForwardSeq({self.request_id!r}, {self.start}..{self.end}, blocks={self.blocks})"


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's sequences, decodes first."""

    seqs: tuple[ForwardSeq, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(seq.tokens) for seq in self.seqs)


class SampleRow(NamedTuple):
    """One token to draw, from the logits of the last position of `batch.seqs[seq]`."""

    seq: int
    request_id: RequestId
    params: SamplingParams
    num_generated: int
    """Tokens generated so far = the index of this draw in the request's random stream."""
    prompt: tuple[int, ...] = ()
    """The prompt's ids, only if `params.needs_history`."""
    generated: tuple[int, ...] = ()
    """The reply's ids so far, only if `params.needs_history` or there is a matcher."""
    matcher: Matcher | None = None
    """Of the reply, if it has a constraint."""

    def allowed(self) -> bytes | None:
        """The tokens to draw from, as `Matcher.mask` has them, None for all; raises `ConstraintError`.

        Without stop tokens before `min_tokens`, unless nothing else may come.
        """
        if self.matcher is None:
            return None
        mask = self.matcher.mask(self.generated)
        if self.num_generated >= self.params.min_tokens:
            return mask
        going_on = bytearray(mask)
        for token in self.params.stop_token_ids:
            if token // 8 < len(going_on):
                going_on[token // 8] &= ~(1 << token % 8)
        return bytes(going_on) if any(going_on) else mask

    def __repr__(self) -> str:
        """Without the tokens."""
        return f"SampleRow({self.seq}, {self.request_id!r}, {self.params}, {self.num_generated})"


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Consecutive positions of `batch.seqs[seq]` whose logits tell how likely the prompt's next ids are."""

    seq: int
    request_id: RequestId
    first: int
    """The first of them, counted within the step's run of the sequence."""
    targets: tuple[int, ...] = field(repr=False)
    """For each position the id that follows it in the prompt."""
    num_top: int
    """How many of the most likely ids are wanted as well."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a runner computes in one step: K, V of every token in `batch`, one token per row of `sample`, and
    the log-probabilities of prompt tokens that `score` asks for."""

    batch: ForwardBatch
    sample: tuple[SampleRow, ...]
    score: tuple[ScoreRows, ...] = ()

    @property
    def shape(self) -> StepShape:
        """What its time depends on."""
        sampled = {row.seq for row in self.sample}
        seqs = self.batch.seqs
        shape = shape_of((seq.start, len(seq.tokens), i in sampled) for i, seq in enumerate(seqs))
        return shape._replace(num_scored=sum(len(rows.targets) for rows in self.score))


class Fault(NamedTuple):
    """Why no token could be drawn: the request ends, and no other of its step."""

    reason: FinishReason
    """CONSTRAINT: the form that it asked for cannot go on. ERROR: the logits allow no choice."""
    message: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token, drawn or of a prompt. Log-probabilities are natural and of the model's own distribution,
    before penalties, temperature and truncation (as OpenAI and vLLM return them)."""

    token: int
    logprob: float | None = None
    """Of `token`; None unless `params.logprobs` asked for it."""
    top: tuple[tuple[int, float], ...] = ()
    """The `params.logprobs` most likely ids with their log-probabilities, best first."""
    rank: int | None = None
    """1 + the number of ids that were more likely; only of a prompt's token."""
    fault: Fault | None = None
    """`token` means nothing then."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a `StepPlan`: `sampled[i]` belongs to `plan.sample[i]`."""

    sampled: tuple[Sampled, ...]
    elapsed: float
    """Measured seconds of the step."""
    scored: Mapping[RequestId, tuple[Sampled, ...]] = field(default_factory=dict)
    """By the request of each of `plan.score`: its targets with their log-probabilities."""


def plan(scheduler: "Scheduler", schedule: "Schedule") -> StepPlan:
    """Build the mixed batch of a schedule that was just committed.

    A decode is its sequence's newest token at position n - 1. A chunk is its tokens at start. The sampled
    rows are every decode and each chunk whose `last` flag says that it reaches the end of its sequence; a
    middle chunk's logits would predict a token that the prompt already has: not computed unless asked for.
    """
    seqs: list[ForwardSeq] = []
    sample: list[SampleRow] = []
    score: list[ScoreRows] = []
    for number, (request_id, start, length, last, _) in enumerate(schedule.runs):
        sequence, end = scheduler.running[request_id], start + length
        if last:
            sample.append(sequence.sample_row(number))
        if sequence.num_unscored and (rows := sequence.score_rows(number, start, end)).targets:
            score.append(rows)
        tokens = tuple(sequence.tokens[start:end])
        seqs.append(ForwardSeq(request_id, tokens, start, tuple(sequence.blocks)))
    return StepPlan(ForwardBatch(tuple(seqs)), tuple(sample), tuple(score))
