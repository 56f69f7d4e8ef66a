"""Flags that are ready to paste say exactly the settings that were meant."""

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from legato.cli.commands import app
from legato.config import EngineSettings, ModelSettings, Settings
from legato.tune.setup import Setup, serve_command

SETUPS = st.builds(
    Setup,
    tpot_target_ms=st.just(0.0) | st.floats(0.5, 3_600_000),
    max_batch_tokens=st.none() | st.integers(64, 10**7),
    prefill_chunk=st.none() | st.integers(0, 4096),
    policy=st.sampled_from(["fair", "fcfs", "shortest", "priority"]),
    max_running=st.none() | st.integers(1, 64),
)
BASES = st.builds(
    EngineSettings,
    ttft_target_ms=st.none() | st.floats(0.5, 60_000),
    prefix_cache=st.booleans(),
    admission=st.sampled_from(["expected", "strict"]),
    kv_memory=st.none() | st.integers(1, 1 << 45),
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(setup=SETUPS, base=BASES, weights=st.sampled_from(["auto", "w8"]))
def test_the_command_means_the_settings(setup: Setup, base: EngineSettings, weights: str) -> None:
    meant = Settings(
        model=ModelSettings(model="some/model name.gguf", weights=weights),  # type: ignore[arg-type]
        engine=setup.on(base),
    )
    words = shlex.split(serve_command(meant))
    assert words[:3] == ["legato", "serve", "some/model name.gguf"]
    out = CliRunner().invoke(app, ["config", "--model", *words[2:]], catch_exceptions=False)
    assert json.loads(out.stdout)["engine"] == meant.engine.model_dump()
    assert json.loads(out.stdout)["model"] == meant.model.model_dump()


def test_what_is_the_default_is_not_said() -> None:
    assert serve_command(Settings()) == "legato serve gemma3-270m"
    engine = EngineSettings(tpot_target_ms=100.0, max_running=32, prefix_cache=False)
    assert serve_command(Settings(engine=engine)) == (
        "legato serve gemma3-270m --tpot-target-ms 100 --max-running 32 --no-prefix-cache"
    )


@given(SETUPS, BASES)
def test_a_setup_is_what_it_was_put_on(setup: Setup, base: EngineSettings) -> None:
    assert Setup.of(setup.on(base)) == setup


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (Setup(tpot_target_ms=100.0), "target 100 ms, fair, at most 64 run"),
        (Setup(max_batch_tokens=32, policy="fcfs"), "budget 32, fcfs, at most 32 run"),
        (Setup(max_batch_tokens=9000, prefill_chunk=0), "no chunking, fair, at most 64 run"),
        (Setup(prefill_chunk=64, max_running=7), "budget 256, chunks of at most 64, fair, at most 7 run"),
    ],
)
def test_setups_in_words(setup: Setup, words: str) -> None:
    assert setup.in_words() == words
    assert setup.possible
    assert not replace(setup, max_running=10**6).possible
