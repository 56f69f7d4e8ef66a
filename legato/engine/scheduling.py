"""Creates a scheduler from settings: its config, budget and policies."""

from legato.config import EngineSettings
from legato.core.block_pool import BlockPool
from legato.core.budget import TargetBudget
from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import SCHEDULING_POLICIES
from legato.core.state import SchedulerConfig
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepShape

COMFORTABLE_GAP = 0.2
"""Seconds between tokens that a person who reads along does not notice: five tokens per second."""
TYPICAL_DECODES, TYPICAL_CONTEXT = 8, 512
"""The automatic target is chosen for this many decodes with this many tokens of context each."""
MIN_PREFILL_SHARE, MAX_PREFILL_SHARE = 0.7, 5 / 6
"""The share of a step's time that the automatic target leaves to prompts beside the typical decodes."""


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
    """The target in seconds if the user sets none. `max_decodes` is the most decodes that ever run.

    It is `COMFORTABLE_GAP`, but not so short that prompts beside the typical decodes get less than
    `MIN_PREFILL_SHARE` of a step, and not so long that they get more than `MAX_PREFILL_SHARE`.
    """
    num = min(TYPICAL_DECODES, max_decodes)
    decodes = model.margin * model.cost.seconds(StepShape(num, 0, num * TYPICAL_CONTEXT, 0, True))
    return min(max(COMFORTABLE_GAP, decodes / (1 - MIN_PREFILL_SHARE)), decodes / (1 - MAX_PREFILL_SHARE))


def resolve_target(engine: EngineSettings, costs: CostModel | None) -> EngineSettings:
    """The settings with a number in place of an automatic target. Without `costs`, there is no target."""
    if engine.tpot_target_ms != "auto":
        return engine
    target = 0.0 if costs is None else 1000 * automatic_target(costs, engine.running_limit)
    return engine.model_copy(update={"tpot_target_ms": float(round(target)) or target})


def make_scheduler(
    engine: EngineSettings, config: SchedulerConfig, pool: BlockPool, costs: CostModel
) -> Scheduler:
    """`config` must be made from the same settings, with a resolved target. `costs` learns from every
    step."""
    return Scheduler(
        config,
        pool,
        prefill_policy=prefill_policy(engine.prefill_chunk),
        budget=TargetBudget(engine.token_limit, costs, target=engine.tpot_target, min_chunk=engine.min_chunk),
        policy=SCHEDULING_POLICIES[engine.policy](engine.token_limit),
    )


def prefill_policy(prefill_chunk: int | None) -> PrefillPolicy:
    """The policy of a setting: None fills the budget, 0 turns chunking off, n limits chunks to n tokens."""
    if prefill_chunk is None:
        return FillBudget()
    return Chunked(prefill_chunk) if prefill_chunk else WholePrompt()
