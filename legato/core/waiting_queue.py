"""The waiting sequences, sorted by the scheduling policy."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from legato.core.request import RequestId
from legato.core.scheduling_policy import Key, SchedulingPolicy
from legato.core.sequence import Sequence


class WaitingQueue(Mapping[RequestId, Sequence]):
    """A map from request ids to sequences, in the order of the policy. Adding and removing use a binary
    search."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._sorted: list[tuple[Key, Sequence]] = []
        self._by_id: dict[RequestId, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        insort(self._sorted, (self._policy.key(sequence), sequence))
        self._by_id[sequence.id] = sequence

    def remove(self, request_id: RequestId) -> Sequence:
        """Raises KeyError if the request does not wait."""
        del self._sorted[self.position(request_id)]
        return self._by_id.pop(request_id)

    def position(self, request_id: RequestId) -> int:
        """The number of sequences ahead. Raises KeyError if the request does not wait."""
        return bisect_left(self._sorted, (self._policy.key(self._by_id[request_id]),))

    def head(self, num: int) -> list[tuple[Key, Sequence]]:
        """The first `num` sequences with their keys, or all if there are fewer."""
        return self._sorted[:num]

    def __getitem__(self, request_id: RequestId) -> Sequence:
        return self._by_id[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[RequestId]:
        return (sequence.id for _, sequence in self._sorted)
