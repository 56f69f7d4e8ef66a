"""One stream of tokens computed for a request: how much of it is known, how much is computed, its blocks.

The scheduler's whole task is to let `num_computed` catch up with `num_known`. A token joins `tokens` when
it is sampled, so a sequence that caught up has one token to compute again: that is a decode.
"""

from dataclasses import dataclass, field

from legato.core.lifecycle import Move, Status, after
from legato.core.plan import SampleRow, ScoreRows
from legato.core.prefix_index import Digest
from legato.core.request import Matcher, Request, RequestId


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, and changed by the scheduler alone.

    tokens   [0 ............... num_prompt ........ num_known)
    computed [0 ......... num_computed)
    blocks   enough for num_known positions while running, none otherwise
    chain    the root, then the digest of each full block of the prompt and of each block that was computed
    """

    request: Request
    number: int
    """How many came before it."""
    chain: list[Digest] = field(repr=False)
    """What its blocks are known for (see `prefix_index`)."""
    guaranteed: bool
    """Never preempted once it runs (see `admission`)."""
    entry_step: int
    """Steps that were committed when it came."""
    entry_time: float
    """The scheduler's virtual time when it came."""
    size: int = 0
    """Tokens of the prompt that were not in the cache when it came."""
    tokens: list[int] = field(init=False, repr=False)
    """The prompt, then every token generated so far. Survives preemption."""
    matcher: Matcher | None = field(init=False, repr=False)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Positions whose K and V are in `blocks`."""
    status: Status = Status.WAITING
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Later ones that were admitted while it was the first of the queue and found no room to start."""
    num_cached: int = 0
    """Prompt tokens that were found computed when it was first admitted."""
    num_unscored: int = field(init=False)
    """Prompt tokens whose log-probabilities are asked for and not given yet; the first token has none."""
    last_step: int = 0
    """The last step in which it was admitted or got a chunk."""
    max_computed: int = field(init=False)
    """As `Request.max_computed`."""
    needs_tokens: bool = field(init=False)
    """Whether the draw of its next token looks at those before."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        constraint = self.request.params.constraint
        self.matcher = None if constraint is None else constraint.matcher()
        scores = self.request.params.prompt_logprobs is not None
        self.num_unscored = len(self.tokens) - 1 if scores else 0
        self.max_computed = self.request.max_computed
        self.needs_tokens = self.request.params.needs_history or self.matcher is not None

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Known tokens still to compute: 1 for a decode, more for a prompt."""
        return len(self.tokens) - self.num_computed

    @property
    def num_cacheable(self) -> int:
        """As many of its first tokens as may come out of the cache: nobody needs their logits (any more)."""
        if self.num_unscored:
            return len(self.request.prompt) - 1 - self.num_unscored
        return len(self.tokens) - 1

    def move(self, move: Move) -> None:
        """Change the status along the table of `lifecycle`."""
        self.status = after(self.status, move)

    def sample_row(self, seq: int) -> SampleRow:
        """The draw of its next token, as row `seq` of a batch."""
        request = self.request
        num_generated = len(self.tokens) - len(request.prompt)
        if not self.needs_tokens:
            return SampleRow(seq, request.id, request.params, num_generated)
        prompt = request.prompt if request.params.needs_history else ()
        generated = tuple(self.tokens[len(request.prompt) :])
        return SampleRow(seq, request.id, request.params, num_generated, prompt, generated, self.matcher)

    def scored(self, start: int, end: int) -> range:
        """The positions from `start` to `end` whose logits score the prompt's next token."""
        last = len(self.request.prompt) - 1
        return range(max(start, last - self.num_unscored), min(end, last))

    def score_rows(self, seq: int, start: int, end: int) -> ScoreRows:
        """Those positions, of row `seq` of a batch."""
        scored, num_top = self.scored(start, end), self.request.params.prompt_logprobs
        assert num_top is not None
        targets = self.request.prompt[scored.start + 1 : scored.stop + 1]
        return ScoreRows(seq, self.id, scored.start - start, targets, num_top)
