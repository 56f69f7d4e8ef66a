"""`resolve` with a hub id: the real client against a stand-in for the hub on localhost.

Each question comes from a process of its own, because the client reads HF_* variables when it is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stand_in import HubStandIn, running_hub

REPOSITORY = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"and once more",
    "README.md": b"# a model",
}
PICKLES = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
GGUFS = {"m-Q4.gguf": b"GGUF four", "m-Q8.gguf": b"GGUF eight", "m-00001-of-00002.gguf": b"GGUF"}
HUB = {"org/model": REPOSITORY, "org/pickles": PICKLES, "org/ggufs": GGUFS, "org/gated": REPOSITORY}

ASK = """
import json, sys
from pathlib import Path
from legato.errors import ModelError
from legato.models.source import resolve
try:
    files = resolve(sys.argv[1], cache_dir=Path(sys.argv[2]))
    print(json.dumps([files.name, files.kind, str(files.path)]))
except ModelError as error:
    print(json.dumps(error.message))
"""


def ask(hub_url: str, model: str, home: Path, **extra: str) -> list[str] | str:
    """What `resolve` gives in a fresh process: [name, kind, path], or the error's message."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = kept | {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        **extra,
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, model, str(home)], env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    answer: list[str] | str = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStandIn]:
    with running_hub(HUB, gated=frozenset({"org/gated"})) as hub:
        yield hub


def test_a_hub_id_fetches_what_is_needed_and_no_pickles(hub: HubStandIn, tmp_path: Path) -> None:
    answer = ask(hub.url, "org/model", tmp_path, HF_TOKEN="hf_secret")
    assert answer[:2] == ["org/model", "folder"], answer
    folder = Path(answer[2])
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert folder.is_relative_to(tmp_path)
    assert {token for _, _, token in hub.requests if token} == {"Bearer hf_secret"}


def test_what_was_fetched_once_is_not_fetched_again(hub: HubStandIn, tmp_path: Path) -> None:
    first = ask(hub.url, "org/model", tmp_path)
    hub.requests.clear()
    assert ask(hub.url, "org/model", tmp_path) == first
    assert hub.downloads() == []


def test_without_the_hub_its_cache_is_enough(hub: HubStandIn, tmp_path: Path) -> None:
    first = ask(hub.url, "org/model", tmp_path)
    assert ask("http://127.0.0.1:9", "org/model", tmp_path) == first
    assert ask(hub.url, "org/model", tmp_path, HF_HUB_OFFLINE="1") == first


def test_one_gguf_file_of_a_repository_is_fetched_alone(hub: HubStandIn, tmp_path: Path) -> None:
    hub.requests.clear()
    answer = ask(hub.url, "org/ggufs:m-Q8.gguf", tmp_path)
    assert answer[:2] == ["org/ggufs:m-Q8.gguf", "gguf"], answer
    assert Path(answer[2]).read_bytes() == b"GGUF eight"
    assert [path.rpartition("/")[2] for path in hub.downloads()] == ["m-Q8.gguf"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/absent", "org/absent: neither a path here nor a repository on the hub"),
        ("org/absent:m.gguf", "org/absent: neither a path here nor a repository on the hub"),
        ("org/gated", "org/gated: is gated"),
        ("org/gated:m.gguf", "org/gated: is gated"),
        ("org/ggufs:absent.gguf", "org/ggufs: the hub repository has no such file"),
        ("org/ggufs:m-00001-of-00002.gguf", "1 of the 2 parts of m are missing: m-00002-of-00002.gguf"),
        ("org/ggufs", "org/ggufs: the hub repository has no config.json with *.safetensors"),
        ("org/pickles", "pickled weights (.bin) are never loaded"),
    ],
)
def test_what_the_hub_cannot_give_is_one_line(
    hub: HubStandIn, tmp_path: Path, model: str, expected: str
) -> None:
    message = ask(hub.url, model, tmp_path)
    assert isinstance(message, str), message
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("model", "offline"),
    # The client tries a single file again and again for 20 s before it gives up, so that case is offline.
    [("org/model", "0"), ("org/model", "1"), ("org/model:m.gguf", "1")],
)
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, model: str, offline: str) -> None:
    message = ask("http://127.0.0.1:9", model, tmp_path, HF_HUB_OFFLINE=offline)
    assert isinstance(message, str)
    assert "org/model: the hub cannot be reached" in message
    assert "\n" not in message
