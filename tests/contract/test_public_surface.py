"""What must not change by accident: public names, settings, and that the core needs nothing."""

import subprocess
import sys

import pytest

import legato
from legato.config import Settings, fields


def test_the_public_names() -> None:
    names = [
        *("LLM", "AsyncLLM", "Completion", "ConfigError", "ConstraintError", "ContextLengthError"),
        *("DeadlineError", "Delta", "EngineSettings", "LegatoError", "ModelError", "ModelSettings"),
        *("QueueFullError", "RequestError", "SamplingParams", "StepError", "UnavailableError", "__version__"),
    ]
    assert legato.__all__ == names
    assert all(getattr(legato, name).__name__ == name for name in names[:-1])
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        legato.Engine  # noqa: B018


def test_the_settings_by_name() -> None:
    """A new or lost setting shows here; names are unique over all sections, for flags and variables."""
    names = {
        "model": [
            "model",
            "served_model_name",
            "chat_template",
            "trust_special_tokens",
            "generation_config",
            "max_model_len",
            "dtype",
            "weights",
        ],
        "engine": [
            "tpot_target_ms",
            "ttft_target_ms",
            "calibrate",
            "max_batch_tokens",
            "prefill_chunk",
            "max_running",
            "min_chunk",
            "policy",
            "admission",
            "prefix_cache",
            "block_size",
            "num_blocks",
            "kv_memory",
            "device",
            "threads",
            "attention",
            "kv_dtype",
        ],
        "server": [
            "host",
            "port",
            "uds",
            "uds_mode",
            "api_key",
            "api_key_file",
            "allowed_origins",
            "allowed_hosts",
            "max_waiting",
            "max_waiting_tokens",
            "max_body_size",
            "max_wait",
            "max_body_memory",
            "max_n",
            "max_prompts",
            "max_logprobs",
            "step_timeout",
            "sse_keep_alive",
            "shutdown_timeout",
            "send_timeout",
            "receive_timeout",
            "timeout_keep_alive",
            "journal",
            "tool_call_parser",
            "unknown_fields",
            "access_log",
            "log_prompts",
            "log_level",
            "log_format",
        ],
    }
    assert [(section, name) for section, name, _ in fields()] == [
        (section, name) for section, all_names in names.items() for name in all_names
    ]
    flat = [name for all_names in names.values() for name in all_names]
    assert len(set(flat)) == len(flat)
    assert set(Settings.model_json_schema()["properties"]) == set(names)


def test_every_setting_has_a_help_text() -> None:
    assert all(field.description for _, _, field in fields())


def test_the_core_needs_the_standard_library_only() -> None:
    code = (
        "import sys, legato.core.scheduler, legato.core.plan\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'asyncio', 'threading', 'logging'} & set(sys.modules)\n"
        "print(*sorted(heavy))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
