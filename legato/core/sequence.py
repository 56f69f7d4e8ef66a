"""One stream of tokens that is computed for a request: its known tokens, its computed tokens, its blocks.

The scheduler lets `num_computed` catch up with `num_known`. A sampled token is appended to `tokens`, so a
sequence that has caught up has one token to compute again. Computing that token is a decode.
"""

from dataclasses import dataclass, field

from legato.core.lifecycle import Status, Transition, next_status
from legato.core.prefix_index import Digest
from legato.core.request import Request, RequestId
from legato.sampling_params import Matcher


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable. Only the scheduler changes it.

    tokens       [0 ............... num_prompt ........ num_known)
    computed     [0 ......... num_computed)
    block_table  enough blocks for num_known positions while running, empty otherwise
    chain        the root, then the digest of each full block of the prompt and of each computed block
    """

    request: Request
    arrival_index: int
    """The number of sequences that arrived before this one."""
    chain: list[Digest] = field(repr=False)
    """The digests of its blocks (see `prefix_index`)."""
    guaranteed: bool
    """Whether it is never preempted once it runs (see `admission`)."""
    arrival_step: int
    """The number of steps that were committed when it arrived."""
    arrival_virtual_time: float
    """The scheduler's virtual time when it arrived."""
    num_uncached_at_arrival: int = 0
    """Prompt tokens that were not in the prefix cache when it arrived."""
    tokens: list[int] = field(init=False, repr=False)
    """The prompt, followed by every generated token. A preemption does not change it."""
    matcher: Matcher | None = field(init=False, repr=False)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Positions whose K and V are in `block_table`."""
    status: Status = Status.WAITING
    num_preemptions: int = 0
    num_overtaken: int = 0
    """How many later arrivals were admitted while this one was first in the queue and found no room."""
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache when it was first admitted."""
    num_unscored: int = field(init=False)
    """Prompt tokens whose log-probabilities were asked for and not returned yet. The first token has none."""
    last_step: int = 0
    """The last step in which it was admitted or got a chunk."""
    max_computed: int = field(init=False)
    """A copy of `Request.max_computed`."""
    needs_tokens: bool = field(init=False)
    """Whether sampling its next token depends on the tokens before it."""

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
    def num_remaining(self) -> int:
        """Known tokens that are not computed yet: 1 for a decode, more for a prompt."""
        return len(self.tokens) - self.num_computed

    @property
    def num_cacheable(self) -> int:
        """How many of its first tokens may be taken from the prefix cache: those whose logits nobody
        needs."""
        if self.num_unscored:
            return len(self.request.prompt) - 1 - self.num_unscored
        return len(self.tokens) - 1

    def needs_block(self, block_size: int) -> bool:
        """Whether its known tokens do not fit in its blocks."""
        return len(self.tokens) > len(self.block_table) * block_size

    def scored_positions(self, start: int, end: int) -> range:
        """The positions in start .. end whose logits score the next prompt token."""
        last = len(self.request.prompt) - 1
        return range(max(start, last - self.num_unscored), min(end, last))

    def apply(self, transition: Transition) -> None:
        """Change the status according to the table in `lifecycle`."""
        self.status = next_status(self.status, transition)
