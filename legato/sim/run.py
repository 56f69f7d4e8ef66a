"""From settings, costs and a workload to what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from legato.config import EngineSettings, in_seconds
from legato.core.block_pool import BlockPool
from legato.core.scheduler import Scheduler
from legato.cost.cost_model import CostModel
from legato.engine.cost_file import CostFile
from legato.engine.protocol import Observer
from legato.engine.scheduling import make_scheduler, resolve_target, scheduler_config
from legato.errors import ConfigError
from legato.metrics.timeline import RequestTimeline, Targets
from legato.sim.recorder import Recorder, Steps
from legato.sim.simulator import Refused, simulate
from legato.sim.times import StepTimes
from legato.workload.arrival import Arrival

MAX_BLOCKS = 10_000_000
"""The scheduler keeps a list of them, which takes memory even if no model does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A workload that was served."""

    scheduler: Scheduler
    """As it was at the end."""
    targets: Targets
    """Of requests without their own."""
    steps: Steps
    ended: tuple[RequestTimeline, ...]
    """In the order in which they ended."""
    refused: tuple[Refused, ...]
    num_preemptions: int


def new_scheduler(
    engine: EngineSettings, costs: CostFile, model: CostModel, max_model_len: int | None = None
) -> Scheduler:
    """That of a server with these settings, calibrated with `costs`, from which `model` has learned and goes
    on. Its KV cache is as large as the measured one, unless the settings say how many blocks."""
    num_blocks = engine.num_blocks or -(-costs.num_blocks * costs.block_size // engine.block_size)
    if num_blocks > MAX_BLOCKS:
        raise ConfigError(
            f"a simulated KV cache has at most {MAX_BLOCKS:,} blocks, not {num_blocks}", param="num_blocks"
        )
    pool = BlockPool(num_blocks, engine.block_size)
    longest = min(max_model_len or costs.max_model_len, num_blocks * engine.block_size)
    config = scheduler_config(engine, max_model_len=longest, vocab_size=costs.vocab_size)
    return make_scheduler(engine, config, pool, model)


def run_simulation(
    engine: EngineSettings,
    costs: CostFile,
    arrivals: Sequence[Arrival],
    *,
    max_model_len: int | None = None,
    noise: bool = True,
    seed: int = 0,
    targets: Targets | None = None,
    max_steps: int | None = None,
    observers: Sequence[Observer] = (),
) -> Simulation:
    """With `noise`, steps differ from what is predicted as the measured ones did; `seed` draws how.

    `targets` are what requests without their own are judged by; None: those that the settings aim at.
    After `max_steps` it ends, whatever is left.
    """
    model = costs.cost_model()
    engine = resolve_target(engine, model)
    times = StepTimes(model.cost, costs.ratios(model.cost) if noise else (), seed=seed)
    scheduler = new_scheduler(engine, costs, model, max_model_len)
    if targets is None:
        targets = Targets(ttft=in_seconds(engine.ttft_target_ms), tpot=engine.tpot_target)
    recorder = Recorder(targets)
    refused = simulate(scheduler, arrivals, times, max_steps=max_steps, observers=(recorder, *observers))
    return Simulation(
        scheduler=scheduler,
        targets=targets,
        steps=recorder.steps,
        ended=tuple(recorder.ended),
        refused=refused,
        num_preemptions=recorder.num_preemptions,
    )
