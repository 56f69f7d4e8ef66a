"""Threads for work that would block the event loop: parsing, templates, tokenizing, large responses.

Short and long work have separate threads, so short work never waits for long work. On Linux, long work runs
at a lower priority than the threads that compute steps.
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

MAX_INLINE = 4_000
"""Work on at most this many characters or bytes is done in the event loop. It takes about 100
microseconds."""
MAX_SHORT = 32_768
"""Work on at most this many characters or bytes is short: about 20 milliseconds of tokenizing."""
SHORT_THREADS, LONG_THREADS = 2, 2
LONG_NICENESS = 10

T = TypeVar("T")


class _Job(Generic[T]):
    """Work, and the future of its result in the event loop that submitted it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()
        self.future.add_done_callback(self._drop_work)

    def run(self) -> None:
        """Runs in a thread of the pool. Does nothing if the future was cancelled."""
        work = self._work
        if work is None:
            return
        try:
            result = work()
        except BaseException as error:
            self._finish(lambda error=error: self.future.set_exception(error))  # type: ignore[misc]
        else:
            self._finish(lambda: self.future.set_result(result))

    def _drop_work(self, _: object) -> None:
        """A cancelled job that is still queued must not keep the data of its work in memory."""
        self._work = None

    def _finish(self, set_outcome: Callable[[], None]) -> None:
        def unless_done() -> None:
            if not self.future.done():
                set_outcome()

        with suppress(RuntimeError):  # The event loop is closed.
            self._loop.call_soon_threadsafe(unless_done)


_Jobs: TypeAlias = "queue.SimpleQueue[_Job[Any] | None]"


class _Lane:
    """A queue of jobs and its threads, which are started on demand."""

    def __init__(self, name: str, num_threads: int, niceness: int) -> None:
        self._name, self._num_threads, self._niceness = name, num_threads, niceness
        self._jobs: _Jobs = queue.SimpleQueue()
        self._num_started = 0
        # The threads hold only the queue, so that a pool without references ends them.
        weakref.finalize(self, _stop_threads, self._jobs, num_threads).atexit = False
        self.num_jobs = 0
        """Jobs that wait or run."""

    def put(self, job: _Job[Any]) -> None:
        """Call it in the event loop's thread."""
        self.num_jobs += 1
        job.future.add_done_callback(self._job_done)
        self._jobs.put(job)
        if self._num_started < min(self.num_jobs, self._num_threads):
            self._num_started += 1
            # Daemon threads do not keep the process alive.
            threading.Thread(
                target=_run_jobs, args=(self._jobs, self._niceness), name=f"legato-{self._name}", daemon=True
            ).start()

    def _job_done(self, _: object) -> None:
        self.num_jobs -= 1


def _run_jobs(jobs: _Jobs, niceness: int) -> None:
    """The main function of a thread. It ends at None."""
    if niceness and sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (job := jobs.get()) is not None:
        job.run()
        del job  # It must not keep its work and its result alive until the next job.


def _stop_threads(jobs: _Jobs, num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)


class WorkPool:
    """Runs the work of one event loop, in the loop or in threads."""

    def __init__(self, max_waiting: int = 2048) -> None:
        """`max_waiting` limits the short jobs that wait or run, and separately the long ones."""
        self._max_waiting = max_waiting
        self._short = _Lane("short-work", SHORT_THREADS, 0)
        self._long = _Lane("long-work", LONG_THREADS, LONG_NICENESS)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on `size` characters, bytes or tokens.

        Raises what `work` raises, and `QueueFullError` if too many jobs wait.
        """
        return work() if size <= MAX_INLINE else await self.run_in_thread(size, work)

    async def run_in_thread(self, size: int, work: Callable[[], T]) -> T:
        """The same, but never in the event loop."""
        lane = self._short if size <= MAX_SHORT else self._long
        if lane.num_jobs >= self._max_waiting:
            raise QueueFullError(
                f"{lane.num_jobs} requests wait for a thread that reads them, the most possible",
                retry_after_s=1,
            )
        job = _Job(work)
        lane.put(job)
        return await job.future
