"""From settings to an engine: the one place that knows all the parts."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from legato.config import EngineSettings, ModelSettings
from legato.core.block_pool import BlockPool
from legato.core.order import ORDERS
from legato.core.prefill import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.scheduler import Scheduler, SchedulerConfig
from legato.engine.engine import Engine
from legato.errors import ConfigError, ModelError
from legato.models.load import OpenedModel, open_model
from legato.models.source import resolve
from legato.models.spec import ModelSpec
from legato.runner.exactness import ExactnessReport
from legato.runner.load import RunnerOptions, load_runner
from legato.text.chat import ChatTemplate, load_template, template_from_folder, template_from_gguf
from legato.text.sampling_defaults import (
    SamplingDefaults,
    sampling_defaults_from_folder,
    sampling_defaults_from_gguf,
)
from legato.text.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

KEPT_LOADS = 4
"""The KV cache takes no more, by default, than so many times what all running requests can ever hold, where
prefixes are shared: what ended stays to be found again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine with what surrounds it."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None for a base model: it has no chat format."""
    sampling_defaults: SamplingDefaults
    """What a request gets that does not say how to sample."""
    name: str
    """What the model is called in the API."""
    source: Path
    """The model's file or folder."""
    spec: ModelSpec
    choices: Mapping[str, str]
    """What was chosen, and why, in words."""
    check_exactness: Callable[[float, int], ExactnessReport]
    """Compare logits bit by bit over random schedules: (seconds, seed). Not while the engine has work."""

    @property
    def max_model_len(self) -> int:
        return self.engine.scheduler.config.max_model_len


def build(
    model: ModelSettings,
    engine: EngineSettings,
    *,
    cache_dir: Path,
    progress: Callable[[str], None] = lambda _: None,
    for_chat: bool = False,
) -> Built:
    """Load a model and build its engine. `progress` is told each stage in words.

    Raises `ModelError` for the model's files and `ConfigError` for settings that do not go with it; with
    `for_chat` also for a model without a chat template. All that is wrong beside the weights is said before
    they are read.
    """
    progress(f"finding {model.model}")
    files = resolve(model.model, cache_dir=cache_dir)
    opened = open_model(files)
    max_model_len = _max_model_len(model.max_model_len, opened.spec)
    progress(f"reading the tokenizer of {opened.name}")
    tokenizer = _tokenizer(opened, files.path)
    chat_template = _chat_template(model.chat_template, opened, files.path, tokenizer)
    if for_chat and chat_template is None:
        raise ConfigError(
            f"{opened.name} is a base model without a chat template; give one with --chat-template, use "
            "`legato generate`, or a model made for it: qwen2.5-coder-1.5b-instruct",
            param="chat_template",
        )
    sampling_defaults = _sampling_defaults(model.generation_config, opened, files.path)
    loaded = load_runner(opened, _runner_options(model, engine, max_model_len), progress=progress)
    pool = BlockPool(loaded.runner.num_blocks, loaded.runner.block_size)
    capacity = pool.num_blocks * pool.block_size
    if model.max_model_len is not None and model.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len is {model.max_model_len}; the KV cache holds {capacity} tokens",
            param="max_model_len",
        )
    scheduler = _scheduler(
        engine, pool, max_model_len=min(max_model_len, capacity), vocab_size=opened.spec.vocab_size
    )
    return Built(
        engine=Engine(scheduler, loaded.runner, clock=time.monotonic),
        tokenizer=tokenizer,
        chat_template=chat_template,
        sampling_defaults=sampling_defaults,
        name=model.served_model_name or opened.name,
        source=files.path,
        spec=opened.spec,
        check_exactness=loaded.runner.check_exactness,
        choices=loaded.choices
        | {
            "prefill": f"{scheduler.prefill_policy}, at most {engine.max_batch_tokens} tokens a step",
            "order": f"{engine.policy}; admission by {engine.admission} need; "
            + ("prefixes shared" if engine.prefix_cache else "no prefixes shared"),
            "sampling": f"{sampling_defaults} where a request does not say ({model.generation_config})",
            "context": f"at most {scheduler.config.max_model_len} tokens of prompt and reply",
        },
    )


def _runner_options(model: ModelSettings, engine: EngineSettings, max_model_len: int) -> RunnerOptions:
    num_loads = KEPT_LOADS if engine.prefix_cache else 1
    return RunnerOptions(
        device=engine.device,
        threads=engine.threads,
        dtype=model.dtype,
        weights=model.weights,
        attention=engine.attention,
        kv_dtype=engine.kv_dtype,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        kv_memory=engine.kv_memory,
        useful_tokens=num_loads * engine.running_limit * max_model_len,
        useful_why=f"{num_loads} x max_running x max_model_len tokens",
    )


def _scheduler(engine: EngineSettings, pool: BlockPool, *, max_model_len: int, vocab_size: int) -> Scheduler:
    config = SchedulerConfig(
        max_batch_tokens=engine.max_batch_tokens,
        max_running=engine.running_limit,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        min_chunk=engine.min_chunk,
        prefix_cache=engine.prefix_cache,
        strict=engine.admission == "strict",
    )
    policy, order = prefill_policy(engine.prefill_chunk), ORDERS[engine.policy](engine.max_batch_tokens)
    return Scheduler(config, pool, prefill_policy=policy, order=order)


def prefill_policy(prefill_chunk: int | None) -> PrefillPolicy:
    """The policy of the setting: None fills the budget, 0 turns chunking off, n takes at most n tokens."""
    if prefill_chunk is None:
        return FillBudget()
    return Chunked(prefill_chunk) if prefill_chunk else WholePrompt()


def _max_model_len(asked: int | None, spec: ModelSpec) -> int:
    if asked is not None and asked > spec.max_position:
        raise ConfigError(
            f"max_model_len is {asked}; the model was made for at most {spec.max_position} tokens",
            param="max_model_len",
        )
    return asked or spec.max_position


def _tokenizer(opened: OpenedModel, path: Path) -> Tokenizer:
    if opened.gguf is None:
        return tokenizer_from_folder(path, opened.spec.vocab_size)
    with _in_file(path):
        return tokenizer_from_gguf(opened.gguf.metadata, opened.spec.vocab_size)


def _sampling_defaults(asked: str, opened: OpenedModel, path: Path) -> SamplingDefaults:
    if asked == "none":
        return SamplingDefaults()
    if opened.gguf is None:
        return sampling_defaults_from_folder(path)
    with _in_file(path):
        return sampling_defaults_from_gguf(opened.gguf.metadata)


def _chat_template(
    asked: str | None, opened: OpenedModel, path: Path, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template asked for, or the model's own; None if there is neither."""
    if asked is not None:
        return _parse(load_template(asked), tokenizer)
    source = template_from_folder(path) if opened.gguf is None else None
    with _in_file(path):
        if opened.gguf is not None:
            source = template_from_gguf(opened.gguf.metadata)
        return None if source is None else _parse(source, tokenizer)


def _parse(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(
        source,
        bos_token=tokenizer.special_text(tokenizer.bos_id),
        eos_token=tokenizer.special_text(tokenizer.eos_id),
    )


@contextmanager
def _in_file(path: Path) -> Iterator[None]:
    """Name the file in errors of parts that see only what was in it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from error
