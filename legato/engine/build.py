"""Builds an engine from settings. This module alone knows all components."""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from legato.config import EngineSettings, ModelSettings
from legato.core.block_pool import BlockPool
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost, StepShape
from legato.engine.cost_file import CostFile
from legato.engine.engine import Engine
from legato.engine.protocol import Runner
from legato.engine.scheduling import make_scheduler, resolve_target, scheduler_config
from legato.engine.step_costs import step_costs
from legato.engine.text_components import load_text_components
from legato.errors import ConfigError
from legato.models.load import OpenedModel, open_checked
from legato.models.source import ModelFiles, find_files
from legato.models.spec import ModelSpec
from legato.runner.exactness import ExactnessReport
from legato.runner.load import RunnerOptions, load_runner
from legato.runner.memory_plan import CacheSize, StepSize
from legato.text.chat import ChatTemplate
from legato.text.sampling_defaults import SamplingDefaults
from legato.text.tokenizer import Tokenizer

COST_CHOICES = ("device", "dtype", "attention", "weights")
"""The choices of the runner that affect the cost of steps."""
EXAMPLE_CONTEXT = 512
"""The context of each decode in the step that the start-up output describes."""
TOKENS_PER_REQUEST = 1024
"""The default KV cache has room for this many tokens of each running request, or for one request of full
length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its engine, tokenizer and chat template."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None for a base model."""
    sampling_defaults: SamplingDefaults
    """The sampling parameters of requests that do not set them."""
    name: str
    """The name in the API."""
    source: Path
    """The file or folder of the model."""
    spec: ModelSpec
    settings: EngineSettings
    """The settings in force, with a number in place of an automatic target."""
    choices: Mapping[str, str]
    """The choices with their reasons, for the start-up output."""
    check_exactness: Callable[[float, int], ExactnessReport]
    """(seconds, seed): compare logits bit by bit over random schedules. Must not be called while the engine
    has work."""
    measure_costs: Callable[[], CostFile]
    """Measure the costs of steps, for some seconds. It overwrites the KV cache, so call it before the engine
    has work."""
    new_engine: Callable[[EngineSettings, CostFile], Engine]
    """Another engine for the same model, with other scheduler settings and known costs. Only one of them may
    have work."""

    @property
    def max_model_len(self) -> int:
        return self.engine.scheduler.state.config.max_model_len


def build(
    model: ModelSettings,
    engine: EngineSettings,
    *,
    cache_dir: Path,
    files: ModelFiles | None = None,
    progress: Callable[[str], None] = lambda _: None,
    for_chat: bool = False,
) -> LoadedModel:
    """Load a model and build its engine.

    `progress` is called with a description of each stage. `files` are the model's files, if they are known
    already. Raises `ModelError` for invalid model files and `ConfigError` for settings that do not fit the
    model, with `for_chat` also for a model without a chat template. All other errors are raised before the
    weights are read.
    """
    files = files or find_files(model.model, cache_dir=cache_dir, progress=progress)
    opened = open_checked(files, cache_dir=cache_dir, progress=progress)
    max_model_len = _max_model_len(model.max_model_len, opened.spec)
    progress(f"reading the tokenizer of {opened.name}")
    text = load_text_components(model, opened, files, for_chat=for_chat)
    loaded = load_runner(opened, _runner_options(model, engine, max_model_len), progress=progress)
    pool = BlockPool(loaded.runner.num_blocks, loaded.runner.block_size)
    capacity = pool.num_blocks * pool.block_size
    _check_capacity(model.max_model_len, capacity)
    settings = engine if engine.calibrate else resolve_target(engine, None)
    config = scheduler_config(
        settings, max_model_len=min(max_model_len, capacity), vocab_size=opened.spec.vocab_size
    )
    measure_costs = partial(
        step_costs,
        loaded.runner,
        config,
        model=opened.name,
        source=files.path,
        choices={name: loaded.choices[name] for name in COST_CHOICES} | {"kv_dtype": engine.kv_dtype},
        cache_dir=cache_dir,
        progress=progress,
    )
    costs = measure_costs().cost_model() if engine.calibrate and engine.tpot_target_ms else CostModel()
    settings = resolve_target(settings, costs)
    scheduler = make_scheduler(settings, config, pool, costs)
    return LoadedModel(
        engine=Engine.on_runner(scheduler, loaded.runner, clock=time.monotonic),
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        sampling_defaults=text.sampling_defaults,
        name=model.served_model_name or opened.name,
        source=files.path,
        spec=opened.spec,
        check_exactness=loaded.runner.check_exactness,
        measure_costs=partial(measure_costs, anew=True),
        new_engine=partial(_new_engine, loaded.runner, config),
        settings=settings,
        choices=_model(model, opened, files)
        | loaded.choices
        | _choices(model, settings, scheduler, text.sampling_defaults)
        | {"target": _target(engine, settings.tpot_target, costs)},
    )


