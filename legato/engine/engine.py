"""The engine: scheduler, executor and journal joined into one `step`. It has no thread, no queue and no text.

    schedule -> commit -> execute -> complete

The layers above only decide who calls `step`: a thread (`loop`), or the caller (`llm`).
"""

import logging
from collections.abc import Callable

from legato.core.events import Event
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.engine.executor import RunnerExecutor
from legato.engine.progress import ProgressReports
from legato.engine.protocol import Executor, Observer, Runner
from legato.engine.queue_limits import EngineLoad
from legato.errors import LegatoError
from legato.metrics.journal import StepRecord

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests. `clock` returns seconds and never goes back."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._executor = executor
        self._observers: list[Observer] = []
        self._progress = ProgressReports()
        self._pending_events: list[Event] = []
        """Events that no call of `step` has returned yet."""

    @classmethod
    def on_runner(cls, scheduler: Scheduler, runner: Runner, *, clock: Callable[[], float]) -> "Engine":
        """An engine that runs its steps on `runner`. Raises ValueError if the pool does not fit its KV
        cache."""
        return cls(scheduler, RunnerExecutor(runner, scheduler.state.pool), clock=clock)

    def observe(self, observer: Observer) -> None:
        """Call `observer` from now on. Call this before the engine runs."""
        self._observers.append(observer)

    @property
    def has_work(self) -> bool:
        return bool(self._pending_events) or self.scheduler.state.has_work

    def load(self) -> EngineLoad:
        """The current load of the engine. Thread-safe: it reads only lengths and single values."""
        state = self.scheduler.state
        return EngineLoad(
            num_running=len(state.running),
            max_running=state.config.max_running,
            is_backlogged=bool(state.waiting and state.num_left_waiting),
            prompt_token_seconds=state.budget.prompt_token_seconds,
        )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if it cannot be served."""
        self.scheduler.add(request)
        self._progress.follow(request)
        self._notify(lambda observer: observer.submitted(request))

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> tuple[Event, ...]:
        """End a request now. An unknown id is ignored: the request may just have ended."""
        events = self.scheduler.abort(request_id, reason)
        if events:
            self._progress.forget(request_id)
            self._notify_aborted(request_id, reason, self.clock())
        return events

    def step(self) -> tuple[Event, ...]:
        """Run one step and return its events. Call it while `has_work`.

        If the executor raises, the requests of that step end with an error and the engine continues. It also
        continues after a KeyboardInterrupt, which is raised: the next call returns the events of both steps.
        """
        now = self.clock()
        self._expire(now)
        if self.scheduler.state.has_work:
            self._run_step(now)
        events, self._pending_events = tuple(self._pending_events), []
        return events

    def _run_step(self, now: float) -> None:
        scheduler, state = self.scheduler, self.scheduler.state
        interrupt: BaseException | None = None
        schedule = scheduler.schedule(now)
        scheduler.commit(schedule)
        error, model_time = None, 0.0
        try:
            result = self._executor.execute(state, schedule)
            events, model_time = scheduler.complete(result, ended := self.clock()), result.elapsed
        except (
            BaseException
        ) as caught:  # Whatever the model does, the loop and the other requests must continue.
            if state.in_flight is None:
                raise
            ended = self.clock()
            error = caught.message if isinstance(caught, LegatoError) else type(caught).__name__
            events = scheduler.fail(f"the model step that this request was in failed ({error})")
            if isinstance(caught, Exception):
                # The text of the exception may be logged: a runner knows no prompts, only numbers.
                logger.exception(
                    "step %d of %d tokens failed: %s", schedule.step, schedule.num_tokens, caught
                )
            else:
                interrupt = caught  # Ctrl-C or an exit, which the caller handles after the bookkeeping.
        self._pending_events += (*self._progress.report(state, schedule, ended), *events)
        record = StepRecord(
            schedule=schedule,
            events=events,
            ended=ended,
            model_time=model_time,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            blocks_used=state.pool.num_used,
            blocks_cached=state.pool.num_cached,
            blocks_total=state.pool.num_blocks,
            error=error,
        )
        self._notify(lambda observer: observer.stepped(record))
        if interrupt is not None:
            raise interrupt

    def _expire(self, now: float) -> None:
        """End requests whose deadline has passed, before any work is done for them."""
        for event in self.scheduler.expire(now):
            self._pending_events.append(event)
            self._notify_aborted(event.request_id, event.reason, now)

    def _notify_aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        self._notify(lambda observer: observer.aborted(request_id, reason, now))

    def _notify(self, call: Callable[[Observer], None]) -> None:
        """Requests are served even if metrics fail: an observer that raises is removed."""
        for observer in tuple(self._observers):
            try:
                call(observer)
            except Exception as error:
                self._observers.remove(observer)
                logger.exception("%s failed and is not called any more: %s", type(observer).__name__, error)
