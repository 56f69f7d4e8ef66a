"""One stream of tokens computed for a request: how much of it is known, how much is computed, its blocks.

The scheduler's whole task is to let `num_computed` catch up with `num_known`. A token joins `tokens` when
it is sampled, so a sequence that caught up has one token to compute again: that is a decode.
"""

from dataclasses import dataclass, field

from legato.core.lifecycle import Move, Status, after
from legato.core.plan import SampleRow
from legato.core.request import Request, RequestId


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, and changed by the scheduler alone.

    tokens   [0 ............... num_prompt ........ num_known)
    computed [0 ......... num_computed)
    blocks   enough for num_known positions while running, none otherwise
    """

    request: Request
    tokens: list[int] = field(repr=False)
    """The prompt, then every token generated so far. Survives preemption."""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Positions whose K and V are in `blocks`."""
    status: Status = Status.WAITING
    num_preemptions: int = 0

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        return cls(request, list(request.prompt))

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

    def move(self, move: Move) -> None:
        """Change the status along the table of `lifecycle`."""
        self.status = after(self.status, move)

    def sample_row(self, seq: int) -> SampleRow:
        """The draw of its next token, as row `seq` of a batch."""
        params = self.request.params
        if not params.needs_history:
            return SampleRow(seq, self.id, params, self.num_generated)
        prompt = self.request.prompt
        return SampleRow(seq, self.id, params, self.num_generated, prompt, tuple(self.tokens[len(prompt) :]))
