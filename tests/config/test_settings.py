"""The one table of settings: values, limits, sources, messages."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from legato.config import (
    EngineSettings,
    ModelSettings,
    ServerSettings,
    Settings,
    fields,
    load_settings,
)
from legato.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "runtime.toml"
    file.write_text(text)
    return file


def test_defaults_need_no_file() -> None:
    settings = load_settings(None, {})
    assert settings == Settings()
    assert settings.engine.prefill_chunk is None
    assert settings.server.host == "127.0.0.1"


def test_the_file_is_read_and_overrides_win(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nprefill_chunk = 0\nmax_batch_tokens = 100\n[server]\nport = 0\n")
    settings = load_settings(file, {"max_batch_tokens": 200, "host": "::1"})
    assert (settings.engine.prefill_chunk, settings.engine.max_batch_tokens) == (0, 200)
    assert (settings.server.host, settings.server.port) == ("::1", 0)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 2**32), ("1.5 gib", 3 * 2**29), ("512MB", 512 * 10**6), ("100", 100), ("64k", 64_000)],
)
def test_sizes_are_read_with_units(text: str, num_bytes: int) -> None:
    assert load_settings(None, {"kv_memory": text}).engine.kv_memory == num_bytes


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[engine]\nchunk = 3", r"runtime.toml: engine.chunk: no such setting; did you mean min_chunk\?$"),
        ("[motor]\nx = 1", r"runtime.toml: motor: no such setting$"),
        ("[engin]\nx = 1", r"runtime.toml: engin: no such setting; did you mean engine\?$"),
        (
            "max_running = 1",
            r"runtime.toml: max_running: no such setting; it belongs in the table \[engine\]$",
        ),
        ("[server]\nmax_running = 1", r"server.max_running: no such setting; .*the table \[engine\]$"),
        ("[engine]\nmax_num_seqs = 1", r"no such setting; Legato's name for it is engine.max_running$"),
        ("[server]\nprt = 1", r"server.prt: no such setting; did you mean port\?$"),
        ("[engine]\npolicy = 'fiar'", r"\(not 'fiar'\); did you mean fair\?$"),
        ("[engine]\npolicy = 'qwertz'", r"\(not 'qwertz'\)$"),
        ("engine = 3", r"engine: not a table"),
        (
            "[engine]\nmax_batch_tokens = 0",
            r"engine.max_batch_tokens: .*greater than or equal to 1 \(not 0\)",
        ),
        ("[engine]\nmax_batch_tokens = '9'", r"engine.max_batch_tokens: .*valid integer \(not '9'\)"),
        ("[engine]\nmax_batch_tokens = true", r"engine.max_batch_tokens: .*valid integer \(not True\)"),
        ("[engine]\nprefill_chunk = -1", r"engine.prefill_chunk: .*greater than or equal to 0"),
        ("[engine]\nkv_memory = '4 parsecs'", r"engine.kv_memory: not a size such as 4GiB"),
        ("[engine]\nmin_chunk = 0", r"engine.min_chunk: .*greater than or equal to 1"),
        ("[engine]\nblock_size = -1", r"engine.block_size: .*greater than or equal to 1"),
        ("[engine]\npolicy = 'lottery'", r"engine.policy: .*'fair', 'fcfs', 'shortest' or 'priority'"),
        ("[engine]\nadmission = 'bold'", r"engine.admission: .*'expected' or 'strict'"),
        ("[server]\nmax_waiting = 0", r"server.max_waiting: .*greater than or equal to 1"),
        ("[server]\nmax_waiting = -1", r"server.max_waiting: .*greater than or equal to 1"),
        ("[server]\nstep_timeout = 0", r"server.step_timeout: .*greater than 0 \(not 0\)"),
        ("[server]\nmax_body_size = 'large'", r"server.max_body_size: not a size"),
        ("[server]\nmax_n = 0", r"server.max_n: .*greater than or equal to 1"),
        ("[server]\napi_key = 'sk-secret'", r"server.api_key: .*valid tuple$"),
        ("[server]\napi_key = ['sk-secret', 5]", r"server.api_key.1: .*valid string$"),
        ("[server]\nport = 70000", r"server.port: .*less than or equal to 65535"),
        ("[model]\ndtype = 'int3'", r"model.dtype: .*'auto'"),
        ("[engine", "not valid TOML"),
    ],
)
def test_a_wrong_file_ends_with_one_line(tmp_path: Path, toml: str, message: str) -> None:
    """D-15."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(write(tmp_path, toml), {})
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message


SENTINELS = {
    *("tpot_target_ms", "prefill_chunk", "port", "max_logprobs"),
    *("sse_keep_alive", "shutdown_timeout", "max_wait"),
}
"""Their 0 has a meaning of its own, which their help tells where it is not plain."""


