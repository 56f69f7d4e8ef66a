"""The engine's own thread: takes commands, runs steps while there is work, and delivers events.

This file only orders "take commands, step, deliver". It contains no policy, no text and no asyncio.
"""

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from legato.core.events import Event, FinishEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.engine.engine import Engine
from legato.errors import RequestError, UnavailableError

logger = logging.getLogger(__name__)

MAX_COMMANDS = 32
"""The most commands between two steps, so that thousands of simultaneous requests do not delay running
replies."""

Deliver = Callable[[tuple[Event, ...]], None]


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: RequestId
    reason: FinishReason


Command = Submit | Abort


class Inbox:
    """A queue of commands from any thread to the engine thread."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, command: Command) -> None:
        """Raises `UnavailableError` if the inbox is closed. A command that was accepted is never lost."""
        with self._changed:
            if self._is_closed:
                raise UnavailableError("the engine is shut down")
            self._commands.append(command)
            self._changed.notify()

    def take(self, *, wait: bool) -> tuple[Command, ...] | None:
        """The next commands, at most `MAX_COMMANDS`. None once the inbox is closed and empty.

        With `wait`, blocks until there is a command or the inbox is closed.
        """
        with self._changed:
            while wait and not self._commands and not self._is_closed:
                self._changed.wait()
            taken = tuple(self._commands.popleft() for _ in range(min(len(self._commands), MAX_COMMANDS)))
            return None if self._is_closed and not taken else taken

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class EngineLoop:
    """Runs an engine in a thread. Calls `deliver` in that thread with the events of each iteration."""

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self._engine = engine
        self._deliver = deliver
        self._inbox = Inbox()
        self._open: set[RequestId] = set()
        """Requests whose last event has not been delivered."""
        self._thread = threading.Thread(target=self._run, name="legato-engine", daemon=True)
        self.failure: str | None = None
        """Why the loop ended because of a bug. None otherwise."""
        self.busy_since: float | None = None
        """When the current iteration began, on the engine's clock. None while there is no work."""

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stack_trace(self) -> str:
        """The current stack of the thread. For the log, when a step takes too long."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Thread-safe. Raises `UnavailableError` after `close`."""
        self._inbox.put(Submit(request))

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Thread-safe. An unknown id is ignored."""
        with suppress(UnavailableError):
            self._inbox.put(Abort(request_id, reason))

    def close(self) -> None:
        """Abort all requests and end the thread after the step in flight. `submit` raises from now on."""
        self._inbox.close()

    def _run(self) -> None:
        try:
            while (commands := self._inbox.take(wait=not self._engine.has_work)) is not None:
                self.busy_since = self._engine.clock()
                self._open |= {command.request.id for command in commands if isinstance(command, Submit)}
                events = [event for command in commands for event in self._handle(command)]
                if self._engine.has_work:
                    events += self._engine.step()
                self._publish(tuple(events))
                self.busy_since = None
            aborts = [self._engine.abort(request_id) for request_id in self._open]
            self._publish(tuple(event for events in aborts for event in events))
        except BaseException as error:
            logger.exception("the engine loop ended: %s", error)
            self.failure = f"the engine loop ended: {type(error).__name__}"
            self._inbox.close()
            while left := self._inbox.take(wait=False):
                self._open |= {command.request.id for command in left if isinstance(command, Submit)}
            self._publish(tuple(FinishEvent(i, FinishReason.ERROR, self.failure) for i in self._open))

    def _handle(self, command: Command) -> tuple[Event, ...]:
        if isinstance(command, Abort):
            return self._engine.abort(command.request_id, command.reason)
        try:
            self._engine.submit(command.request)
        except RequestError as error:
            return (FinishEvent(command.request.id, FinishReason.ERROR, error.message),)
        return ()

    def _publish(self, events: tuple[Event, ...]) -> None:
        self._open -= {event.request_id for event in events if is_last(event)}
        if events:
            self._deliver(events)


def is_last(event: Event) -> bool:
    """Whether no further event of its request follows."""
    return isinstance(event, FinishEvent) or (isinstance(event, TokenEvent) and event.finish is not None)
