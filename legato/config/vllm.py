"""vLLM's names for settings: which of ours they mean, what Legato does anyway, and why others are refused.

Renamed settings take the same values. All other names of vLLM are in `_OTHERS` and `_FAMILIES`.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from legato.errors import ConfigError

RENAMED: Final = MappingProxyType(
    {
        "max_num_batched_tokens": "max_batch_tokens",
        "max_num_seqs": "max_running",
        "scheduling_policy": "policy",
        "enable_prefix_caching": "prefix_cache",
        "num_gpu_blocks_override": "num_blocks",
        "kv_cache_memory_bytes": "kv_memory",
        "kv_cache_dtype": "kv_dtype",
        "uvicorn_log_level": "log_level",
        "enable_log_requests": "log_prompts",
    }
)
"""vLLM's name -> ours. The command line takes both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A setting of vLLM for which Legato has no setting with the same values."""

    why: str
    """Why it is refused, and what to use instead."""
    same: tuple[str, ...] = ()
    """Values that ask for what Legato does anyway, as texts in lower case."""
    becomes: tuple[tuple[str, str, object], ...] = ()
    """(value, our setting, its value): other values that Legato can follow."""
    setting: str | None = None
    """Our setting, which takes all values but those above."""
    is_switch: bool = False
    """Whether the flag takes no value: --x means true, --no-x means false."""


def legato_name(name: str) -> str | None:
    """Our name for a setting that vLLM calls `name`; None if we have none."""
    other = _OTHERS.get(name)
    return RENAMED.get(name) or (other.setting if other else None)


def find_other(name: str) -> Other | None:
    """What is known of a name of vLLM that is not in `RENAMED`; None for a name that vLLM does not have."""
    if name in _OTHERS:
        return _OTHERS[name]
    return next((Other(why=why) for prefix, why in _FAMILIES.items() if name.startswith(prefix)), None)


def translate(name: str, value: object, *, shown: str | None = None) -> tuple[str, object] | None:
    """Our setting and its value for a setting of vLLM; None if it asks for what Legato does anyway.

    Raises `ConfigError` that says why, if Legato cannot do it; `shown` is what the user wrote for the name.
    """
    if name in RENAMED:
        return RENAMED[name], value
    other = find_other(name)
    text = str(value).lower()
    if other is None:
        raise ConfigError(f"{shown or name}: no such setting")
    for of, setting, becomes in other.becomes:
        if text == of:
            return setting, becomes
    if text in other.same:
        return None
    if other.setting is not None:
        return other.setting, value
    accepted = f" (accepted: {', '.join(other.same)})" if other.same and not other.is_switch else ""
    raise ConfigError(f"{shown or name}: not a setting of Legato: {other.why}{accepted}", param=name)


TRUE_OR_FALSE = "it is true or false"
ONE_DEVICE = "Legato computes in one process on one device"
BY_REQUEST = "each request says how it wants to be sampled"
BY_FILES = "the model's files decide"
NO_GRAPHS = "steps run without CUDA graphs and without torch.compile"
NO_LORA = "LoRA adapters are not supported"
NO_DRAFTS = "speculative decoding is not supported"
NO_IMAGES = "models read text only, no images, audio or video"
NO_TLS = "Legato speaks plain HTTP; put a proxy that speaks HTTPS in front of it"
PROMPT_LOG = "log_prompts logs whole prompts, or none"
SHARED_STEPS = "policy and prefill_chunk say how prompts share the steps"
HUB = "the main branch of a hub repository is fetched; give a folder for another revision"

