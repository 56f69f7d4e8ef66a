"""A runner without a model, whose results can be computed by hand. Tests, simulations and client developers
use it.

Its KV cache contains the token ids themselves, and is written and read through the block tables. A read
returns a number: the sum of all token ids up to the position, plus the position. By default the next token
is that number modulo the size of the vocabulary:

    vocabulary 100, prompt (5, 7): the last position is 1, so the first token is (5 + 7) + 1 = 13,
    then (5 + 7 + 13) + 2 = 27, then (5 + 7 + 13 + 27) + 3 = 55.

A prompt token has the log-probability 0 if the runner would have sampled it there, and -1 otherwise.

A chunk at a wrong position, a wrong block table or a block that was released too early changes the result.

With a constraint, it samples the next allowed token. After the last token the search continues at the first.
"""

import time
from collections.abc import Callable, Iterator

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import (
    ForwardSeq,
    SampleRow,
    SamplingFailure,
    ScoreRows,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from legato.errors import ConstraintError


class FakeRunner:
    """`step_seconds(plan)` is how long the runner sleeps in a step. `choose(number, row)` returns the token
    to sample from the number that was read."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        step_seconds: Callable[[StepPlan], float] = lambda _: 0.0,
        sleep: Callable[[float], None] = time.sleep,
        choose: Callable[[int, SampleRow], int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._sleep = sleep
        self._choose = choose or (lambda number, _: number % vocab_size)
        self._cache = [[0] * block_size for _ in range(num_blocks)]
        self._totals = [0] * num_blocks
        """The sum of each block's ids, so that a long context is read block by block."""

    def run(self, plan: StepPlan) -> StepResult:
        seqs = plan.batch.seqs
        for seq in seqs:
            self._write(seq)
        seconds = self._step_seconds(plan)
        if seconds > 0:
            self._sleep(seconds)
        sampled = tuple(self._sample(seqs[row.seq], row) for row in plan.sample)
        scored = {rows.request_id: tuple(self._score(seqs[rows.seq], rows)) for rows in plan.score}
        return StepResult(sampled, seconds, scored)

    def _write(self, seq: ForwardSeq) -> None:
        done, size = 0, self.block_size
        while done < len(seq.tokens):
            block, slot = seq.block_table[(seq.start + done) // size], (seq.start + done) % size
            tokens, cells = seq.tokens[done : done + size - slot], self._cache[block]
            self._totals[block] += sum(tokens) - sum(cells[slot : slot + len(tokens)])
            cells[slot : slot + len(tokens)] = tokens
            done += len(tokens)

    def _sample(self, seq: ForwardSeq, row: SampleRow) -> TokenLogprobs | SamplingFailure:
        token = self._choose(self._read(seq, seq.end), row)
        try:
            allowed = row.allowed()
        except ConstraintError as error:
            return SamplingFailure(FinishReason.CONSTRAINT, error.message)
        if allowed is not None:
            token = next_allowed(token, allowed)
        if row.params.logprobs is None:
            return TokenLogprobs(token)
        return TokenLogprobs(token, 0.0, ((token, 0.0),) if row.params.logprobs else ())

    def _score(self, seq: ForwardSeq, rows: ScoreRows) -> Iterator[TokenLogprobs]:
        for end, target in enumerate(rows.targets, seq.start + rows.first + 1):
            token = self._read(seq, end) % self.vocab_size
            top = ((token, 0.0),) if rows.num_top else ()
            yield TokenLogprobs(target, -float(target != token), top, 1 + (target != token))

    def _read(self, seq: ForwardSeq, end: int) -> int:
        """The sum of all ids before position `end`, plus the last position."""
        num_full, rest = divmod(end, self.block_size)
        total = sum(map(self._totals.__getitem__, seq.block_table[:num_full]))
        return total + sum(self._cache[seq.block_table[num_full]][:rest] if rest else ()) + end - 1


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The token that a `FakeRunner` puts after `tokens`."""
    return (sum(tokens) + len(tokens) - 1) % vocab_size


def next_allowed(token: int, allowed: bytes) -> int:
    """The first token from `token` on that `allowed` (see `Matcher.mask`) has; after the last comes 0."""
    size = 8 * len(allowed)
    return next(t for t in (i % size for i in range(token, token + size)) if allowed[t // 8] >> t % 8 & 1)
