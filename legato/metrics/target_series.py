"""The exported series about targets: what they are, how often they were missed, what bounded the steps, and
how good the predictions were. The formulas are those of `timeline` and `journal`."""

from collections import deque

from legato.core.budget import LimitedBy
from legato.cost.cost_model import WINDOW, quantile
from legato.metrics.journal import StepRecord
from legato.metrics.series import Catalogue
from legato.metrics.timeline import RequestTimeline, StepChanges, Targets

QUANTILES = (0.5, 0.9)
"""Of the prediction errors."""


class TargetSeries:
    def __init__(self, new: Catalogue, targets: Targets) -> None:
        kinds = (("ttft",), ("tpot",), ("request",))
        target = new.gauge("legato_target_seconds", "The server's own targets.", ("target",), ())
        for seconds, kind in ((targets.ttft, "ttft"), (targets.tpot, "tpot")):
            if seconds is not None:
                target.set(seconds, kind)
        self._judged = new.counter(
            "legato_target_samples_total",
            "First tokens (ttft), gaps (tpot) and ended requests (request) that had a target.",
            ("target",),
            kinds,
        )
        self._missed = new.counter(
            "legato_target_missed_total", "Those of them that missed it.", ("target",), kinds
        )
        self._steps = new.counter(
            "legato_steps_total",
            "Steps, by what bounded the prompt tokens in them.",
            ("limit",),
            [(limit.value,) for limit in LimitedBy],
        )
        self._unreachable = new.gauge(
            "legato_target_unreachable",
            "1 if the decodes of the newest step alone take longer than the target.",
        )
        self._margin = new.gauge(
            "legato_step_margin", "What predicted step times are multiplied by to keep a target."
        )
        self._margin.set(1)
        self._error = new.gauge(
            "legato_step_prediction_error",
            "Relative error of predicted step times, over the last steps; no sample before the first.",
            ("share",),
            (),
        )
        self._errors: deque[float] = deque(maxlen=WINDOW)

    def changed(self, changes: StepChanges) -> None:
        for timeline in changes.started:
            self._judge("ttft", timeline.met_ttft)
        self._judged.add(changes.num_judged, "tpot")
        self._missed.add(changes.num_late, "tpot")
        for timeline in changes.finished:
            self.ended(timeline)

    def ended(self, timeline: RequestTimeline) -> None:
        self._judge("request", timeline.met_targets)

    def stepped(self, record: StepRecord) -> None:
        schedule = record.schedule
        self._steps.add(1, schedule.limited_by.value)
        self._unreachable.set(int(schedule.limited_by is LimitedBy.UNREACHABLE))
        if schedule.target is not None:
            self._margin.set(schedule.margin)
        if record.prediction_error is not None:
            self._errors.append(record.prediction_error)

    def counted(self) -> None:
        """Bring up to date what is not worth its time in every step."""
        for q in QUANTILES if self._errors else ():
            self._error.set(quantile(self._errors, q), str(q))

    def _judge(self, kind: str, met: bool | None) -> None:
        if met is not None:
            self._judged.add(1, kind)
            self._missed.add(not met, kind)
