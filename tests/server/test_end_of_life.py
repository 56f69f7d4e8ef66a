"""A signal ends the process in time, whatever its threads, its step and its event loop do."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from legato.server.transport import shutdown
from legato.server.transport.shutdown import MIN_SHUTDOWN_S, ShutdownTimes

HUNG_S = 60
"""How long what hangs would go on: far longer than any end may take."""
SLOW_S = 10
"""What a slow machine may add."""
STREAM = {"prompt": "hi", "max_tokens": 30, "stream": True}
SERVE = """
import asyncio, logging, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from server_rig import ScriptedRunner, build_service, serve_service
from legato.server.transport.event_loop import Turns, run
from legato.server.transport.sockets import bind
from legato.server.transport.shutdown import exit_process

hung, timeout = sys.argv[1], float(sys.argv[2])

def before(plan):
    time.sleep(0.02)
    if hung == "step" and plan.sample and plan.sample[0].num_generated == 3:
        time.sleep(60)

async def main():
    loop = asyncio.get_running_loop()
    if hung == "thread":
        ThreadPoolExecutor(1).submit(time.sleep, 60)
    if hung == "executor":
        loop.run_in_executor(None, time.sleep, 60)
    if hung == "loop":
        loop.call_later(1.0, time.sleep, 60)
    service = build_service(ScriptedRunner(before=before))
    ready = partial(print, flush=True)
    await serve_service(service, bind("127.0.0.1", 0), on_ready=ready, shutdown_timeout=timeout)

run(main(), Turns())
exit_process()
"""


@contextmanager
def hanging(what: str, timeout: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    folder = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, what, str(timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip().rpartition(" ")[2]
        finally:
            process.kill()


@pytest.mark.parametrize("hung", ["thread", "executor", "step"])
def test_a_signal_ends_the_process_within_the_timeout_whatever_hangs(hung: str) -> None:
    with hanging(hung, 3) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=HUNG_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            text = "\n".join(lines)
        process.wait(HUNG_S / 2)
        assert time.monotonic() - began < 3 + SLOW_S
    if hung == "step":
        assert '"type":"service_unavailable_error"' in text, "its client is told"
    else:
        assert text.rstrip().endswith("[DONE]")
    if hung != "executor":  # asyncio waits for its own, and nothing of ours is there
        assert process.returncode == 0


@pytest.mark.parametrize("num_signals", [1, 2])
def test_an_event_loop_that_hangs_does_not_keep_the_process(num_signals: int) -> None:
    with hanging("loop", 3 if num_signals == 1 else HUNG_S) as (process, url):
        wait_for_hang(url)
        began = time.monotonic()
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # two signals at once are one
        process.wait(HUNG_S / 2)
        assert time.monotonic() - began < 3 + SLOW_S
        assert process.stderr is not None
        assert "most recent call first" in process.stderr.read(), "it says what hung"


def wait_for_hang(url: str) -> None:
    with suppress(httpx.TimeoutException):
        while True:
            httpx.get(f"{url}/health", timeout=1)


def test_a_second_signal_does_not_wait_for_a_step_that_hangs() -> None:
    with hanging("step", HUNG_S) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=HUNG_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            began = time.monotonic()
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
            assert '"type":"service_unavailable_error"' in "\n".join(lines)
        process.wait(HUNG_S / 2)
        assert time.monotonic() - began < SLOW_S


def test_a_hangup_drains_however_often_it_comes() -> None:
    with hanging("nothing", 30) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            for _ in range(3):
                process.send_signal(signal.SIGHUP)
                time.sleep(0.05)
            assert httpx.get(f"{url}/ready").status_code == 503
            assert "\n".join(lines).rstrip().endswith("[DONE]")
        assert process.wait(SLOW_S) == 0


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        ([signal.SIGTERM] * 5, [30.0, MIN_SHUTDOWN_S]),
        ([signal.SIGHUP] * 3, [30.0]),
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGINT], [30.0, MIN_SHUTDOWN_S]),
    ],
)
def test_further_signals_do_not_put_the_end_off(
    sent: list[signal.Signals], limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor may repeat itself, and somebody may hold Ctrl-C down."""
    asked: list[float] = []
    monkeypatch.setattr(shutdown, "_exit_after", asked.append)

    async def main() -> None:
        with shutdown.signals(shutdown.Shutdown(), 30.0):
            for kind in sent:
                signal.raise_signal(kind)

    asyncio.run(main())
    assert asked == limits


@pytest.mark.parametrize("timeout", [0.0, 0.3, 1.0, 3.0, 30.0, 600.0])
def test_the_parts_of_an_end_fit_into_the_whole(timeout: float) -> None:
    schedule = ShutdownTimes(timeout)
    assert schedule.total == max(timeout, MIN_SHUTDOWN_S)
    assert 0 <= schedule.replies <= timeout
    assert schedule.replies >= 0.8 * timeout - MIN_SHUTDOWN_S
    assert schedule.step > 0
    assert schedule.flush > 0
    assert schedule.replies + schedule.step + schedule.flush < schedule.total
