"""The engine for asyncio programs: submit a prompt, iterate over what it becomes.

The engine's thread hands each step's events over in one call; text is made from them here, in the event
loop, as they come, whether or not the client reads. So a slow reader delays nobody, and holds at most its
own reply.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from legato.core.events import Event, TokenEvent
from legato.core.request import Request, RequestId, SamplingParams
from legato.core.stopping import FinishReason
from legato.engine.engine import Engine
from legato.engine.loop import EngineLoop
from legato.engine.output import Delta, Reply
from legato.text.tokenizer import Tokenizer


class Stream:
    """One reply in the making: an async iterator of deltas, the last of which has `finish` set.

    Use it in a `with` block: leaving the block, however that happens, aborts what is still running.
    """

    def __init__(self, reply: Reply, cancel: Callable[[RequestId], None]) -> None:
        self.request = reply.request
        self._reply = reply
        self._cancel = cancel
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._done = False

    @property
    def finished(self) -> bool:
        """Whether its last delta is made, read or not."""
        return self._reply.finished

    def feed(self, event: Event) -> None:
        """Take an event from the engine."""
        self._deltas.put_nowait(self._reply.push(event))

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
        self._cancel(self.request.id)


class AsyncEngine:
    """Owns the engine's thread. All methods are called in one event loop's thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._loop = EngineLoop(engine, self._deliver)
        self._streams: dict[RequestId, Stream] = {}
        self._home: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        self._home = asyncio.get_running_loop()
        self._loop.start()

    async def stop(self) -> None:
        """Abort every reply and end the engine's thread."""
        await asyncio.to_thread(self._loop.stop)

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
    def num_streams(self) -> int:
        """Replies in the making."""
        return len(self._streams)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        request_id: str | None = None,
        arrival: float | None = None,
    ) -> Stream:
        """Start a reply to `prompt` (token ids).

        `stop` are strings that end the reply; they are cut off. `arrival` is when the client's request came,
        in seconds on the engine's clock (now, if not given). Raises `RequestError` at once for what can
        never be served, `UnavailableError` after `stop`.
        """
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        request = Request(
            id=RequestId(request_id or f"req-{secrets.token_hex(12)}"),
            prompt=tuple(prompt),
            params=params,
            arrival=self.engine.clock() if arrival is None else arrival,
        )
        self.engine.scheduler.validate(request)
        stream = Stream(Reply(request, self.tokenizer, stop), self._cancel)
        self._loop.submit(request)
        self._streams[request.id] = stream
        self._idle.clear()
        return stream

    def _cancel(self, request_id: RequestId) -> None:
        if self._forget(request_id):
            self._loop.abort(request_id)

    def _forget(self, request_id: RequestId) -> bool:
        known = self._streams.pop(request_id, None) is not None
        if not self._streams:
            self._idle.set()
        return known

    def _deliver(self, events: tuple[Event, ...]) -> None:
        """In the engine's thread."""
        assert self._home is not None
        with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
            self._home.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: tuple[Event, ...]) -> None:
        """In the event loop's thread. Events of requests that were cancelled meanwhile have no stream."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.feed(event)
            if stream.finished:
                self._forget(event.request_id)
                if isinstance(event, TokenEvent) and event.finish is None:  # a stop string
                    self._loop.abort(event.request_id, FinishReason.STOP)
