"""/openapi.json is true to the routes: schemathesis makes requests from it and compares the answers."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server_rig import ScriptedRunner, StartServer, ask, build_service, spelled

from legato.server.app import create_app
from legato.server.schema.bodies import ChatBody, CompletionBody
from legato.server.service import Limits
from legato.server.transport.api_keys import OPEN_PATHS, ApiKeys

CONFIG = """
[checks.positive_data_acceptance]
enabled = false  # what depends on the model, or on two fields at once, is no matter of the schema

[checks.not_a_server_error]  # a client may ask for a timeout of 1e-300 seconds
expected-statuses = ["2xx", "4xx", "504"]
"""


def test_schemathesis_finds_no_difference(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(ScriptedRunner(spelled("ok")), limits=Limits(n=2, choices=4))
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command += ["--phases", "coverage,fuzzing"]
    command += ["--max-examples", "8", "--generation-deterministic", "--no-color"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    server.wait_idle(10)
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(("path", "kind"), [("completions", CompletionBody), ("chat/completions", ChatBody)])
def test_every_field_that_is_read_is_on_the_page(
    path: str, kind: type[CompletionBody] | type[ChatBody]
) -> None:
    page = ask("/openapi.json", method="GET").json()
    content = page["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith(f"/{kind.__name__}")
    assert set(page["components"]["schemas"][kind.__name__]["properties"]) == {
        *kind.model_fields,
        *kind.neutral,
        *kind.labels,
    }


def test_with_keys_the_page_asks_for_one_wherever_the_server_does() -> None:
    page = create_app(build_service(keys=ApiKeys(["secret"]))).openapi()
    for path, methods in page["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) is ("401" in operation["responses"]) is (path not in OPEN_PATHS)


def test_no_page_loads_anything_from_elsewhere() -> None:
    assert {ask(path, method="GET").status_code for path in ("/docs", "/redoc")} == {404}
