"""The engine for asyncio programs: submit a prompt, iterate over its reply.

The engine thread delivers the events of a step in one call. They are turned into text here, in the event
loop, as they arrive, whether or not the client reads. So a slow client delays no other client, and buffers
at most its own reply, about 200 bytes per token.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from legato.core.events import Event, FinishEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.engine.engine import Engine
from legato.engine.loop import EngineLoop, is_last
from legato.engine.output_processor import PLAIN_TEXT, Delta, DetokenizeOptions, Finish, OutputProcessor
from legato.engine.queue_limits import QueueLimits, Reservation
from legato.engine.requests import DEFAULT_OPTIONS, RequestOptions, new_request
from legato.errors import RequestError
from legato.sampling_params import SamplingParams
from legato.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

POLL_S = 0.01
MAX_EVENTS = 64
"""The most events that streams get in one turn of the event loop."""


class Stream:
    """One reply in progress: an async iterator of deltas. The last delta has `finish` set.

    Use it in a `with` block. Leaving the block in any way aborts what still runs.
    """

    def __init__(
        self,
        processor: OutputProcessor,
        abort: Callable[[RequestId], None],
        on_delta: Callable[[Delta], None] | None,
    ) -> None:
        """If `on_delta` is given, it is called with each delta, and there is nothing to iterate over."""
        self.request = processor.request
        self.processor = processor
        self._abort = abort
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._on_delta = on_delta or self._deltas.put_nowait
        self._is_done = False
        self.num_waiting_tokens = len(processor.request.prompt)
        """The tokens of the prompt until the first token of the reply, then 0."""

    def feed(self, event: Event) -> None:
        """Process an event of the engine."""
        self._on_delta(self.processor.push(event))

    def fail(self, message: str) -> None:
        """End the reply, and drop text that was held back: perhaps it is what cannot be processed."""
        self._on_delta(Delta("", None, Finish(FinishReason.ERROR, message=message)))

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._is_done:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._is_done = delta.finish is not None
        return delta

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort(self.request.id)


class AsyncEngine:
    """Owns the engine thread. All methods must be called in one event loop's thread."""

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
        """For the limits on waiting requests see `QueueLimits`. A step that takes more than `step_timeout`
        seconds counts as stalled."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.queue = QueueLimits(
            engine.load,
            engine.clock,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            max_wait=max_wait,
        )
        self._step_timeout = step_timeout
        self._loop = EngineLoop(engine, self._deliver)
        self._events: deque[Event] = deque()
        """Events that no stream has received yet."""
        self._streams: dict[RequestId, Stream] = {}
        self._aborting: set[RequestId] = set()
        """Requests whose stream is gone and whose last event has not arrived. Their ids are still in use."""
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def clock(self) -> float:
        """The time on the engine's clock, in seconds."""
        return self.engine.clock()

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()

    async def stop(self, timeout_s: float = 60.0) -> None:
        """Abort every reply and end the engine thread. Safe to call again.

        A step that does not return within `timeout_s` is abandoned: its thread ends with the process.
        """
        self._loop.close()
        deadline = time.monotonic() + timeout_s
        while self._loop.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if self._loop.is_alive:
            logger.warning("the engine still runs after %g s; abandoning it\n%s", timeout_s, self.stack_trace)

    def end_streams(self) -> None:
        """Send every reply in progress an abort, even if the engine does not. Call it after `stop`."""
        self._dispatch(tuple(FinishEvent(request_id, FinishReason.ABORT) for request_id in self._streams))

    async def drain(self) -> None:
        """Wait until no request is left."""
        await self._is_idle.wait()

    @property
    def failure(self) -> str | None:
        """Why the engine has ended. None while it lives."""
        if self._loop.failure is None and self._event_loop is not None and not self._loop.is_alive:
            return "the engine is shut down"
        return self._loop.failure

    @property
    def stall_reason(self) -> str | None:
        """Why replies make no progress. None if they do."""
        began = self._loop.busy_since
        seconds = 0.0 if began is None else self.clock() - began
        if self.failure is None and seconds > self._step_timeout:
            return f"the step in flight has taken {seconds:.0f} s; the limit is {self._step_timeout:g} s"
        return self.failure

    @property
    def stack_trace(self) -> str:
        """The current stack of the engine thread."""
        return self._loop.stack_trace

    @property
    def num_streams(self) -> int:
        """Replies in progress."""
        return len(self._streams)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        text: DetokenizeOptions = PLAIN_TEXT,
        request_id: str | None = None,
        arrival: float | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        reservation: Reservation | None = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Stream:
        """Start a reply to `prompt` (token ids).

        `arrival` is when the client's request arrived, on the engine's clock; by default now. With a
        `reservation` (see `reserve`), the reply uses its room in the queue. `on_delta` gets the deltas in
        place of an iterating caller; it is called in the event loop's thread. Raises `RequestError` if the
        request can never be served, `QueueFullError` if too many wait, and `UnavailableError` after `stop`.
        """
        arrival = self.clock() if arrival is None else arrival
        request = new_request(prompt, params, arrival=arrival, request_id=request_id, options=options)
        if request.id in self._streams or request.id in self._aborting:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        self.engine.scheduler.validate(request)
        if reservation is None:
            self.queue.check(1, len(request.prompt))
        stream = Stream(OutputProcessor(request, self.tokenizer, text), self._abort, on_delta)
        self._loop.submit(request)
        if reservation is not None:
            self.queue.use(reservation, 1, stream.num_waiting_tokens)
        self._streams[request.id] = stream
        self.queue.opened(stream.num_waiting_tokens)
        self._is_idle.clear()
        return stream

    @contextmanager
    def reserve(self, num_replies: int, num_tokens: int) -> Iterator[Reservation]:
        """Reserve room in the queue for `num_replies` replies with `num_tokens` prompt tokens together.

        A caller that submits several replies and awaits in between needs a reservation, because other
        requests could take the room meanwhile. Reservation that is not used is released at the end of the
        block. Raises `RequestError` for more replies than can ever run and wait, and `QueueFullError` if
        there is no room.
        """
        try:
            with self.queue.reserve(num_replies, num_tokens) as reservation:
                self._is_idle.clear()
                yield reservation
        finally:
            self._set_idle()

    def widen(self, reservation: Reservation, num_tokens: int) -> None:
        """Reserve further prompt tokens once their number is known. Raises `QueueFullError` if there is no
        room."""
        self.queue.widen(reservation, num_tokens)

    def _set_idle(self) -> None:
        if not self._streams and not self.queue.num_reserved:
            self._is_idle.set()

    def _abort(self, request_id: RequestId) -> None:
        if request_id in self._streams:
            self._close(request_id, was_aborted=True)
            self._loop.abort(request_id)

    def _close(self, request_id: RequestId, *, was_aborted: bool) -> None:
        stream = self._streams.pop(request_id)
        self.queue.closed(stream.num_waiting_tokens, was_aborted=was_aborted)
        stream.num_waiting_tokens = 0
        self._aborting.add(request_id)
        self._set_idle()

    def _deliver(self, events: tuple[Event, ...]) -> None:
        """Called in the engine thread."""
        assert self._event_loop is not None
        with suppress(RuntimeError):  # The event loop is closed.
            self._event_loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: tuple[Event, ...]) -> None:
        """Called in the event loop's thread."""
        is_feeding = bool(self._events)
        self._events += events
        if not is_feeding:
            self._feed_some()

    def _feed_some(self) -> None:
        """Give streams their events, a limited number in each turn of the event loop, because each takes
        time.

        If one of them raises, the rest must still be scheduled: `_dispatch` relies on it.
        """
        try:
            for _ in range(min(len(self._events), MAX_EVENTS)):
                self._feed_next()
        finally:
            if self._events:
                asyncio.get_running_loop().call_soon(self._feed_some)

    def _feed_next(self) -> None:
        """Process one event. A request that was aborted meanwhile has no stream."""
        event = self._events.popleft()
        try:
            if (stream := self._streams.get(event.request_id)) is not None:
                self._feed(stream, event)
        finally:
            if is_last(event):
                self._aborting.discard(event.request_id)

    def _feed(self, stream: Stream, event: Event) -> None:
        """Give a stream its event. A stream that cannot process it ends; the others continue."""
        request_id = stream.request.id
        if isinstance(event, TokenEvent) and stream.num_waiting_tokens:
            self.queue.first_token(stream.num_waiting_tokens)
            stream.num_waiting_tokens = 0
        try:
            stream.feed(event)
        except Exception:
            logger.exception("request %s: its text cannot be made", request_id)
            self._close(request_id, was_aborted=True)
            self._loop.abort(request_id, FinishReason.ERROR)
            stream.fail("the reply's text cannot be made")
            return
        if stream.processor.must_abort:
            self._loop.abort(request_id, FinishReason.STOP)
        if stream.processor.is_finished:
            self._close(request_id, was_aborted=False)