_OTHERS: Final[dict[str, Other]] = {
    # the scheduler
    "enable_chunked_prefill": Other(
        why=TRUE_OR_FALSE, same=("true",), becomes=(("false", "prefill_chunk", 0),), is_switch=True
    ),
    "long_prefill_token_threshold": Other(why="a number of tokens", same=("0",), setting="prefill_chunk"),
    "max_num_partial_prefills": Other(why=SHARED_STEPS),
    "max_long_partial_prefills": Other(why=SHARED_STEPS),
    "scheduler_delay_factor": Other(why="a waiting prompt is never held back", same=("0", "0.0")),
    "num_scheduler_steps": Other(why="every step is decided by itself", same=("1",)),
    "num_lookahead_slots": Other(why=NO_DRAFTS, same=("0",)),
    "preemption_mode": Other(why="a preempted request is computed again", same=("recompute",)),
    "async_scheduling": Other(
        why="a step is decided when the one before it is done", same=("false",), is_switch=True
    ),
    "stream_interval": Other(why="every token is sent as it comes", same=("1",)),
    "scheduler_cls": Other(why="policy chooses the order"),
    # memory
    "gpu_memory_utilization": Other(why="kv_memory sets the size of the KV cache in bytes, such as 4GiB"),
    "swap_space": Other(
        why="nothing is swapped out: a preempted request is computed again", same=("0", "0.0")
    ),
    "cpu_offload_gb": Other(why="weights stay where they are", same=("0", "0.0")),
    "calculate_kv_scales": Other(why="the KV cache is not kept in 8 bits", same=("false",), is_switch=True),
    "prefix_caching_hash_algo": Other(why="there is one kind of hash"),
    "disable_hybrid_kv_cache_manager": Other(why="there is one KV cache for all layers", is_switch=True),
    # the model
    "tokenizer": Other(why="the tokenizer comes with the model's files"),
    "tokenizer_mode": Other(why=BY_FILES, same=("auto",)),
    "skip_tokenizer_init": Other(why="the server needs the tokenizer", same=("false",), is_switch=True),
    "trust_remote_code": Other(
        why="code that comes with a model is never run", same=("false",), is_switch=True
    ),
    "revision": Other(why=HUB),
    "code_revision": Other(why=HUB),
    "tokenizer_revision": Other(why=HUB),
    "hf_token": Other(why="the variable HF_TOKEN holds it"),
    "hf_overrides": Other(why=BY_FILES),
    "hf_config_path": Other(why=BY_FILES),
    "rope_scaling": Other(why=BY_FILES),
    "rope_theta": Other(why=BY_FILES),
    "disable_sliding_window": Other(why=BY_FILES, same=("false",), is_switch=True),
    "download_dir": Other(why="the variable HF_HOME moves the hub's files, LEGATO_CACHE_DIR Legato's own"),
    "load_format": Other(why=BY_FILES, same=("auto", "safetensors", "gguf")),
    "config_format": Other(why=BY_FILES, same=("auto", "hf")),
    "quantization": Other(why="weights chooses how weights are kept; a GGUF file is quantized already"),
    "model_impl": Other(why="there is one implementation of each model", same=("auto",)),
    "task": Other(why="models generate text", same=("auto", "generate")),
    "runner": Other(why="models generate text", same=("auto", "generate")),
    "convert": Other(why="models generate text", same=("auto", "none")),
    "seed": Other(why="a request brings its own seed, and without one its draws differ each time"),
    "override_generation_config": Other(why=BY_REQUEST),
    "logits_processors": Other(why=BY_REQUEST),
    "logits_processor_pattern": Other(why=BY_REQUEST),
    "logprobs_mode": Other(why="there is one kind of log-probabilities"),
    "enable_sleep_mode": Other(why="stop the server instead", same=("false",), is_switch=True),
    "enable_prompt_embeds": Other(why="prompts are texts or token ids", same=("false",), is_switch=True),
    # devices
    "enforce_eager": Other(why=NO_GRAPHS, same=("true",), is_switch=True),
    "compilation_config": Other(why=NO_GRAPHS),
    "max_seq_len_to_capture": Other(why=NO_GRAPHS),
    "cuda_graph_sizes": Other(why=NO_GRAPHS),
    "attention_backend": Other(why="attention chooses it: auto, cpu or reference"),
    "tensor_parallel_size": Other(why=ONE_DEVICE, same=("1",)),
    "pipeline_parallel_size": Other(why=ONE_DEVICE, same=("1",)),
    "data_parallel_size": Other(why=ONE_DEVICE, same=("1",)),
    "api_server_count": Other(why=ONE_DEVICE, same=("1",)),
    "distributed_executor_backend": Other(why=ONE_DEVICE, same=("uni",)),
    "enable_expert_parallel": Other(why=ONE_DEVICE, same=("false",), is_switch=True),
    "disable_custom_all_reduce": Other(why=ONE_DEVICE, is_switch=True),
    "worker_cls": Other(why=ONE_DEVICE, same=("auto",)),
    "headless": Other(why=ONE_DEVICE, is_switch=True),
    # the API
    "enable_auto_tool_choice": Other(
        why="a request without tools is answered without tools", same=("true",), is_switch=True
    ),
    "enable_request_id_headers": Other(
        why="every answer has an X-Request-ID", same=("true",), is_switch=True
    ),
    "enable_prompt_tokens_details": Other(
        why="usage always says how many prompt tokens were cached", same=("true",), is_switch=True
    ),
    "enable_force_include_usage": Other(
        why="clients ask for it with stream_options", same=("false",), is_switch=True
    ),
    "return_tokens_as_token_ids": Other(why="requests ask for return_token_ids", is_switch=True),
    "chat_template_content_format": Other(why="the chat template decides", same=("auto",)),
    "response_role": Other(why="replies are the assistant's", same=("assistant",)),
    "guided_decoding_backend": Other(why="llguidance is the back end", same=("auto", "guidance")),
    "structured_outputs_config": Other(why="llguidance is the back end"),
    "tool_parser_plugin": Other(why="tool_call_parser chooses one of those that are built in"),
    "tool_server": Other(why="tools are called by clients"),
    "reasoning_parser": Other(why="thoughts of a model stay in the text of its reply"),
    "root_path": Other(why="a proxy that adds a path has to take it away again"),
    "middleware": Other(why="put a proxy in front of the server"),
    "allow_credentials": Other(why="browsers need allowed_origins alone", is_switch=True),
    "allowed_methods": Other(why="browsers need allowed_origins alone"),
    "allowed_headers": Other(why="browsers need allowed_origins alone"),
    "disable_fastapi_docs": Other(why="/openapi.json is always served", is_switch=True),
    # logs
    "disable_log_requests": Other(
        why=TRUE_OR_FALSE,
        becomes=(("true", "log_prompts", False), ("false", "log_prompts", True)),
        is_switch=True,
    ),
    "disable_uvicorn_access_log": Other(
        why=TRUE_OR_FALSE,
        becomes=(("true", "access_log", False), ("false", "access_log", True)),
        is_switch=True,
    ),
    "disable_log_stats": Other(
        why="log_level warning leaves the statistics out", same=("false",), is_switch=True
    ),
    "max_log_len": Other(why=PROMPT_LOG),
    "log_config_file": Other(why="log_level and log_format say what is logged, and how"),
    "enable_log_outputs": Other(why="replies are not logged", same=("false",), is_switch=True),
    "otlp_traces_endpoint": Other(why="there are no traces; /metrics and journal tell what happens"),
    "collect_detailed_traces": Other(why="there are no traces; /metrics and journal tell what happens"),
    "show_hidden_metrics_for_version": Other(why="no metric is hidden"),
}

