"""The server's event loop: each turn serves a limited number of sockets, and the duration of turns is
measured.

A turn is the work between two calls of `select`. While a turn lasts, no stream gets a token. So the longest
turn is the longest delay that the event loop itself adds to a token.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MAX_SLICE_S = 0.005
"""Tasks with a backlog leave the rest for the next turn once a turn has lasted this long."""
MAX_SOCKETS = 4
"""The most sockets that one turn serves. A request takes about a millisecond of CPU time until it is queued,
and up to ten milliseconds while the engine uses every core. Without a limit, 2,000 simultaneous requests
would be one turn of several seconds."""


class Turns:
    """The duration of turns in seconds. The event loop's thread writes it, any thread may read it."""

    __slots__ = ("began", "busy", "longest")

    def __init__(self) -> None:
        self.busy = 0.0
        """The sum over all turns."""
        self.longest = 0.0

        self.began = 0.0
        """When the current turn began."""

    @property
    def is_long(self) -> bool:
        """Whether work that can wait should be left for the next turn."""
        return time.monotonic() - self.began > MAX_SLICE_S

    def start(self) -> None:
        self.began = time.monotonic()

    def end(self) -> None:
        if not self.began:
            return
        seconds = time.monotonic() - self.began
        self.busy += seconds
        if seconds > self.longest:
            self.longest = seconds


Ready = list[tuple[selectors.SelectorKey, int]]


class TurnSelector(selectors.DefaultSelector):
    """Measures the time between two calls of `select`, and limits what a call returns."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._first = 0

    def select(self, timeout: float | None = None) -> Ready:
        self._turns.end()
        ready = super().select(timeout)
        if len(ready) > MAX_SOCKETS:
            # The other sockets are still ready at the next call. The start rotates, so that sockets which are
            # always ready do not starve the others.
            self._first = (self._first + MAX_SOCKETS) % len(ready)
            ready = (ready[self._first :] + ready[: self._first])[:MAX_SOCKETS]
        self._turns.start()
        return ready


def run(main: Coroutine[Any, Any, T], turns: Turns) -> T:
    """`asyncio.run` with an event loop that records the duration of its turns in `turns`."""

    def new_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(TurnSelector(turns))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
