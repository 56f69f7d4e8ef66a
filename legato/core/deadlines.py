"""The deadlines of requests, soonest first."""

import heapq
from collections.abc import Callable

from legato.core.request import RequestId

Entry = tuple[float, int, RequestId]
"""The deadline, then the `arrival_index` and the id of its sequence. The index tells reused ids apart."""


class Deadlines:
    """A heap. Requests that ended stay in it until their deadline passes, or until there are too many of
    them."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)

    def pop_passed(self, now: float) -> list[Entry]:
        """Remove the deadlines that have passed, and return them."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap))
        return passed

    def compact(self, num_alive: int, is_alive: Callable[[Entry], bool]) -> None:
        """Remove the entries of requests that ended, if there are more of them than of the others."""
        if len(self._heap) > 2 * num_alive + 64:
            self._heap = [entry for entry in self._heap if is_alive(entry)]
            heapq.heapify(self._heap)