_FAMILIES: Final = MappingProxyType(
    {
        "ssl_": NO_TLS,
        "enable_ssl": NO_TLS,
        "enable_lora": NO_LORA,
        "lora_": NO_LORA,
        "max_lora": NO_LORA,
        "max_cpu_loras": NO_LORA,
        "fully_sharded_loras": NO_LORA,
        "speculative_": NO_DRAFTS,
        "num_speculative_tokens": NO_DRAFTS,
        "limit_mm_": NO_IMAGES,
        "mm_": NO_IMAGES,
        "media_io": NO_IMAGES,
        "allowed_local_media": NO_IMAGES,
        "allowed_media": NO_IMAGES,
        "data_parallel_": ONE_DEVICE,
        "kv_transfer_": ONE_DEVICE,
        "kv_events_": ONE_DEVICE,
        "kv_offloading_": "the KV cache stays where it is",
        "ray_": ONE_DEVICE,
        "nnodes": ONE_DEVICE,
        "node_rank": ONE_DEVICE,
        "master_": ONE_DEVICE,
        "h11_": "max_body_size limits what is read of a request",
        "mamba_": "models of this kind are not supported",
        "guided_": "llguidance is the back end",
    }
)
"""How further names of vLLM begin -> why they are refused."""

SHORT_FLAGS: Final = MappingProxyType(
    {
        "-tp": "--tensor-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-dp": "--data-parallel-size",
        "-q": "--quantization",
        "-O": "--compilation-config",
    }
)
"""vLLM's short flags."""
