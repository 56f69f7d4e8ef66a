"""Looks for the best setup: a coarse grid first, then one setting at a time around the best so far.

Best is who keeps its targets for the most requests; of those within `AS_GOOD` of it, who has the least p99 of
the time to first token; of equals, who was tried first. The settings as they are stay if the best is hardly
better: nobody should turn a knob for nothing. Deterministic: the same trials in the same order.
Knows a trial only by these two numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from legato.config import EngineSettings
from legato.tune.setup import Policy, Setup
from legato.tune.trial import Trial

AS_GOOD = 0.01
"""A share of good requests that is less than the best by no more is as good."""
NEAR = 0.1
"""A time to first token that is longer by no more of it is as short: by less, two runs differ by chance."""
POLICIES: tuple[Policy, ...] = ("fair", "fcfs", "shortest")
RUNNING = (8, 16, 32, 64, 128, 256)
CHUNKS = (64, 128, 256, 512, 1024)
OTHER_TARGETS = (0.5, 0.7, 1.4, 2.0)
"""Times the target that was asked for: only drawn, to show what another one would give."""
LEAST_BUDGET = 64
MAX_ROUNDS = 3
"""Of refining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is tried."""

    present: Setup
    """The settings as they are: the first trial."""
    budgets: tuple[Setup, ...]
    """Ways to bound a step's prompts; all else as at present."""
    drawn: tuple[Setup, ...]
    """Other targets: tried for the picture, never chosen."""

    @property
    def num_trials(self) -> int:
        """About how many trials a search makes."""
        return (len(self.budgets) + 1) * len(POLICIES) + len(self.drawn) + 2 * (len(RUNNING) + len(CHUNKS))


def space_around(engine: EngineSettings, *, longest_prompt: int, max_model_len: int) -> Space:
    """The target of `engine`; budgets of 64 tokens and its doubles up to the model's longest text, or to the
    workload's longest prompt, which then fits in one step; and no chunking."""
    present = Setup.of(engine)
    greatest = min(max_model_len, longest_prompt)
    budgets = [replace(present, max_batch_tokens=None, prefill_chunk=None)]
    tokens = LEAST_BUDGET
    while True:
        budgets.append(_fixed(present, tokens))
        if tokens >= greatest:
            break
        tokens *= 2
    budgets.append(replace(_fixed(present, max_model_len + engine.running_limit), prefill_chunk=0))
    return Space(
        present=present,
        budgets=tuple(setup for setup in budgets if setup.possible),
        drawn=tuple(
            replace(budgets[0], tpot_target_ms=factor * present.tpot_target_ms) for factor in OTHER_TARGETS
        ),
    )


def _fixed(present: Setup, tokens: int) -> Setup:
    return replace(present, tpot_target_ms=0.0, max_batch_tokens=tokens, prefill_chunk=None)


def best_of(trials: Sequence[Trial]) -> Trial:
    """Of at least one."""
    enough = max(trial.good for trial in trials) - AS_GOOD
    return min((trial for trial in trials if trial.good >= enough), key=lambda trial: trial.ttft("p99"))


def worth_changing(present: Trial, best: Trial) -> bool:
    """Whether the best is so much better than the settings as they are that it is worth it."""
    is_as_good = present.good >= best.good - AS_GOOD
    return not is_as_good or present.ttft("p99") > (1 + NEAR) * best.ttft("p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found."""

    trials: tuple[Trial, ...]
    """In the order in which they ran; the first has the settings as they are."""
    best: Trial
    """The first one, unless another is worth changing to."""
    complete: bool
    """Whether it came to its end before the steps did."""
    num_steps: int
    """Simulated, over all trials."""


def search(
    run: Callable[[Setup], Trial],
    space: Space,
    *,
    max_steps: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """Run trials until there is nothing better around the best, or `max_steps` steps were simulated."""
    trials: dict[Setup, Trial] = {}
    num_steps = 0

    def try_all(setups: Iterator[Setup]) -> bool:
        """False once the steps are used up."""
        nonlocal num_steps
        for setup in setups:
            if setup in trials or not setup.possible:
                continue
            if trials and num_steps >= max_steps:
                return False
            progress(
                f"trial {len(trials) + 1} of about {space.num_trials}, {num_steps:,} steps of at most "
                f"{max_steps:,}: {setup.in_words()}"
            )
            trials[setup] = run(setup)
            num_steps += trials[setup].report.num_steps
        return True

    def best() -> Trial:
        return best_of([trial for setup, trial in trials.items() if setup not in space.drawn])

    complete = try_all(_coarse(space)) and try_all(iter(space.drawn))
    for _ in range(MAX_ROUNDS):
        before = best().setup
        for values in (_budgets, _chunks, _running, _policies):
            complete = complete and try_all(values(best().setup))
        if best().setup == before or not complete:
            break
    present = trials[space.present]
    chosen = best() if worth_changing(present, best()) else present
    return Found(trials=tuple(trials.values()), best=chosen, complete=complete, num_steps=num_steps)


def _coarse(space: Space) -> Iterator[Setup]:
    yield space.present
    for budget in space.budgets:
        yield from _policies(budget)


def _policies(around: Setup) -> Iterator[Setup]:
    """An order by priority is what its requests are for, and stays."""
    if around.policy == "priority":
        yield around
        return
    yield from (replace(around, policy=policy) for policy in POLICIES)


def _running(around: Setup) -> Iterator[Setup]:
    now = around.on(EngineSettings()).running_limit
    yield from (replace(around, max_running=most) for most in RUNNING if most != now)


def _chunks(around: Setup) -> Iterator[Setup]:
    if around.prefill_chunk != 0:
        yield from (replace(around, prefill_chunk=most) for most in (None, *CHUNKS))


def _budgets(around: Setup) -> Iterator[Setup]:
    """Between this fixed budget and its neighbours."""
    if not around.tpot_target_ms and around.max_batch_tokens is not None and around.prefill_chunk != 0:
        for factor in (1 / sqrt(2), sqrt(2)):
            yield replace(around, max_batch_tokens=round(factor * around.max_batch_tokens))