@pytest.mark.parametrize(
    "name", [name for _, name, field in fields() if re.search(r"\b(int|float)\b", str(field.annotation))]
)
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_numbers_are_refused_by_name(name: str, value: int) -> None:
    """D-15: for every setting that is a number, those to come as well."""
    if value == 0 and name in SENTINELS:
        load_settings(None, {name: value})
        return
    with pytest.raises(ConfigError, match=name):
        load_settings(None, {name: value})


def test_keys_are_not_shown() -> None:
    settings = load_settings(None, {"api_key": ["sk-secret", "sk-secret-2"]})
    assert [key.get_secret_value() for key in settings.server.api_key] == ["sk-secret", "sk-secret-2"]
    assert "secret-" not in repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert "sk" not in settings.model_dump_json()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        load_settings(tmp_path / "none.toml", {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_running": 65, "max_batch_tokens": 64}, r"max_running \(65\) is above max_batch_tokens \(64\)"),
        ({"num_blocks": 4, "kv_memory": "1GiB"}, "give one of them"),
        ({"max_running": -2}, r"engine.max_running: .*\(not -2\)"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(None, overrides)


@pytest.mark.parametrize(
    ("toml", "overrides", "start"),
    [
        ("[engine]\nmax_running = 0", {"port": 1}, r".*runtime\.toml: engine\.max_running: "),
        ("[engine]\nmax_running = 9", {"max_running": 0}, r"--max-running: "),
        ("[engine]\nmax_running = 9", {"max_batch_tokens": 8}, r"LEGATO_MAX_BATCH_TOKENS: max_running \(9\)"),
        ("[engine]\nmax_running = 9999", {"port": 1}, r".*runtime\.toml: engine: max_running \(9999\)"),
    ],
)
def test_an_error_names_where_the_value_came_from(
    tmp_path: Path, toml: str, overrides: dict[str, object], start: str
) -> None:
    origins = {"max_running": "--max-running", "max_batch_tokens": "LEGATO_MAX_BATCH_TOKENS"}
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, toml), overrides, origins)
    assert re.match(start, caught.value.message), caught.value.message


def test_the_schema_describes_the_file() -> None:
    schema = Settings.model_json_schema()
    assert json.dumps(schema)
    engine = schema["$defs"]["EngineSettings"]["properties"]
    assert engine["min_chunk"]["minimum"] == 1
    assert engine["max_batch_tokens"]["anyOf"][0]["minimum"] == 1
    assert engine["prefill_chunk"]["description"].startswith("Most tokens of one prompt")
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("name", [name for _, name, _ in fields()])
def test_every_misspelled_setting_gets_a_suggestion(tmp_path: Path, name: str) -> None:
    section = next(section for section, known, _ in fields() if known == name)
    for wrong in (name[:-1], name + "x", name.upper(), name.replace("_", "-")):
        if wrong == name:
            continue
        with pytest.raises(ConfigError, match=r"; did you mean") as caught:
            load_settings(write(tmp_path, f"[{section}]\n{wrong} = 1"), {})
        assert caught.value.message.endswith(f"did you mean {name}?"), wrong


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EngineSettings(max_runing=3),
            "EngineSettings: max_runing: no such setting; did you mean max_ru",
        ),
        (lambda: EngineSettings(max_num_seqs=3), "Legato's name for it is max_running"),
        (
            lambda: EngineSettings(max_running="3"),
            r"EngineSettings: max_running: must be a valid integer \(not '3'\)",
        ),
        (lambda: EngineSettings(policy="fiar"), "did you mean fair?"),
        (lambda: EngineSettings(max_running=9, max_batch_tokens=8), r"max_running \(9\) is above"),
        (lambda: EngineSettings(3), r"EngineSettings takes settings by name: EngineSettings\(name=value\)"),
        (lambda: ModelSettings(model=3), r"ModelSettings: model: must be a valid string \(not 3\)"),
        (lambda: ServerSettings(api_key="sk-1"), r"ServerSettings: api_key: must be a valid tuple$"),
        (lambda: Settings(engine={"max_runing": 3}), "did you mean max_running?"),
    ],
)
def test_misuse_of_the_classes_is_a_config_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "target"), [("auto", "auto"), ("120", 120.0), (120, 120.0), ("0", 0.0), ("1e2", 100.0)]
)
def test_a_target_is_a_number_or_auto(value: object, target: object) -> None:
    engine = load_settings(None, {"tpot_target_ms": value}).engine
    assert engine.tpot_target_ms == target
    if target != "auto":
        assert engine.tpot_target == (target / 1000 if target else None)  # type: ignore[operator]


@pytest.mark.parametrize("value", ["fast", "", "-1", "nan", "inf", 3_600_001, True])
def test_a_target_that_is_neither_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="tpot_target_ms"):
        load_settings(None, {"tpot_target_ms": value})
