"""The messages between engine and runner: the integers of one step, and its result.

A mixed batch has one `ForwardSeq` for each decode and each chunk. The two differ only in length: both write
`tokens` at positions `start, start + 1, ..` of the blocks in `block_table`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.cost.step_cost import StepShape, shape_of
from legato.sampling_params import Matcher, SamplingParams


class ForwardSeq(NamedTuple):
    """A run of consecutive positions of one sequence."""

    request_id: RequestId
    tokens: tuple[int, ...]
    """The tokens at positions start .. start + len(tokens)."""
    start: int
    """The absolute position of the first token. All positions before it were computed in earlier steps."""
    block_table: tuple[int, ...]
    """Position p is in block `block_table[p // block_size]`, at offset `p % block_size`."""

    @property
    def end(self) -> int:
        """The number of positions in the KV cache after this step."""
        return self.start + len(self.tokens)

    def __repr__(self) -> str:
        """Omits the tokens, so that prompts do not get into logs."""
        return f"ForwardSeq({self.request_id!r}, {self.start}..{self.end}, block_table={self.block_table})"


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The sequences of one step, decodes first."""

    seqs: tuple[ForwardSeq, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(seq.tokens) for seq in self.seqs)


class SampleRow(NamedTuple):
    """One token to sample, from the logits of the last position of `batch.seqs[seq]`."""

    seq: int
    request_id: RequestId
    params: SamplingParams
    num_generated: int
    """The number of tokens generated so far, which is the index of this draw in the request's random
    stream."""
    prompt: tuple[int, ...] = ()
    """The prompt's ids. Empty unless `params.needs_history`."""
    generated: tuple[int, ...] = ()
    """The reply's ids so far. Empty unless `params.needs_history` or there is a matcher."""
    matcher: Matcher | None = None
    """Set if the reply has a constraint."""

    def allowed(self) -> bytes | None:
        """The tokens that may be sampled, in the form of `Matcher.mask`. None allows all.

        Stop tokens are not allowed before `min_tokens`, unless the constraint allows nothing else. Raises
        `ConstraintError`.
        """
        if self.matcher is None:
            return None
        mask = self.matcher.mask(self.generated)
        if self.num_generated >= self.params.min_tokens:
            return mask
        without_stop = bytearray(mask)
        for token in self.params.stop_token_ids:
            if token // 8 < len(without_stop):
                without_stop[token // 8] &= ~(1 << token % 8)
        return bytes(without_stop) if any(without_stop) else mask

    def __repr__(self) -> str:
        """Omits the tokens, so that prompts do not get into logs."""
        return f"SampleRow({self.seq}, {self.request_id!r}, {self.params}, {self.num_generated})"


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Consecutive positions of `batch.seqs[seq]` whose logits give log-probabilities of prompt tokens."""

    seq: int
    request_id: RequestId
    first: int
    """The first of these positions, relative to `batch.seqs[seq].start`."""
    targets: tuple[int, ...] = field(repr=False)
    """For each position, the prompt token that follows it."""
    num_top: int
    """The number of most likely tokens that are returned as well."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of a runner in one step.

    It stores K and V of every token in `batch`, samples one token for each row of `sample`, and computes the
    log-probabilities of the prompt tokens in `score`.
    """

    batch: ForwardBatch
    sample: tuple[SampleRow, ...]
    score: tuple[ScoreRows, ...] = ()

    @property
    def shape(self) -> StepShape:
        """Everything that the time of the step depends on."""
        sampled = {row.seq for row in self.sample}
        seqs = self.batch.seqs
        shape = shape_of((seq.start, len(seq.tokens), i in sampled) for i, seq in enumerate(seqs))
        return shape._replace(num_scored=sum(len(rows.targets) for rows in self.score))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of a reply or of a prompt, with log-probabilities if they were asked for.

    Log-probabilities are natural logarithms. They are those of the model's own distribution, before
    penalties, temperature and truncation, as in OpenAI's API and vLLM.
    """

    token: int
    logprob: float | None = None
    """The log-probability of `token`, or None if it was not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids with their log-probabilities, best first."""
    rank: int | None = None
    """1 + the number of ids that are more likely than `token`. Only set for prompt tokens."""


class SamplingFailure(NamedTuple):
    """Why no token could be sampled for one row. Only the request of this row ends."""

    reason: FinishReason
    """CONSTRAINT: the constraint allows no token. ERROR: the logits allow no choice."""
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a `StepPlan`."""

    sampled: tuple[TokenLogprobs | SamplingFailure, ...]
    """`sampled[i]` belongs to `plan.sample[i]`."""
    elapsed: float
    """The measured seconds of the step."""
    scored: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For the request of each element of `plan.score`: its targets with their log-probabilities."""
