"""The engine: scheduler, runner and journal joined into one `step`. One thread, no queue, no text.

    schedule -> commit -> plan -> run -> complete

Everything above it only decides who calls `step`: a thread of its own (`loop`), or the caller (`llm`).
"""

import logging
from collections.abc import Callable

from legato.core.events import Event
from legato.core.lifecycle import FinishReason
from legato.core.plan import plan
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.scheduler import Scheduler
from legato.core.step_plan import StepResult
from legato.engine.progress import ProgressReports
from legato.engine.protocol import Observer, Runner
from legato.errors import LegatoError
from legato.metrics.journal import StepRecord

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests on a runner. `clock` gives seconds and never goes back."""

    def __init__(self, scheduler: Scheduler, runner: Runner | None, *, clock: Callable[[], float]) -> None:
        """`runner` is None only for a subclass that computes steps in another way."""
        pool = scheduler.state.pool
        if runner and (pool.num_blocks > runner.num_blocks or pool.block_size != runner.block_size):
            raise ValueError(
                f"the pool has {pool.num_blocks} blocks of {pool.block_size} tokens, "
                f"the runner {runner.num_blocks} of {runner.block_size}"
            )
        self.scheduler = scheduler
        self.clock = clock
        self._runner = runner
        self._observers: list[Observer] = []
        self._progress = ProgressReports()
        self._untold: list[Event] = []
        """Events that no call of `step` has returned yet."""

    def observe(self, observer: Observer) -> None:
        """Tell `observer` everything from now on. Call it before the engine runs."""
        self._observers.append(observer)

    @property
    def has_work(self) -> bool:
        return bool(self._untold) or self.scheduler.state.has_work

    def submit(self, request: Request) -> None:
        """Queue a request; raises `RequestError` if it cannot be served."""
        self.scheduler.add(request)
        self._progress.follow(request)
        self._tell(lambda observer: observer.submitted(request))

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> tuple[Event, ...]:
        """End a request now. An id that is not known (any more) is ignored."""
        events = self.scheduler.abort(request_id, reason)
        if events:
            self._progress.forget(request_id)
            self._tell_aborted(request_id, reason, self.clock())
        return events

    def step(self) -> tuple[Event, ...]:
        """Run one step; its events. Call it while `has_work`.

        If the runner raises, the requests of that step end with an error and the engine goes on; it goes on
        as well after a KeyboardInterrupt, which is raised: the next call returns the events of both.
        """
        now = self.clock()
        self._expire(now)
        if self.scheduler.state.has_work:
            self._run_step(now)
        events, self._untold = tuple(self._untold), []
        return events

    def _run_step(self, now: float) -> None:
        scheduler, interrupt = self.scheduler, None
        schedule = scheduler.schedule(now)
        scheduler.commit(schedule)
        error, model_time = None, 0.0
        try:
            result = self.compute(schedule)
            events, model_time = scheduler.complete(result, ended := self.clock()), result.elapsed
        except BaseException as caught:  # whatever the model does, the loop and the other requests live on
            if scheduler.state.in_flight is None:
                raise
            ended = self.clock()
            error = caught.message if isinstance(caught, LegatoError) else type(caught).__name__
            events = scheduler.fail(f"the model step that this request was in failed ({error})")
            if isinstance(caught, Exception):
                # Its text is about numbers: the runner knows no texts.
                logger.exception(
                    "step %d of %d tokens failed: %s", schedule.step, schedule.num_tokens, caught
                )
            else:
                interrupt = caught  # Ctrl-C, an exit: the caller's business, once all is told
        self._untold += (*self._progress.report(scheduler, schedule, ended), *events)
        record = StepRecord(
            schedule=schedule,
            events=events,
            ended=ended,
            model_time=model_time,
            num_running=len(scheduler.state.running),
            num_waiting=len(scheduler.state.waiting),
            blocks_used=scheduler.state.pool.num_used,
            blocks_cached=scheduler.state.pool.num_cached,
            blocks_total=scheduler.state.pool.num_blocks,
            error=error,
        )
        self._tell(lambda observer: observer.stepped(record))
        if interrupt is not None:
            raise interrupt

    def compute(self, schedule: Schedule) -> StepResult:
        """Run the step that was just committed."""
        assert self._runner is not None
        return self._runner.run(plan(self.scheduler.state, schedule))

    def _expire(self, now: float) -> None:
        """End what is over its deadline, before any work is done for it."""
        for event in self.scheduler.expire(now):
            self._untold.append(event)
            self._tell_aborted(event.request_id, event.reason, now)

    def _tell_aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        self._tell(lambda observer: observer.aborted(request_id, reason, now))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        """Whatever becomes of metrics, requests are served: an observer that fails is told nothing more."""
        for observer in tuple(self._observers):
            try:
                tell(observer)
            except Exception as error:
                self._observers.remove(observer)
                logger.exception("%s failed and is told nothing more: %s", type(observer).__name__, error)
