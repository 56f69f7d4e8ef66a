"""All replies of one HTTP request: submitted together, read through one queue, ended together.

This module knows no JSON.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import TokenLogprobs
from legato.engine.async_engine import AsyncEngine, Stream
from legato.engine.output_processor import Delta, DetokenizeOptions, Finish
from legato.engine.queue_limits import Reservation
from legato.engine.requests import RequestOptions
from legato.errors import ConstraintError, DeadlineError, StepError, UnavailableError
from legato.sampling_params import SamplingParams
from legato.server.transport.event_loop import Turns

_NUM_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation request: `n` replies to each prompt. Reply i is reply i % n to prompt i // n."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    """For each prompt, the parameters of its first reply."""
    text: DetokenizeOptions
    num_truncated: int | None
    """The number of tokens that were cut off the prompts. None if the request does not ask for truncation."""
    n: int
    arrival: float
    """When the HTTP request arrived, in seconds on the engine's clock."""
    options: RequestOptions
    notices: tuple[str, ...] = ()
    """Notices to the client, one sentence each."""

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, whatever n is."""
        return sum(map(len, self.prompts))

    def num_cached(self, streams: Sequence[Stream]) -> int:
        """Prompt tokens that were found in the prefix cache, as far as known.

        Only the first reply to each prompt counts, because the others find what it computed.
        """
        return sum(stream.processor.num_cached for stream in streams[:: self.n])


@dataclass(frozen=True, slots=True)
class ReplySlice:
    """A part of a reply: the content of one or several deltas, or all of it."""

    text: str
    sampled: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    """`stop` or `length` if the reply ends with this part."""
    stop_reason: str | int | None
    """The stop string or the id of the stop token that ended the reply (as in vLLM)."""
    prompt: tuple[TokenLogprobs, ...] = ()
    """The whole prompt with log-probabilities, if they were asked for. Only in the first part."""

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "ReplySlice":
        """Consecutive deltas as one part."""
        finish = deltas[-1].finish
        return cls(
            "".join(delta.text for delta in deltas),
            tuple(delta.sampled for delta in deltas if delta.sampled is not None),
            None if finish is None else finish.reason.value,
            None if finish is None else finish.stop,
            tuple(token for delta in deltas for token in delta.prompt),
        )


class Replies:
    """The running replies of one HTTP request, and the queue of all their deltas."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.streams: list[Stream] = []
        self._deltas: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

    def put(self, index: int, delta: Delta) -> None:
        """Add a delta of reply `index`."""
        self._deltas.put_nowait((index, delta))

    def wake(self) -> None:
        """Let `read` yield None, unless there is a delta to yield."""
        if self._deltas.empty():
            self._deltas.put_nowait(None)

    async def read(self) -> AsyncGenerator[tuple[int, Delta] | None, None]:
        """The deltas of all replies in the order of their arrival, with the index of the reply.

        Ends when all replies are complete. Raises `StepError` if one fails, `ConstraintError` if one cannot
        continue, `DeadlineError` if the request's timeout passes, and `UnavailableError` if the server stops
        before.
        """
        num_left = len(self.streams)
        while num_left:
            item = await self._deltas.get()
            if item is not None and item[1].finish is not None:
                num_left -= 1
                _check(item[1].finish)
            yield item
            # `get` does not suspend while the queue is not empty. Without this, the backlog of a client that
            # disconnected, or that resumes reading, would be processed in one turn of the event loop.
            if self._turns.is_long and not self._deltas.empty():
                await asyncio.sleep(0)


@asynccontextmanager
async def start_replies(
    engine: AsyncEngine, generation: Generation, response_id: str, reservation: Reservation, turns: Turns
) -> AsyncIterator[Replies]:
    """Submit all replies, in the room of `reservation`. Aborts what still runs when the block is left.

    Raises what `AsyncEngine.submit` raises. Then no reply runs.
    """
    with ExitStack() as stack:
        replies = Replies(turns)
        for prompt, params in zip(generation.prompts, generation.params, strict=True):
            for sample in range(generation.n):
                index = len(replies.streams)
                if index and turns.is_long:
                    await asyncio.sleep(0)  # Let other streams continue.
                stream = engine.submit(
                    prompt,
                    params if params.seed is None else replace(params, seed=seed_of(params.seed, sample)),
                    text=generation.text,
                    request_id=f"{response_id}-{index}",
                    arrival=generation.arrival,
                    options=generation.options,
                    reservation=reservation,
                    on_delta=partial(replies.put, index),
                )
                replies.streams.append(stack.enter_context(stream))
        yield replies


def seed_of(seed: int, sample: int) -> int:
    """The seed of reply number `sample` to a prompt. It wraps around within signed 64 bits.

    So a seed gives n different replies, and the first is the reply to the same request with n = 1.
    """
    return (seed + sample + _NUM_SEEDS // 2) % _NUM_SEEDS - _NUM_SEEDS // 2


def timeout_error() -> DeadlineError:
    return DeadlineError("the request's timeout passed before its reply was complete")


def _check(finish: Finish) -> None:
    if finish.reason is FinishReason.ERROR:
        raise StepError(finish.message)
    if finish.reason is FinishReason.CONSTRAINT:
        raise ConstraintError(finish.message)
    if finish.reason is FinishReason.TIMEOUT:
        raise timeout_error()
    if finish.reason is FinishReason.ABORT:  # The server did not abort it, so the engine is stopping.
        raise UnavailableError("the server shut down before the reply was complete")
