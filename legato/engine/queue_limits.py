"""Limits on waiting requests: how many may wait, how many prompt tokens, and for how long.

The object is used in one event loop's thread. It learns what runs from an `EngineLoad`, which is read at
each check.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from legato.errors import QueueFullError, RequestError

RATE_OVER = 64
"""The rate of the queue is measured over this many of the last requests."""
MIN_RATE_SAMPLES = 8
"""A wait is predicted from at least this many of them."""
MAX_RETRY_S = 600


class EngineLoad(NamedTuple):
    """The current load of an engine."""

    num_running: int
    """Running sequences."""
    max_running: int
    is_backlogged: bool
    """Whether sequences wait that the last step could not admit."""
    prompt_token_seconds: float | None
    """The predicted seconds of one prompt token. None if the engine does not predict its steps."""


@dataclass(slots=True)
class Reservation:
    """The unused part of the room that was reserved for replies that belong together."""

    num_replies: int
    num_tokens: int
    """Prompt tokens."""


class QueueLimits:
    """Counts the open replies and their prompt tokens, and refuses requests above the limits.

    A reply is open from its submission to its end. Open replies that do not run are the queue. Its prompt
    tokens are those of open replies without a first token.
    """

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        clock: Callable[[], float],
        *,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        max_wait: float = math.inf,
    ) -> None:
        """`max_waiting` limits the replies that wait, `max_waiting_tokens` their prompt tokens, and
        `max_wait` the predicted seconds until all of them have their first tokens. None sets no limit."""
        self._load = load
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_wait = max_wait
        self._num_open = 0
        self._num_tokens = 0
        self._reserved = Reservation(0, 0)
        """The sum of all reservations."""
        self._ended_at: deque[float] = deque(maxlen=RATE_OVER)
        """When the last replies ended, aborts excluded, since the queue was last empty."""
        self._first_tokens: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)
        """When the last prompts got their first token, and how many tokens they had, since then."""

    @property
    def num_reserved(self) -> int:
        """Replies that are reserved and not submitted yet."""
        return self._reserved.num_replies

    def check(self, num_replies: int, num_tokens: int) -> None:
        """Check that further replies with `num_tokens` prompt tokens may wait.

        Raises `RequestError` for more replies than can ever run and wait, and `QueueFullError` if there is
        no room now.
        """
        load = self._load()
        num_waiting = self._num_open + self._reserved.num_replies - load.num_running
        if num_waiting <= 0:  # Replies that end while the queue is empty do not tell how fast it moves.
            self._ended_at.clear()
            self._first_tokens.clear()
        if self._max_waiting is not None:
            self._check_replies(num_replies, num_waiting, load, self._max_waiting)
        self._check_tokens(num_tokens, num_waiting)
        if num_waiting > 0 and (wait := self.predicted_wait(num_waiting)) > self._max_wait:
            raise QueueFullError(
                f"the predicted wait is {wait:.0f} s, at most {self._max_wait:g} s is possible",
                retry_after_s=min(max(math.ceil(wait - self._max_wait), 1), MAX_RETRY_S),
            )

    @contextmanager
    def reserve(self, num_replies: int, num_tokens: int) -> Iterator[Reservation]:
        """Reserve room within the block. What is not used is released at its end. Raises as `check` does."""
        self.check(num_replies, num_tokens)
        reservation = Reservation(num_replies, num_tokens)
        self._reserved.num_replies += num_replies
        self._reserved.num_tokens += num_tokens
        try:
            yield reservation
        finally:
            self.use(reservation, reservation.num_replies, reservation.num_tokens)

    def widen(self, reservation: Reservation, num_tokens: int) -> None:
        """Reserve further prompt tokens. Raises `QueueFullError` if there is no room."""
        self._check_tokens(num_tokens, 1)
        reservation.num_tokens += num_tokens
        self._reserved.num_tokens += num_tokens

    def use(self, reservation: Reservation, num_replies: int, num_tokens: int) -> None:
        """Take replies and tokens out of a reservation."""
        for counter in (reservation, self._reserved):
            counter.num_replies -= num_replies
            counter.num_tokens -= num_tokens

    def opened(self, num_tokens: int) -> None:
        """A reply to a prompt of `num_tokens` tokens was submitted."""
        self._num_open += 1
        self._num_tokens += num_tokens

    def first_token(self, num_tokens: int) -> None:
        """A reply got its first token."""
        self._first_tokens.append((self._clock(), num_tokens))
        self._num_tokens -= num_tokens

    def closed(self, num_tokens: int, *, was_aborted: bool) -> None:
        """A reply ended. `num_tokens` are its prompt tokens if it had no first token, otherwise 0."""
        self._num_open -= 1
        self._num_tokens -= num_tokens
        if not was_aborted:
            self._ended_at.append(self._clock())

    def predicted_wait(self, num_waiting: int) -> float:
        """The predicted seconds until the `num_waiting` replies of the queue have their first tokens.

        It is the slower of two rates: that of prompt tokens and that of replies, over the last ones. Before
        there are enough of them, the predicted time of a prompt token is used.
        """
        now, num_tokens = self._clock(), self._num_tokens + self._reserved.num_tokens
        waits = [0.0]
        if len(self._first_tokens) >= MIN_RATE_SAMPLES:
            began, _ = self._first_tokens[0]
            num_done = sum(num for _, num in list(self._first_tokens)[1:])
            waits.append(num_tokens * (now - began) / num_done)
        elif (seconds := self._load().prompt_token_seconds) is not None:
            waits.append(num_tokens * seconds)
        if len(self._ended_at) >= MIN_RATE_SAMPLES:
            waits.append(num_waiting * (now - self._ended_at[0]) / len(self._ended_at))
        return max(waits)

    def seconds_to_drain(self, num_waiting: int) -> int:
        """Seconds until `num_waiting` replies have left the queue, at the rate of the last ones that
        ended."""
        if not self._ended_at:
            return 1
        elapsed = self._clock() - self._ended_at[0]
        return min(max(math.ceil(num_waiting * elapsed / len(self._ended_at)), 1), MAX_RETRY_S)

    def _check_tokens(self, num_tokens: int, num_waiting: int) -> None:
        limit = self._max_waiting_tokens
        waiting = self._num_tokens + self._reserved.num_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise QueueFullError(
                f"{waiting} prompt tokens wait and the request has {num_tokens} more, at most {limit} may",
                retry_after_s=self.seconds_to_drain(max(num_waiting, 1)),
            )

    def _check_replies(self, num_replies: int, num_waiting: int, load: EngineLoad, max_waiting: int) -> None:
        if num_replies > load.max_running + max_waiting:
            raise RequestError(
                f"the request asks for {num_replies} replies; at most {load.max_running} may run and "
                f"{max_waiting} wait",
                param="n",
            )
        # Unless the scheduler has a backlog, free running slots are room as well.
        num_free = 0 if load.is_backlogged else load.max_running - load.num_running
        if num_waiting + num_replies > num_free + max_waiting:
            more = f"; the request asks for {num_replies} replies" if num_replies > 1 else ""
            raise QueueFullError(
                f"{num_waiting} requests wait, at most {max_waiting} may{more}",
                retry_after_s=self.seconds_to_drain(num_waiting),
            )
