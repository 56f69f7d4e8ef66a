"""Threads for work that would hold up the event loop: parsing, templates, tokenizing, large answers.

Short and long work have threads of their own, so short work never waits for long work. Long work also runs
at a lower priority than the threads that compute steps, where the system has one for each thread (Linux).
"""

import asyncio
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

from legato.errors import QueueFullError

INLINE = 4_000
"""Characters or bytes up to which work is done in the event loop: some 100 microseconds."""
SHORT = 32_768
"""Up to which it is short: some 20 milliseconds of tokenizing."""
SHORT_THREADS, LONG_THREADS = 2, 2
NICENESS = 10

T = TypeVar("T")


class _Job(Generic[T]):
    """Work, and the future of its result in the event loop of whoever waits for it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()
        self.future.add_done_callback(self._let_go)

    def run(self) -> None:
        """In a thread of the pool. Does nothing if nobody waits any more."""
        work = self._work
        if work is None:
            return
        try:
            result = work()
        except BaseException as error:
            self._tell(lambda error=error: self.future.set_exception(error))  # type: ignore[misc]
        else:
            self._tell(lambda: self.future.set_result(result))

    def _let_go(self, _: object) -> None:
        """Nobody waits any more: a job that stays in its queue must not keep what its work holds."""
        self._work = None

    def _tell(self, finish: Callable[[], None]) -> None:
        def unless_gone() -> None:
            if not self.future.done():
                finish()

        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(unless_gone)


_Jobs: TypeAlias = "queue.SimpleQueue[_Job[Any] | None]"


class _Lane:
    """A queue of work and its threads, which are started when there is work for them."""

    def __init__(self, name: str, num_threads: int, niceness: int) -> None:
        self._name, self._num_threads, self._niceness = name, num_threads, niceness
        self._jobs: _Jobs = queue.SimpleQueue()
        self._num_started = 0
        # The threads hold the queue alone, so a pool that is no longer used ends them.
        weakref.finalize(self, _end, self._jobs, num_threads).atexit = False
        self.num_jobs = 0
        """That wait or run."""

    def put(self, job: _Job[Any]) -> None:
        """In the event loop's thread."""
        self.num_jobs += 1
        job.future.add_done_callback(self._note_done)
        self._jobs.put(job)
        if self._num_started < min(self.num_jobs, self._num_threads):
            self._num_started += 1
            # Daemons: the process ends without them.
            threading.Thread(
                target=_work, args=(self._jobs, self._niceness), name=f"legato-{self._name}", daemon=True
            ).start()

    def _note_done(self, _: object) -> None:
        self.num_jobs -= 1


def _work(jobs: _Jobs, niceness: int) -> None:
    """What a thread does: job after job, until it takes None."""
    if niceness and sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it must not keep its work and its result until the next one comes


def _end(jobs: _Jobs, num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)


class WorkPool:
    """Does work of one event loop, in it or in threads beside it."""

    def __init__(self, max_waiting: int = 2048) -> None:
        """At most `max_waiting` pieces of short work, and as many of long work, wait or run at once."""
        self._max_waiting = max_waiting
        self._short = _Lane("short-work", SHORT_THREADS, 0)
        self._long = _Lane("long-work", LONG_THREADS, NICENESS)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on so many characters, bytes or tokens. Raises what it raises, and
        `QueueFullError` if too much waits."""
        return work() if size <= INLINE else await self.run_in_thread(size, work)

    async def run_in_thread(self, size: int, work: Callable[[], T]) -> T:
        """The same, never in the event loop."""
        lane = self._short if size <= SHORT else self._long
        if lane.num_jobs >= self._max_waiting:
            raise QueueFullError(
                f"{lane.num_jobs} requests wait for a thread that reads them, the most possible",
                retry_after_s=1,
            )
        job = _Job(work)
        lane.put(job)
        return await job.future
