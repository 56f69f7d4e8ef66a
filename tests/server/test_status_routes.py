"""The routes beside the two endpoints, in this process: models, tokens, health, version, metrics."""

import asyncio
import time

import pytest
from server_rig import BOS, EOS, MAX_LEN, MODEL, ScriptedRunner, ask, build_service, in_process, json_bytes

from legato.core.step_plan import StepPlan
from legato.server.app import create_app


def test_the_model_card_has_what_load_generators_read() -> None:
    listing = ask("/v1/models", method="GET").json()
    assert listing["object"] == "list"
    (card,) = listing["data"]
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": MODEL,
        "object": "model",
        "owned_by": "legato",
        "root": MODEL,
        "parent": None,
        "max_model_len": MAX_LEN,
        "sampling_defaults": {},
    }


def test_one_models_card_is_found_by_a_name_with_a_slash() -> None:
    assert ask(f"/v1/models/{MODEL}", method="GET").json()["id"] == MODEL
    answer = ask("/v1/models/other", method="GET")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [BOS, 104, 195, 169]),
        ({"prompt": "h", "add_special_tokens": False}, [104]),
        ({"prompt": "<eos>", "add_special_tokens": False}, [*b"<eos>"]),
        ({"prompt": "<eos>", "add_special_tokens": False, "parse_special": True}, [EOS]),
        ({"prompt": "", "model": MODEL}, [BOS]),
        ({"messages": [{"role": "user", "content": "a"}]}, [BOS, *b"<user>a<assistant>"]),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
            [BOS, *b"<user>a"],
        ),
        ({"messages": [{"role": "user", "content": "<eos><bos>"}]}, [BOS, *b"<user><eos><bos><assistant>"]),
        (
            {
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<eos>"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            [BOS, *b"<user>a<assistant><eos>"],
        ),
    ],
)
def test_tokenize_gives_the_ids_of_texts_and_messages(body: dict[str, object], tokens: list[int]) -> None:
    answer = ask("/tokenize", body).json()
    assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": MAX_LEN}


def test_detokenize_undoes_tokenize() -> None:
    long = "long é text " * 1000
    for text in ("", "hé", "<eos>", long):
        tokens = ask("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert ask("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize("tokens", [[-1], [258], [1.0], [True], "a", None])
def test_detokenize_refuses_what_is_no_list_of_ids(tokens: object) -> None:
    answer = ask("/detokenize", {"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/completion", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_b_18_unknown_paths_and_methods_answer_in_openais_shape(method: str, path: str, status: int) -> None:
    answer = ask(path, {}, method=method)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


def test_the_version_is_what_the_service_says() -> None:
    assert ask("/version", method="GET").json() == {"version": "0.0.0"}


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_a_living_server_is_healthy_and_ready(path: str) -> None:
    answer = ask(path, method="GET")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert ask(path, method="HEAD").status_code == 200


def test_a_server_that_loads_or_drains_is_alive_and_not_ready_and_refuses_work() -> None:
    async def run() -> None:
        service = build_service()
        async with in_process(service) as client:
            for status in ("loading", "draining"):
                if status == "loading":
                    service.readiness.__init__()  # type: ignore[misc]
                else:
                    service.readiness.set_draining()
                obstacle = service.readiness.problem
                answer = await client.get("/health")
                assert (answer.status_code, answer.json()) == (200, {"status": status})
                for answer in (
                    await client.get("/ready"),
                    await client.post("/v1/completions", json={"prompt": "hi", "stream": True}),
                    await client.post("/v1/chat/completions", json={}),
                ):
                    assert answer.status_code == 503
                    assert answer.json()["error"]["message"] == obstacle
                    assert answer.headers["retry-after"] == "1"

    asyncio.run(run())


def test_g_12_a_dead_engine_fails_health_and_requests_instead_of_hanging() -> None:
    def die(plan: StepPlan) -> None:  # noqa: ARG001
        raise SystemExit

    async def run() -> None:
        async with in_process(build_service(ScriptedRunner(before=die))) as client:
            answer = await client.post("/v1/completions", json={"prompt": "hi"}, timeout=5)
            assert answer.status_code == 500
            for answer in (
                await client.get("/health"),
                await client.get("/ready"),
                await client.post("/v1/completions", json={"prompt": "hi"}),
            ):
                assert answer.status_code == 503

    asyncio.run(run())


def without_counts_of_http(page: str) -> list[str]:
    """The lines of a metrics page; of those that count HTTP requests only the series."""
    counts = ("http_requests_total{", "legato_refusals_total{")
    return [line.rpartition(" ")[0] if line.startswith(counts) else line for line in page.splitlines()]


def test_g_07_requests_to_random_paths_leave_no_trace_in_the_metrics() -> None:
    async def run() -> None:
        async with in_process(build_service()) as client:
            for method in ("GET", "BREW"):  # one of each is a series of its own
                await client.request(method, "/0/")
            await client.get("/metrics")
            before = (await client.get("/metrics")).text
            for number in range(300):
                await client.request("BREW" if number % 2 else "GET", f"/{number}/" + "x" * number)
            begun = time.monotonic()
            page = await client.get("/metrics")
            assert time.monotonic() - begun < 0.5
            assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert without_counts_of_http(page.text) == without_counts_of_http(before)
            await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5})
            assert "vllm:generation_tokens_total" in before
            after = without_counts_of_http((await client.get("/metrics")).text)
            assert after != without_counts_of_http(before)

    asyncio.run(run())


def test_every_route_is_one_that_these_tests_know() -> None:
    assert set(create_app(build_service()).openapi()["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/ping",
        "/ready",
        "/version",
        "/metrics",
    }


@pytest.mark.parametrize("num_chars", [5_000_000, MAX_LEN * 256], ids=["far too long", "has to be counted"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_j_05_a_long_prompt_is_refused_and_does_not_hold_up_the_event_loop(path: str, num_chars: int) -> None:
    async def run() -> float:
        async with in_process(build_service()) as client:
            text = "x" * (num_chars - 50)
            body = (
                {"prompt": text} if "chat" not in path else {"messages": [{"role": "user", "content": text}]}
            )
            sent = json_bytes(body)
            big = asyncio.create_task(client.post(path, content=sent))
            worst = 0.0
            while not big.done():
                begun = time.monotonic()
                await asyncio.sleep(0.001)
                worst = max(worst, time.monotonic() - begun)
            answer = await big
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            return worst

    assert asyncio.run(run()) < 0.5
