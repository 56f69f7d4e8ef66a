"""HTTP requests by route, method and status, and refusals by reason, on the metrics page."""

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_rig import (
    MAX_LEN,
    MODEL,
    ScriptedRunner,
    StartServer,
    build_service,
    in_process,
    slow,
    wait_until,
)

from legato.metrics.http_series import REASONS
from legato.server.service import Limits, Service
from legato.server.transport.api_keys import ApiKeys

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
Counts = dict[tuple[str, ...], float]


def counted(page: str, name: str) -> Counts:
    """The rows of a counter that are not zero, by their labels' values."""
    families = {family.name: family for family in text_string_to_metric_families(page)}
    samples = families[name.removesuffix("_total")].samples
    rows = {tuple(s.labels.values()): s.value for s in samples if s.name == name and s.value}
    return rows


async def page_of(service: Service) -> str:
    return (await asyncio.to_thread(service.metrics_text))[0].decode()


def test_requests_are_counted_by_route_method_and_status() -> None:
    async def run() -> Counts:
        service = build_service()
        async with in_process(service) as client:
            for stream in (False, True, False):
                assert (await client.post(COMPLETIONS, json={**BODY, "stream": stream})).status_code == 200
            for method, path in (
                *(("GET", f"/v1/models/{MODEL}"), ("GET", "/v1/models/other"), ("HEAD", "/health")),
                *(("GET", "/nowhere"), ("BREW", "/nowhere/else"), ("DELETE", "/v1/models")),
            ):
                await client.request(method, path)
            await client.post(COMPLETIONS, json={"prompt": 5})
        return counted(await page_of(service), "http_requests_total")

    assert asyncio.run(run()) == {
        (COMPLETIONS, "POST", "200"): 3,
        (COMPLETIONS, "POST", "400"): 1,
        ("/v1/models/{name}", "GET", "200"): 1,
        ("/v1/models/{name}", "GET", "404"): 1,
        ("/health", "HEAD", "200"): 1,
        ("none", "GET", "404"): 1,
        ("none", "other", "404"): 1,
        ("/v1/models", "other", "405"): 1,
    }


def fail(_: object) -> None:
    raise RuntimeError("out of memory")


REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("invalid_request", {}, {"json": {"prompt": 5}}, 400),
    ("invalid_request", {}, {"content": b"{"}, 400),
    ("context_length_exceeded", {}, {"json": {"prompt": [1] * MAX_LEN}}, 400),
    ("model_not_found", {}, {"json": {**BODY, "model": "other"}}, 404),
    ("not_found", {}, {"url": "/nowhere"}, 404),
    ("method_not_allowed", {}, {"url": "/health"}, 405),
    ("request_too_large", {"limits": Limits(body_bytes=10)}, {"content": b"x" * 11}, 413),
    ("unsupported_media_type", {}, {"headers": {"Content-Encoding": "br"}}, 415),
    ("invalid_api_key", {"keys": ApiKeys(["sk-one"])}, {"json": BODY}, 401),
    ("forbidden", {"loopback_only": True}, {"headers": {"Host": "evil.example"}}, 403),
    ("deadline_exceeded", {}, {"json": {**BODY, "timeout": 1e-9}}, 504),
    ("server_error", {"runner": ScriptedRunner(before=fail)}, {"json": BODY}, 500),
    ("server_error", {"runner": ScriptedRunner(before=fail)}, {"json": {**BODY, "stream": True}}, 500),
]


@pytest.mark.parametrize(("reason", "changes", "request_", "status"), REFUSALS)
def test_a_refusal_is_counted_once_with_its_reason(
    reason: str, changes: dict[str, Any], request_: dict[str, Any], status: int
) -> None:
    async def run() -> Counts:
        service = build_service(**changes)
        async with in_process(service) as client:
            answer = await client.request("POST", **{"url": COMPLETIONS, **request_})
            assert answer.status_code == status, answer.text
        page = await page_of(service)
        assert sum(counted(page, "http_requests_total").values()) == 1
        return counted(page, "legato_refusals_total")

    assert asyncio.run(run()) == {(reason,): 1}


def test_requests_that_are_not_taken_now_are_refusals() -> None:
    async def run() -> Counts:
        service = build_service()
        async with in_process(service) as client:
            service.readiness.set_draining()
            assert (await client.post(COMPLETIONS, json=BODY)).status_code == 503
            assert (await client.get("/ready")).status_code == 503
        return counted(await page_of(service), "legato_refusals_total")

    assert asyncio.run(run()) == {("unavailable",): 2}


def test_a_full_queue_is_a_refusal() -> None:
    async def run() -> Counts:
        service = build_service(
            ScriptedRunner(before=slow(0.05)), max_running=1, engine_options={"max_waiting": 1}
        )
        async with in_process(service) as client:
            answers = [client.post(COMPLETIONS, json={**BODY, "max_tokens": 8}) for _ in range(5)]
            statuses = [answer.status_code for answer in await asyncio.gather(*answers)]
            assert sorted(statuses) == [200, 200, 429, 429, 429]
        return counted(await page_of(service), "legato_refusals_total")

    assert asyncio.run(run()) == {("queue_full",): 3}


def test_a_client_that_leaves_before_its_answer_counts_as_499(start_server: StartServer) -> None:
    server = start_server(ScriptedRunner(before=slow(0.3)))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{COMPLETIONS}", json={**BODY, "max_tokens": 8}, timeout=0.2)

    def page() -> str:
        return server.service.metrics_text()[0].decode()

    wait_until(lambda: counted(page(), "http_requests_total") == {(COMPLETIONS, "POST", "499"): 1})
    assert counted(page(), "legato_refusals_total") == {}


def test_every_reason_has_its_row_before_it_happens() -> None:
    page = asyncio.run(page_of(build_service()))
    shown = set(re.findall(r'^legato_refusals_total\{reason="(\w+)"\} 0\.0$', page, flags=re.MULTILINE))
    assert shown == {*REASONS}


def test_every_code_of_an_error_is_a_reason() -> None:
    codes = set()
    for file in (Path(__file__).parents[2] / "legato").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                codes |= {
                    keyword.value.value
                    for keyword in node.keywords
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
                }
    assert codes
    assert codes <= {*REASONS}


def test_the_names_are_as_promtool_wants_them() -> None:
    """No colons, which are for recording rules; counters end in _total; every one has a help text."""
    page = asyncio.run(page_of(build_service()))
    for name in ("http_requests_total", "legato_refusals_total"):
        assert re.search(rf"^# HELP {name} [A-Z].*\.$", page, flags=re.MULTILINE)
        assert f"# TYPE {name} counter" in page
