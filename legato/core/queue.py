"""The waiting sequences, sorted by an order. Entering and leaving cost a binary search."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from legato.core.order import Key, Order
from legato.core.request import RequestId
from legato.core.sequence import Sequence


class Queue(Mapping[RequestId, Sequence]):
    """Request id -> sequence, first in the order first."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._sorted: list[tuple[Key, Sequence]] = []
        self._by_id: dict[RequestId, Sequence] = {}

    def enter(self, sequence: Sequence) -> None:
        insort(self._sorted, (self._order.key(sequence), sequence))
        self._by_id[sequence.id] = sequence

    def leave(self, request_id: RequestId) -> Sequence:
        """Raises KeyError if it does not wait."""
        del self._sorted[self.place(request_id)]
        return self._by_id.pop(request_id)

    def place(self, request_id: RequestId) -> int:
        """How many are before it. Raises KeyError if it does not wait."""
        return bisect_left(self._sorted, (self._order.key(self._by_id[request_id]),))

    def head(self, num: int) -> list[tuple[Key, Sequence]]:
        """The first `num` with their keys, or all if there are fewer."""
        return self._sorted[:num]

    def __getitem__(self, request_id: RequestId) -> Sequence:
        return self._by_id[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[RequestId]:
        return (sequence.id for _, sequence in self._sorted)
