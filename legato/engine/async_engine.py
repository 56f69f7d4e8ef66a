"""The engine for asyncio programs: submit a prompt, iterate over what it becomes.

The engine's thread hands each step's events over in one call; text is made from them here, in the event
loop, as they come, whether or not the client reads. So a slow reader delays nobody, and holds at most its
own reply, some 200 bytes a token.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from legato.core.budget import TargetBudget
from legato.core.events import Event, FinishEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.engine.engine import Engine
from legato.engine.loop import EngineLoop, is_last
from legato.engine.output import NO_TERMS, PLAIN_TEXT, Delta, Finish, Reply, Terms, TextRules, new_request
from legato.errors import QueueFullError, RequestError
from legato.sampling_params import SamplingParams
from legato.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

POLL_S = 0.01
PACE_OVER = 64
"""Requests that ended last, and not by an abort: how fast the queue moves is measured over these."""
PACE_FROM = 8
"""A wait is predicted from at least this many of them."""
MAX_RETRY_S = 600
FED_AT_ONCE = 64
"""Events that streams get in one turn of the event loop."""


class Stream:
    """One reply in the making: an async iterator of deltas, the last of which has `finish` set.

    Use it in a `with` block: leaving the block, however that happens, aborts what is still running.
    """

    def __init__(
        self, reply: Reply, abort: Callable[[RequestId], None], on_delta: Callable[[Delta], None] | None
    ) -> None:
        """`on_delta` is called with each delta as it comes; then there is nothing to iterate over."""
        self.request = reply.request
        self.reply = reply
        self._abort = abort
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._on_delta = on_delta or self._deltas.put_nowait
        self._done = False
        self.num_waiting_tokens = len(reply.request.prompt)
        """Tokens of the prompt until the first token comes, then 0."""

    def feed(self, event: Event) -> None:
        """Take an event from the engine."""
        self._on_delta(self.reply.push(event))

    def fail(self, message: str) -> None:
        """End the reply without the text that it still held back: that may be what cannot be made."""
        self._on_delta(Delta("", None, Finish(FinishReason.ERROR, message=message)))

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._done:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._done = delta.finish is not None
        return delta

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort(self.request.id)


@dataclass(slots=True)
class Room:
    """What is left of the room in the queue that was reserved for replies that belong together."""

    places: int
    num_tokens: int


class AsyncEngine:
    """Owns the engine's thread. All methods are called in one event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        max_wait: float = math.inf,
        step_timeout: float = math.inf,
    ) -> None:
        """More than `max_waiting` replies never wait at once, nor more than `max_waiting_tokens` prompt
        tokens, those of replies without a first token; None sets no limit. Nor does a request come in while
        what waits is predicted to take more than `max_wait` seconds. A turn of the loop that takes
        more than `step_timeout` seconds is trouble."""
        self.engine = engine
        self.tokenizer = tokenizer
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_wait = max_wait
        self._step_timeout = step_timeout
        self._num_waiting_tokens = 0
        self._reserved = Room(0, 0)
        """Room of all reservations together that no reply has taken yet."""
        self._departures: deque[float] = deque(maxlen=PACE_OVER)
        self._answers: deque[tuple[float, int]] = deque(maxlen=PACE_OVER)
        """When the last prompts got their first tokens, and how many tokens they had, while others waited."""
        self._loop = EngineLoop(engine, self._deliver)
        self._events: deque[Event] = deque()
        """Events that no stream has received yet."""
        self._streams: dict[RequestId, Stream] = {}
        self._leaving: set[RequestId] = set()
        """Whose streams are gone and whose last events have not come: until then their ids are theirs."""
        self._home: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def clock(self) -> float:
        """The time on the engine's clock, in seconds."""
        return self.engine.clock()

    async def start(self) -> None:
        self._home = asyncio.get_running_loop()
        self._loop.start()

    async def stop(self, patience_s: float = 60.0) -> None:
        """Abort every reply and end the engine's thread.

        A step that does not return within `patience_s` is left alone: its thread ends with the process.
        Safe to call again.
        """
        self._loop.close()
        deadline = time.monotonic() + patience_s
        while self._loop.alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if self._loop.alive:
            logger.warning("the engine still runs after %g s; leaving it\n%s", patience_s, self.place)

    def end_streams(self) -> None:
        """Tell every reply in the making that it is aborted, whether or not the engine gets to it. After
        `stop`."""
        self._dispatch(tuple(FinishEvent(request_id, FinishReason.ABORT) for request_id in self._streams))

    async def drain(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        if self._loop.failure is None and self._home is not None and not self._loop.alive:
            return "the engine is shut down"
        return self._loop.failure

    @property
    def trouble(self) -> str | None:
        """Why no reply goes on; None while all is well."""
        began = self._loop.busy_since
        seconds = 0.0 if began is None else self.engine.clock() - began
        if self.failure is None and seconds > self._step_timeout:
            return f"the step in flight has taken {seconds:.0f} s; the limit is {self._step_timeout:g} s"
        return self.failure

    @property
    def place(self) -> str:
        """What the engine's thread is doing right now, as a traceback."""
        return self._loop.place

    @property
    def num_streams(self) -> int:
        """Replies in the making."""
        return len(self._streams)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        text: TextRules = PLAIN_TEXT,
        request_id: str | None = None,
        arrival: float | None = None,
        terms: Terms = NO_TERMS,
        room: Room | None = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Stream:
        """Start a reply to `prompt` (token ids).

        `arrival` is when the client's request came, in seconds on the engine's clock (now, if not given).
        The reply takes its place in the queue from `room` (see `reserve`), if given. `on_delta` takes the
        deltas in place of whoever iterates over the stream; it is called in the event loop's thread. Raises
        `RequestError` at once for what can never be served, `QueueFullError` if too many wait already,
        `UnavailableError` after `stop`.
        """
        arrival = self.engine.clock() if arrival is None else arrival
        request = new_request(prompt, params, arrival=arrival, request_id=request_id, terms=terms)
        if request.id in self._streams or request.id in self._leaving:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        self.engine.scheduler.validate(request)
        if room is None:
            self._check_queue(1, len(request.prompt))
        stream = Stream(Reply(request, self.tokenizer, text), self._abort, on_delta)
        self._loop.submit(request)
        if room is not None:
            self._release(room, 1, stream.num_waiting_tokens)
        self._streams[request.id] = stream
        self._num_waiting_tokens += stream.num_waiting_tokens
        self._idle.clear()
        return stream

    @contextmanager
    def reserve(self, places: int, num_tokens: int) -> Iterator[Room]:
        """Within the block, room in the queue for `places` replies whose prompts have `num_tokens` tokens
        together. What `submit` did not take of it is free again behind the block.

        Whoever submits several replies and lets others run in between needs it: else these may take the room
        that was found. Raises `RequestError` for more replies than can ever run and wait, `QueueFullError`
        if there is no room for all.
        """
        self._check_queue(places, num_tokens)
        room = Room(places, num_tokens)
        self._reserved.places += places
        self._reserved.num_tokens += num_tokens
        self._idle.clear()
        try:
            yield room
        finally:
            self._release(room, room.places, room.num_tokens)
            self._note_idle()

    def widen(self, room: Room, num_tokens: int) -> None:
        """Reserve so many prompt tokens more, now that it is known how many there are. Raises
        `QueueFullError` if there is no room."""
        self._check_tokens(num_tokens, 1)
        room.num_tokens += num_tokens
        self._reserved.num_tokens += num_tokens

    def _release(self, room: Room, places: int, num_tokens: int) -> None:
        for held in (room, self._reserved):
            held.places -= places
            held.num_tokens -= num_tokens

    def _note_idle(self) -> None:
        if not self._streams and not self._reserved.places:
            self._idle.set()

    def _abort(self, request_id: RequestId) -> None:
        if request_id in self._streams:
            self._forget(request_id)
            self._loop.abort(request_id)

    def _check_queue(self, places: int, num_tokens: int) -> None:
        """The queue is every stream that does not run, and what is reserved. While the scheduler leaves no
        request waiting, there is room in the free places of those that run as well. Its tokens are those of
        streams without a first token."""
        num_running = len(self.engine.scheduler.state.running)
        num_waiting = len(self._streams) + self._reserved.places - num_running
        if num_waiting <= 0:  # who ended while nobody waited does not tell how fast a queue moves
            self._departures.clear()
            self._answers.clear()
        if self._max_waiting is not None:
            self._check_places(places, num_waiting, num_running, self._max_waiting)
        self._check_tokens(num_tokens, num_waiting)
        if num_waiting > 0 and (wait := self.predicted_wait(num_waiting)) > self._max_wait:
            raise QueueFullError(
                f"what waits is predicted to take {wait:.0f} s, at most {self._max_wait:g} s may be",
                retry_after_s=min(max(math.ceil(wait - self._max_wait), 1), MAX_RETRY_S),
            )

    def predicted_wait(self, num_waiting: int) -> float:
        """Seconds until all that waits, `num_waiting` requests, will have its first tokens.

        At the pace of the last prompts and of the last requests that ended, whichever is slower; before there
        are enough of either, by the price of a prompt's token.
        """
        now, tokens = self.engine.clock(), self._num_waiting_tokens + self._reserved.num_tokens
        waits = [0.0]
        if len(self._answers) >= PACE_FROM:
            began, _ = self._answers[0]
            waits.append(tokens * (now - began) / sum(num for _, num in list(self._answers)[1:]))
        elif isinstance(budget := self.engine.scheduler.state.budget, TargetBudget):
            waits.append(tokens * budget.model.cost.prefill)
        if len(self._departures) >= PACE_FROM:
            waits.append(num_waiting * (now - self._departures[0]) / len(self._departures))
        return max(waits)

    def _check_tokens(self, num_tokens: int, num_waiting: int) -> None:
        most = self._max_waiting_tokens
        waiting = self._num_waiting_tokens + self._reserved.num_tokens
        if most is not None and waiting and waiting + num_tokens > most:
            raise QueueFullError(
                f"{waiting} prompt tokens wait and the request brings {num_tokens} more, at most {most} may",
                retry_after_s=self._seconds_to_drain(max(num_waiting, 1)),
            )

    def _check_places(self, places: int, num_waiting: int, num_running: int, max_waiting: int) -> None:
        scheduler = self.engine.scheduler
        max_running = scheduler.state.config.max_running
        if places > max_running + max_waiting:
            raise RequestError(
                f"the request asks for {places} replies; at most {max_running} may run and "
                f"{max_waiting} wait",
                param="n",
            )
        is_held_up = scheduler.state.waiting and scheduler.state.num_left_waiting
        free = 0 if is_held_up else max_running - num_running
        if num_waiting + places > free + max_waiting:
            more = f"; {places} more came together" if places > 1 else ""
            raise QueueFullError(
                f"{num_waiting} requests wait, at most {max_waiting} may{more}",
                retry_after_s=self._seconds_to_drain(num_waiting),
            )

    def _seconds_to_drain(self, num_waiting: int) -> int:
        """How long so many requests take at the pace of the last ones that ended."""
        if not self._departures:
            return 1
        elapsed = self.engine.clock() - self._departures[0]
        return min(max(math.ceil(num_waiting * elapsed / len(self._departures)), 1), MAX_RETRY_S)

    def _answered(self, stream: Stream) -> None:
        self._num_waiting_tokens -= stream.num_waiting_tokens
        stream.num_waiting_tokens = 0

    def _forget(self, request_id: RequestId) -> None:
        self._answered(self._streams.pop(request_id))
        self._leaving.add(request_id)
        self._note_idle()

    def _deliver(self, events: tuple[Event, ...]) -> None:
        """In the engine's thread."""
        assert self._home is not None
        with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
            self._home.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: tuple[Event, ...]) -> None:
        """In the event loop's thread."""
        is_feeding = bool(self._events)
        self._events += events
        if not is_feeding:
            self._feed_some()

    def _feed_some(self) -> None:
        """Give streams their events, so many in one turn of the event loop, for each has work to do with it.

        Whatever is raised here, the events that are left have their turn: `_dispatch` counts on it.
        """
        try:
            for _ in range(min(len(self._events), FED_AT_ONCE)):
                self._feed_next()
        finally:
            if self._events:
                asyncio.get_running_loop().call_soon(self._feed_some)

    def _feed_next(self) -> None:
        """Events of requests that were aborted meanwhile have no stream."""
        event = self._events.popleft()
        try:
            if (stream := self._streams.get(event.request_id)) is not None:
                self._feed(stream, event)
        finally:
            if is_last(event):
                self._leaving.discard(event.request_id)

    def _feed(self, stream: Stream, event: Event) -> None:
        """Give a stream its event; one that cannot take it ends, and no other does."""
        request_id = stream.request.id
        if isinstance(event, TokenEvent | FinishEvent):
            if stream.num_waiting_tokens and isinstance(event, TokenEvent):
                self._answers.append((self.engine.clock(), stream.num_waiting_tokens))
            self._answered(stream)
        try:
            stream.feed(event)
        except Exception:
            logger.exception("request %s: its text cannot be made", request_id)
            self._forget(request_id)
            self._loop.abort(request_id, FinishReason.ERROR)
            stream.fail("the reply's text cannot be made")
            return
        if stream.reply.must_abort:
            self._loop.abort(request_id, FinishReason.STOP)
        if stream.reply.finished:
            self._departures.append(self.engine.clock())
            self._forget(request_id)