def _new_engine(runner: Runner, config: SchedulerConfig, engine: EngineSettings, costs: CostFile) -> Engine:
    pool = BlockPool(runner.num_blocks, runner.block_size)
    config = scheduler_config(engine, max_model_len=config.max_model_len, vocab_size=config.vocab_size)
    scheduler = make_scheduler(engine, config, pool, costs.cost_model())
    return Engine.on_runner(scheduler, runner, clock=time.monotonic)


def _runner_options(model: ModelSettings, engine: EngineSettings, max_model_len: int) -> RunnerOptions:
    usual = engine.running_limit * min(TOKENS_PER_REQUEST, max_model_len)
    return RunnerOptions(
        device=engine.device,
        threads=engine.threads,
        dtype=model.dtype,
        weights=model.weights,
        attention=engine.attention,
        kv_dtype=engine.kv_dtype,
        cache=CacheSize(
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            kv_memory=engine.kv_memory,
            useful_tokens=max(max_model_len, usual),
            useful_why="one request of max_model_len tokens"
            if max_model_len >= usual
            else f"{TOKENS_PER_REQUEST} tokens for each of max_running requests",
            max_model_len=max_model_len,
        ),
        step=StepSize(tokens=engine.token_limit, rows=engine.running_limit),
    )


def _choices(
    model: ModelSettings,
    engine: EngineSettings,
    scheduler: Scheduler,
    sampling_defaults: SamplingDefaults,
) -> dict[str, str]:
    return {
        "prefill": _prefill(engine),
        "order": f"{engine.policy}; admission by {engine.admission} need; "
        + ("prefixes shared" if engine.prefix_cache else "no prefixes shared"),
        "sampling": f"{sampling_defaults} where a request does not say ({model.generation_config})",
        "context": f"at most {scheduler.state.config.max_model_len} tokens of prompt and reply",
    }


def _model(model: ModelSettings, opened: OpenedModel, files: ModelFiles) -> dict[str, str]:
    name, spec = model.served_model_name or opened.name, opened.spec
    return {"model": f"{name}, {spec.family} of {spec.num_layers} layers, from {files.path}"}


def _prefill(engine: EngineSettings) -> str:
    limit = f"at most {engine.token_limit} tokens a step"
    if engine.prefill_chunk is None:
        return f"prompts take what decodes leave of a step; {limit}"
    if engine.prefill_chunk == 0:
        return f"a prompt is computed whole in one step, without chunking; {limit}, or one prompt"
    return f"at most {engine.prefill_chunk} tokens of a prompt in a step; {limit}"


def _target(asked: EngineSettings, target: float | None, costs: CostModel) -> str:
    automatic = asked.tpot_target_ms == "auto"
    if target is None:
        reason = " (auto needs a calibration)" if automatic else ""
        return f"none{reason}: a step has at most {asked.max_batch_tokens or 256} tokens"
    text = f"no gap between tokens above {1000 * target:g} ms" + (" (auto)" if automatic else "")
    if not asked.calibrate:
        return f"{text}; what steps cost is not measured, the steps will teach it"
    num = asked.running_limit
    alone = partial(_decode_seconds, costs.cost)
    within = bisect_right(range(1, num + 1), target, key=alone)
    reach = "" if within == num else f"; more than {within} decodes take longer than the target by themselves"
    return (
        f"{text}; by calibration a step of 1 decode takes {1000 * alone(1):.3g} ms, of {num} "
        f"{1000 * alone(num):.3g} ms, at {EXAMPLE_CONTEXT} tokens each (error {costs.error(0.5):.1%} at p50, "
        f"{costs.error(0.9):.1%} at p90){reach}"
    )


def _decode_seconds(cost: StepCost, num: int) -> float:
    return cost.seconds(StepShape(num, 0, num * EXAMPLE_CONTEXT, 0, True))


def _check_capacity(asked: int | None, capacity: int) -> None:
    if asked is not None and asked > capacity:
        raise ConfigError(
            f"max_model_len is {asked}; the KV cache holds {capacity} tokens", param="max_model_len"
        )


def _max_model_len(asked: int | None, spec: ModelSpec) -> int:
    if asked is not None and asked > spec.max_position:
        raise ConfigError(
            f"max_model_len is {asked}; the model was made for at most {spec.max_position} tokens",
            param="max_model_len",
        )
    return asked or spec.max_position
