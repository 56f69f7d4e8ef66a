"""All replies that one HTTP request asks for: started together, read as one, ended together.

Knows nothing of JSON.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import TokenLogprobs
from legato.engine.async_engine import AsyncEngine, Room, Stream
from legato.engine.output import Delta, Finish, Terms, TextRules
from legato.errors import ConstraintError, DeadlineError, StepError, UnavailableError
from legato.sampling_params import SamplingParams
from legato.server.event_loop import Turns
from legato.server.sampling import seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to generate: `n` replies to each prompt. Reply number i is reply i % n to prompt i // n."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    """For each prompt, the parameters of its first reply."""
    text: TextRules
    num_truncated: int | None
    """Tokens that were cut off the prompts; None if the request does not want that."""
    n: int
    arrival: float
    """When the HTTP request came, in seconds on the engine's clock."""
    terms: Terms
    notices: tuple[str, ...] = ()
    """What the client should know of how its request was read: one sentence each, told in a header."""

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, whatever n."""
        return sum(map(len, self.prompts))

    def num_cached(self, streams: Sequence[Stream]) -> int:
        """Tokens of the prompts that were found computed, as far as known: of each prompt's first reply, as
        the others find what that one computed."""
        return sum(stream.reply.num_cached for stream in streams[:: self.n])


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a reply: what one delta adds, or all of it."""

    text: str
    sampled: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    """`stop` or `length` if the reply ends with it."""
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended it (as vLLM)."""
    prompt: tuple[TokenLogprobs, ...] = ()
    """All of the prompt with log-probabilities, if they were asked for: part of what comes first."""

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "Part":
        """Consecutive deltas as one."""
        finish = deltas[-1].finish
        return cls(
            "".join(delta.text for delta in deltas),
            tuple(delta.sampled for delta in deltas if delta.sampled is not None),
            None if finish is None else finish.reason.value,
            None if finish is None else finish.stop,
            tuple(token for delta in deltas for token in delta.prompt),
        )


class Replies:
    """The replies to one HTTP request in the making, and the one queue that all their deltas go through."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.streams: list[Stream] = []
        self._deltas: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

    def put(self, index: int, delta: Delta) -> None:
        """Reply number `index` grew by `delta`."""
        self._deltas.put_nowait((index, delta))

    def wake(self) -> None:
        """Whoever waits in `read` gets None; nobody does if there is something else to read."""
        if self._deltas.empty():
            self._deltas.put_nowait(None)

    async def read(self) -> AsyncGenerator[tuple[int, Delta] | None, None]:
        """The deltas of all replies as they come, with the reply's number, until all are complete.

        Raises `StepError` if one fails, `ConstraintError` if one can go no further, `DeadlineError` if the
        request's timeout passes, `UnavailableError` if the server stops before all are complete.
        """
        num_left = len(self.streams)
        while num_left:
            item = await self._deltas.get()
            if item is not None and item[1].finish is not None:
                num_left -= 1
                _check(item[1].finish)
            yield item
            # A queue that is not empty does not suspend: the backlog of a client that left, or reads again
            # after a while, would be one turn.
            if self._turns.is_long and not self._deltas.empty():
                await asyncio.sleep(0)


@asynccontextmanager
async def started(
    engine: AsyncEngine, generation: Generation, name: str, room: Room, turns: Turns
) -> AsyncIterator[Replies]:
    """Submit everything into `room` in the queue. Whatever is still running when the block is left is
    aborted.

    Raises what `AsyncEngine.submit` raises; then nothing runs on.
    """
    with ExitStack() as stack:
        replies = Replies(turns)
        for prompt, params in zip(generation.prompts, generation.params, strict=True):
            for sample in range(generation.n):
                index = len(replies.streams)
                if index and turns.is_long:
                    await asyncio.sleep(0)  # the streams of others go on
                stream = engine.submit(
                    prompt,
                    params if params.seed is None else replace(params, seed=seed_of(params.seed, sample)),
                    text=generation.text,
                    request_id=f"{name}-{index}",
                    arrival=generation.arrival,
                    terms=generation.terms,
                    room=room,
                    on_delta=partial(replies.put, index),
                )
                replies.streams.append(stack.enter_context(stream))
        yield replies


def out_of_time() -> DeadlineError:
    return DeadlineError("the request's timeout passed before its reply was complete")


def _check(finish: Finish) -> None:
    if finish.reason is FinishReason.ERROR:
        raise StepError(finish.message)
    if finish.reason is FinishReason.CONSTRAINT:
        raise ConstraintError(finish.message)
    if finish.reason is FinishReason.TIMEOUT:
        raise out_of_time()
    if finish.reason is FinishReason.ABORT:  # nobody here asked for it, so the engine is stopping
        raise UnavailableError("the server shut down before the reply was complete")
