"""The states of a sequence and the transitions between them, as a table.

How far a sequence has got is a number (`Sequence.num_computed`) and not a state: there is no prefill state
and no decode state.
"""

from enum import Enum


class Status(Enum):
    WAITING = "waiting"
    """In the queue, and never ran. Holds no blocks."""
    RUNNING = "running"
    """Holds blocks and takes part in steps."""
    PREEMPTED = "preempted"
    """Back in the queue, ahead of sequences that never ran. Holds no blocks, keeps its generated tokens."""
    FINISHED = "finished"
    """Final."""


class Transition(Enum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    """A stop token, or the maximum length."""
    ABORT = "abort"
    """From outside: the client disconnected, a stop string was found in the text, or the deadline passed."""
    FAIL = "fail"
    """The step that the sequence was in failed."""


TRANSITIONS: dict[Status, dict[Transition, Status]] = {
    Status.WAITING: {Transition.ADMIT: Status.RUNNING, Transition.ABORT: Status.FINISHED},
    Status.RUNNING: {
        Transition.PREEMPT: Status.PREEMPTED,
        Transition.FINISH: Status.FINISHED,
        Transition.ABORT: Status.FINISHED,
        Transition.FAIL: Status.FINISHED,
    },
    Status.PREEMPTED: {Transition.ADMIT: Status.RUNNING, Transition.ABORT: Status.FINISHED},
    Status.FINISHED: {},
}


class FinishReason(Enum):
    """Why a request got its last event."""

    STOP = "stop"
    """A stop token, or a stop string in the text."""
    LENGTH = "length"
    """The reply has `max_tokens` tokens."""
    ABORT = "abort"
    """The client disconnected."""
    TIMEOUT = "timeout"
    """The deadline passed."""
    ERROR = "error"
    """The step that the request was in failed."""
    CONSTRAINT = "constraint"
    """The constraint allows no further token."""


class IllegalTransitionError(RuntimeError):
    """A bug in Legato: the table has no such transition. The state is unchanged."""


def next_status(status: Status, transition: Transition) -> Status:
    """The status after a transition. Raises `IllegalTransitionError` if the table does not allow it."""
    try:
        return TRANSITIONS[status][transition]
    except KeyError:
        raise IllegalTransitionError(f"a {status.value} sequence cannot {transition.value}") from None
