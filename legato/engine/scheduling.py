"""From settings to a scheduler: which budget, order and prefill policy they mean."""

from legato.config import EngineSettings
from legato.core.block_pool import BlockPool
from legato.core.budget import TargetBudget
from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import SCHEDULING_POLICIES
from legato.core.state import SchedulerConfig
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepShape

COMFORTABLE = 0.2
"""Seconds between tokens that a person who reads along does not notice: five tokens a second."""
TYPICAL_DECODES, TYPICAL_CONTEXT = 8, 512
"""The decodes, and the tokens before each of them, for which the automatic target is chosen."""
LEAST_PREFILL, MOST_PREFILL = 0.7, 5 / 6
"""Shares of a step's time that the automatic target leaves to prompts beside the typical decodes."""


def scheduler_config(engine: EngineSettings, *, max_model_len: int, vocab_size: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch_tokens=engine.token_limit,
        max_running=engine.running_limit,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        min_chunk=engine.min_chunk,
        prefix_cache=engine.prefix_cache,
        strict=engine.admission == "strict",
    )


def automatic_target(model: CostModel, max_decodes: int) -> float:
    """The target in seconds for a user who names none.

    `COMFORTABLE`, but not so short that prompts beside the typical decodes get less than `LEAST_PREFILL` of a
    step, and not so long that they get more than `MOST_PREFILL`. `max_decodes`: the most that ever run.
    """
    num = min(TYPICAL_DECODES, max_decodes)
    alone = model.margin * model.cost.seconds(StepShape(num, 0, num * TYPICAL_CONTEXT, 0, True))
    return min(max(COMFORTABLE, alone / (1 - LEAST_PREFILL)), alone / (1 - MOST_PREFILL))


def resolve_target(engine: EngineSettings, costs: CostModel | None) -> EngineSettings:
    """The settings with a number in place of an automatic target, which there is none of without `costs`."""
    if engine.tpot_target_ms != "auto":
        return engine
    target = 0.0 if costs is None else 1000 * automatic_target(costs, engine.running_limit)
    return engine.model_copy(update={"tpot_target_ms": float(round(target)) or target})


def make_scheduler(
    engine: EngineSettings, config: SchedulerConfig, pool: BlockPool, costs: CostModel
) -> Scheduler:
    """`config` is that of the settings, whose target is resolved. `costs` learns from every step."""
    return Scheduler(
        config,
        pool,
        prefill_policy=prefill_policy(engine.prefill_chunk),
        budget=TargetBudget(engine.token_limit, costs, target=engine.tpot_target, min_chunk=engine.min_chunk),
        policy=SCHEDULING_POLICIES[engine.policy](engine.token_limit),
    )


def prefill_policy(prefill_chunk: int | None) -> PrefillPolicy:
    """The policy of the setting: None fills the budget, 0 turns chunking off, n takes at most n tokens."""
    if prefill_chunk is None:
        return FillBudget()
    return Chunked(prefill_chunk) if prefill_chunk else WholePrompt()
