"""All replies that one HTTP request asks for: started together, read as one, ended together.

Knows nothing of JSON.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from legato.core.plan import Sampled
from legato.core.request import SamplingParams
from legato.core.stopping import FinishReason
from legato.engine.async_engine import AsyncEngine, Stream
from legato.engine.output import Delta, Finish, Terms
from legato.errors import ConstraintError, DeadlineError, StepError, UnavailableError
from legato.server.sampling import seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to generate: `n` replies to each prompt. Reply number i is reply i % n to prompt i // n."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    """For each prompt, the parameters of its first reply."""
    stop: tuple[str, ...]
    n: int
    arrival: float
    """When the HTTP request came, in seconds on the engine's clock."""
    terms: Terms
    shown: frozenset[int] = frozenset()
    """Special tokens that are part of a reply's text."""

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
    sampled: tuple[Sampled, ...]
    finish_reason: str | None
    """`stop` or `length` if the reply ends with it."""
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended it (as vLLM)."""

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "Part":
        """Consecutive deltas as one."""
        finish = deltas[-1].finish
        return cls(
            "".join(delta.text for delta in deltas),
            tuple(delta.sampled for delta in deltas if delta.sampled is not None),
            None if finish is None else finish.reason.value,
            None if finish is None else finish.stop,
        )


@contextmanager
def started(engine: AsyncEngine, generation: Generation, name: str) -> Iterator[list[Stream]]:
    """Submit everything, or nothing if the queue has no room for all. Whatever is still running when the
    block is left is aborted.

    Raises what `AsyncEngine.submit` raises; then nothing runs on.
    """
    num_replies = len(generation.prompts) * generation.n
    with ExitStack() as stack:
        streams: list[Stream] = []
        for prompt, params in zip(generation.prompts, generation.params, strict=True):
            for sample in range(generation.n):
                stream = engine.submit(
                    prompt,
                    replace(params, seed=seed_of(params.seed, sample)),
                    stop=generation.stop,
                    shown=generation.shown,
                    request_id=f"{name}-{len(streams)}",
                    arrival=generation.arrival,
                    terms=generation.terms,
                    places=0 if streams else num_replies,
                )
                streams.append(stack.enter_context(stream))
        yield streams


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all streams as they come, with the stream's number.

    Raises `StepError` if one fails, `ConstraintError` if one can go no further, `DeadlineError` if the
    request's timeout passes, `UnavailableError` if the server stops before all are complete.
    """
    deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
    pumps = [asyncio.ensure_future(_pump(index, stream, deltas)) for index, stream in enumerate(streams)]
    num_left = len(pumps)
    try:
        while num_left:
            index, delta = await deltas.get()
            if delta.finish is not None:
                num_left -= 1
                _check(delta.finish)
            yield index, delta
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(index: int, stream: Stream, deltas: asyncio.Queue[tuple[int, Delta]]) -> None:
    async for delta in stream:
        deltas.put_nowait((index, delta))


def _check(finish: Finish) -> None:
    if finish.reason is FinishReason.ERROR:
        raise StepError(finish.message)
    if finish.reason is FinishReason.CONSTRAINT:
        raise ConstraintError(finish.message)
    if finish.reason is FinishReason.TIMEOUT:
        raise DeadlineError("the request's timeout passed before its reply was complete")
    if finish.reason is FinishReason.ABORT:  # nobody here asked for it, so the engine is stopping
        raise UnavailableError("the server shut down before the reply was complete")
