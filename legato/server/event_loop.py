"""The server's event loop: one turn serves only so many sockets, and the length of turns is measured.

A turn is what the loop does between two looks at its sockets. No stream gets a token while a turn lasts, so
the length of the longest turn is the longest delay that the event loop itself adds to a token.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_S = 0.005
"""How long a turn may have lasted before tasks that have more to do leave the rest for the next one."""
MAX_SOCKETS = 4
"""Sockets that one turn serves. A request costs about a millisecond of processor time until it is queued, and
up to ten milliseconds of a turn while the steps use every core. Without a limit, 2,000 requests that come at
once would be one turn of seconds."""


class Turns:
    """How long turns took, in seconds. Written by the event loop's thread, read by any."""

    __slots__ = ("began", "busy", "longest")

    def __init__(self) -> None:
        self.busy = 0.0
        """All turns together."""
        self.longest = 0.0

        self.began = 0.0
        """When the turn in progress began."""

    @property
    def is_long(self) -> bool:
        """Whether the turn in progress has lasted so long that what can wait should wait for the next one."""
        return time.monotonic() - self.began > SLICE_S

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
    """Tells `turns` the time between two calls of `select`, and limits what a call returns."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._first = 0

    def select(self, timeout: float | None = None) -> Ready:
        self._turns.end()
        ready = super().select(timeout)
        if len(ready) > MAX_SOCKETS:
            # The sockets that are left out are still ready at the next call. The start moves on, so that a
            # socket which is always ready cannot keep the others out.
            self._first = (self._first + MAX_SOCKETS) % len(ready)
            ready = (ready[self._first :] + ready[: self._first])[:MAX_SOCKETS]
        self._turns.start()
        return ready


def run(main: Coroutine[Any, Any, T], turns: Turns) -> T:
    """`asyncio.run` with an event loop that tells `turns` how long its turns take."""

    def new_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(TurnSelector(turns))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
