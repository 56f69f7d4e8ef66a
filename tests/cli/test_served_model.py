"""The product as a user has it: a server process on the demo model, and clients that do what clients do."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

FRANCE = "The capital of France is"
SENTENCE = "Chunked prefill keeps every stream on its beat while a long prompt is read. "


@dataclass(frozen=True)
class Server:
    """A running `legato serve`."""

    process: subprocess.Popen[str]
    url: str
    journal: Path

    def steps(self) -> list[dict[str, Any]]:
        """The engine's own record of every step so far."""
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    def metrics(self) -> dict[str, float]:
        page = httpx.get(f"{self.url}/metrics").text.splitlines()
        samples = [line.rsplit(" ", 1) for line in page if line and not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in samples if "_bucket" not in name}

    def wait_idle(self, timeout: float = 10) -> dict[str, float]:
        deadline = time.monotonic() + timeout
        while True:
            now = self.metrics()
            busy = (
                now["vllm:num_requests_running"]
                + now["vllm:num_requests_waiting"]
                + now["legato_blocks_used"]
            )
            if not busy or time.monotonic() > deadline:
                return now
            time.sleep(0.1)


def start(folder: Path, *arguments: str) -> Server:
    command = [sys.executable, "-c", "from legato.cli.main import run; run()", "serve", *arguments]
    journal = folder / "journal.jsonl"
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--port", "0", "--journal", str(journal)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("Legato is ready on http://127.0.0.1:"), errors.read_text()
    return Server(process, line.split()[-1], journal)


@pytest.fixture(scope="module")
def server(gemma_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    running = start(folder, str(gemma_path), "--served-model-name", "gemma", "--max-batch-tokens", "64")
    with running.process as process:
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=40) == 0
    assert "Traceback" not in (folder / "stderr").read_text()


def long_prompt(num_tokens: int, url: str) -> list[int]:
    text = SENTENCE * (num_tokens // 10)
    ids: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert len(ids) >= num_tokens
    return ids[:num_tokens]


def test_curl_streams_a_completion(server: Server) -> None:
    body = {"prompt": FRANCE, "max_tokens": 5, "temperature": 0, "stream": True}
    out = subprocess.run(
        [
            "curl",
            "-sN",
            f"{server.url}/v1/completions",
            "-H",
            "content-type: application/json",
            "-d",
            json.dumps(body),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in out.stdout.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert texts == [" the", " capital", " of", " the", " country"]


def completion(server: Server, **body: object) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    return answer


def test_i_04_a_seed_gives_four_different_replies_that_repeat(server: Server) -> None:
    def texts(n: int) -> list[str]:
        answer = completion(server, prompt=FRANCE, n=n, seed=5, temperature=1, max_tokens=8)
        return [choice["text"] for choice in answer["choices"]]

    assert len(set(texts(4))) == 4
    assert texts(4) == texts(4)
    assert texts(1) == texts(4)[:1]


def test_b_05_scoring_a_reply_gives_the_bits_of_its_generation(server: Server) -> None:
    """As evaluation harnesses do it: the text as a prompt with echo and no reply. It is computed in chunks of
    64 tokens, the reply was one token a step."""
    prompt = long_prompt(150, server.url)[::-1]  # not the beginning of another test's prompt
    said = completion(
        server,
        prompt=prompt,
        max_tokens=12,
        temperature=0,
        logprobs=3,
        return_token_ids=True,
        ignore_eos=True,
    )["choices"][0]
    text = [*prompt, *said["token_ids"]]
    answer = completion(server, prompt=text, echo=True, logprobs=3, max_tokens=0)
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == 0
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert len(choice["logprobs"][key]) == len(text)
        assert choice["logprobs"][key][-12:] == said["logprobs"][key]
    assert completion(server, prompt=text, echo=True, logprobs=3, max_tokens=0)["choices"] == [choice]


def test_the_openai_client_works_unchanged(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["gemma"]
        whole = client.completions.create(model="gemma", prompt=FRANCE, max_tokens=5, temperature=0)
        stream = client.completions.create(
            model="gemma", prompt=FRANCE, max_tokens=5, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 5)


def test_the_async_openai_client_works_unchanged(server: Server) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="gemma", prompt=FRANCE, max_tokens=5, temperature=0, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == " the capital of the country"

    asyncio.run(scenario())


async def stream_tokens(client: httpx.AsyncClient, body: dict[str, Any], times: list[float]) -> None:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())


def test_a_long_prompt_never_makes_a_step_larger_than_the_budget_nor_a_stream_wait(server: Server) -> None:
    """8 streams, a prompt of 2,000 tokens, a budget of 64: from the engine's own records."""
    first = len(server.steps())

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            stream = {"prompt": FRANCE, "max_tokens": 90, "ignore_eos": True, "temperature": 0}
            tokens: list[list[float]] = [[] for _ in range(8)]
            streams = [asyncio.create_task(stream_tokens(client, stream, times)) for times in tokens]
            while not all(tokens):
                await asyncio.sleep(0.02)
            ids = await asyncio.to_thread(long_prompt, 2000, server.url)
            await stream_tokens(client, {"prompt": ids, "max_tokens": 1}, [])
            await asyncio.gather(*streams)

    asyncio.run(scenario())
    steps = server.steps()[first:]
    mixed = [step for step in steps if step["chunks"] and step["decodes"]]
    prefilled = sum(
        length for step in mixed for _, _, length, _ in step["chunks"] if len(step["decodes"]) == 8
    )
    assert max(step["tokens"] for step in steps) == 64
    assert prefilled >= 1900, "the streams were there during the prefill"
    for step in mixed:
        assert set(step["decodes"]) <= set(step["sampled"]), "a stream got no token in a step"
    long_steps = [step for step in steps if any(length > 8 for _, _, length, _ in step["chunks"])]
    assert {len(step["decodes"]) for step in long_steps[1:]} == {8}, "a decode was left out of a mixed step"
    assert server.wait_idle()["legato_blocks_used"] == 0


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.big)])
def test_killing_clients_at_random_leaves_nothing_behind(server: Server, seconds: int) -> None:
    """C-01, C-04: no block in use, no request running, and the next answer is the same as ever."""
    rng = random.Random(seconds)

    async def client_that_leaves(client: httpx.AsyncClient) -> None:
        body = {
            "prompt": SENTENCE * rng.choice([1, 1, 3, 30]),
            "max_tokens": rng.choice([1, 10, 200]),
            "stream": rng.random() < 0.7,
            "n": rng.choice([1, 1, 2]),
        }
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            await asyncio.wait_for(client.post("/v1/completions", json=body), rng.random() * 2)

    async def scenario() -> None:
        end = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def keep_coming() -> None:
                while time.monotonic() < end:
                    await client_that_leaves(client)

            await asyncio.gather(*(keep_coming() for _ in range(12)))

    asyncio.run(scenario())
    left = server.wait_idle()
    assert left["vllm:num_requests_running"] == 0
    assert left["vllm:num_requests_waiting"] == 0
    assert left["legato_blocks_used"] == 0
    test_the_openai_client_works_unchanged(server)


def test_a_second_server_on_the_same_port_says_so(server: Server, tmp_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    out = subprocess.run(
        [sys.executable, "-c", "from legato.cli.main import run; run()", "serve", "--port", port],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in out.stderr.splitlines()[-1]
