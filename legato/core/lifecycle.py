"""The life of a sequence as a table: few states, every legal move one line of data.

How far a sequence has got is a number (`Sequence.num_computed`), never a state: there is no prefill state
and no decode state.
"""

from enum import Enum


class Status(Enum):
    WAITING = "waiting"
    """In the queue, never ran; holds no blocks."""
    RUNNING = "running"
    """Holds blocks and takes part in steps."""
    PREEMPTED = "preempted"
    """Back in the queue, ahead of those that never ran; holds no blocks, keeps what it generated."""
    FINISHED = "finished"
    """Answered. Final."""


class Move(Enum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    """By its own rule: a stop token or its length."""
    ABORT = "abort"
    """From outside: the client left, a stop string was found in the text, or the deadline passed."""
    FAIL = "fail"
    """The step that it was in failed."""


TRANSITIONS: dict[Status, dict[Move, Status]] = {
    Status.WAITING: {Move.ADMIT: Status.RUNNING, Move.ABORT: Status.FINISHED},
    Status.RUNNING: {
        Move.PREEMPT: Status.PREEMPTED,
        Move.FINISH: Status.FINISHED,
        Move.ABORT: Status.FINISHED,
        Move.FAIL: Status.FINISHED,
    },
    Status.PREEMPTED: {Move.ADMIT: Status.RUNNING, Move.ABORT: Status.FINISHED},
    Status.FINISHED: {},
}


class IllegalMoveError(RuntimeError):
    """A bug of ours: the table has no such move. The state is left as it was."""


def after(status: Status, move: Move) -> Status:
    """The status that `move` leads to; raises `IllegalMoveError` if the table has no such line."""
    try:
        return TRANSITIONS[status][move]
    except KeyError:
        raise IllegalMoveError(f"a {status.value} sequence cannot {move.value}") from None
