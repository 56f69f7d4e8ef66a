"""Nothing of a request's texts gets into the log without --log-prompts, whatever fails. No request makes the
server fail, however hostile it is."""

import asyncio
import json
import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from server_rig import ScriptedRunner, ask, build_service, in_process, json_bytes

import legato.config.settings
import legato.engine.cost_file
from legato.cli.logs import JsonFormatter, LineFormatter, configure
from legato.config import ServerSettings
from legato.server.schema.base import Body
from legato.server.schema.bodies import ChatBody, CompletionBody
from legato.server.service import Service
from legato.server.transport.errors import log_unhandled
from legato.text.chat import ChatTemplate
from legato.text.fake import FakeTokenizer

SECRET = "s3cret marker"
"""No identifier: as the name of a field it is as secret as anywhere."""
HALF, OTHER_HALF = "\ud83d", "\udc00"
FUNCTION = {
    "name": "f",
    "description": SECRET,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": [SECRET, "b"]}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": SECRET})}}
SAMPLING: dict[str, Any] = {
    "max_tokens": 2,
    "stop": [SECRET],
    "bad_words": [SECRET],
    "logit_bias": {"97": 1},
    "user": SECRET,
    "metadata": {"a": SECRET},
    "cache_salt": SECRET,
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [SECRET, "b"], **SAMPLING, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [1, 2], **SAMPLING, "stream": True, "stream_options": {}}),
    ("/v1/completions", {"prompt": SECRET, **SAMPLING, "guided_choice": ["ab", SECRET]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": SECRET},
                {"role": "user", "content": [{"type": "text", "text": SECRET}], "name": SECRET},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": SECRET},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"a": SECRET},
            **SAMPLING,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": SECRET}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {}}}},
            },
            **SAMPLING,
            "stream": True,
        },
    ),
    ("/tokenize", {"prompt": SECRET}),
    ("/tokenize", {"messages": [{"role": "user", "content": SECRET}]}),
    ("/detokenize", {"tokens": [97, 98]}),
]


@contextmanager
def logged(formatter: logging.Formatter) -> Iterator[StringIO]:
    """All that is logged in the block, of every level, as a server writes it."""
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel("DEBUG")
    logging.getLogger("httpx").setLevel("WARNING")  # the test's own client
    try:
        yield written
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def containers(value: object) -> Iterator[Any]:
    """Every object and list in JSON data that is not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def hostile(random_: random.Random) -> Any:
    halves = [SECRET + HALF, OTHER_HALF + SECRET, f"{SECRET} {HALF}{OTHER_HALF}", HALF]
    text = random_.choice([*[SECRET] * 8, *halves])
    return random_.choice(
        [
            *(text, text, text, [text], {text: text}, {"a": text}, {text: [1]}, [[{text: text}]]),
            *(None, True, -1, 10**30, float("nan"), "", [], {}, [text] * 20, {"type": text}),
        ]
    )


def distorted(body: dict[str, Any], random_: random.Random) -> dict[str, Any]:
    """A copy with some values replaced, and some fields renamed or added, anywhere in it."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    for _ in range(random_.randint(0, 3)):
        inside = random_.choice([*containers(copy)])
        key = random_.choice([*inside] if isinstance(inside, dict) else range(len(inside)))
        name = random_.choice([*[SECRET] * 4, SECRET + HALF, HALF])
        how = random_.randrange(4)
        if how == 0 and isinstance(inside, dict):
            inside[name] = inside.pop(key)
        elif how == 1 and isinstance(inside, dict):
            inside[name] = hostile(random_)
        else:
            inside[key] = hostile(random_)
    return copy


@pytest.mark.parametrize("seed", range(8))
def test_b_24_no_hostile_request_fails_the_server_or_leaves_a_text_in_its_log(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    random_ = random.Random(seed)

    async def run() -> list[int]:
        statuses = []
        async with in_process(build_service(access_log=True)) as client:
            for _ in range(60):
                path, body = random_.choice(BODIES)
                answer = await client.post(path, content=json_bytes(distorted(body, random_)))
                assert answer.status_code in (200, 400, 404), (path, answer.text)
                assert "event: error" not in answer.text
                assert '"type":"server_error"' not in answer.text
                statuses.append(answer.status_code)
        return statuses

    with logged(LineFormatter()) as log:
        statuses = asyncio.run(run())
    assert {200, 400} <= {*statuses}
    assert log.getvalue().count("legato.access") == 60, "the log is seen"
    for text in (log.getvalue(), *capfd.readouterr()):
        assert "s3cret" not in text


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/v1/completions", b'{"prompt": "abc \\ud83d def"}', "prompt"),
        ("/v1/completions", b'{"prompt": ["a", "\\uD83D"]}', "prompt[1]"),
        ("/v1/completions", b'{"prompt": "hi", "\\ud83d s3cret": 1}', None),
        ("/v1/completions", b'{"prompt": "hi", "stop": ["a", "\\udc00"]}', "stop[1]"),
        ("/v1/completions", b'{"prompt": "hi", "user": "\\udc00"}', "user"),
        ("/v1/completions", b'{"prompt": "hi", "metadata": {"a": {"\\udc00": 1}}}', "metadata.a"),
        ("/v1/completions", b'"\\ud83d s3cret"', None),
        ("/v1/chat/completions", b'{"messages": [{"role": "\\ud83d", "content": ""}]}', "messages[0].role"),
        ("/tokenize", b'{"prompt": "\\ud83d"}', "prompt"),
        ("/detokenize", b'{"tokens": ["\\ud83d"]}', "tokens[0]"),
    ],
)
def test_b_24_a_lone_surrogate_is_refused_wherever_it_is_with_its_place(
    path: str, content: bytes, param: str | None
) -> None:
    answer = ask(path, content=content)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "lone surrogate" in error["message"]
    assert "s3cret" not in error["message"]


def test_both_halves_of_a_pair_are_a_letter() -> None:
    content = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 0, "echo": true}'
    assert ask("/v1/completions", content=content).json()["choices"][0]["text"] == "\U0001f600"


# -- what breaks with a text in its error -----------------------------------------------------------------


class BrokenEncoder(FakeTokenizer):
    def encode(self, text: str, **options: bool) -> list[int]:  # noqa: ARG002
        try:
            raise KeyError(text)
        except KeyError:
            raise ValueError(f"cannot encode {text!r}") from UnicodeEncodeError("utf-8", text, 0, 1, text)

    def encode_chat(self, prompt: str, **options: bool) -> list[int]:
        return self.encode(prompt, **options)


class BrokenDecoder(FakeTokenizer):
    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:  # noqa: ARG002
        raise ValueError(f"no such token in {SECRET}")


class BrokenTemplate(ChatTemplate):
    def render(self, *messages: Any, **options: Any) -> str:
        raise ValueError(f"cannot render {messages}, {options}")


def with_tokenizer(tokenizer: FakeTokenizer) -> Service:
    return build_service(tokenizer=tokenizer)


BROKEN = {
    "encoder": with_tokenizer(BrokenEncoder()),
    "decoder": with_tokenizer(BrokenDecoder()),
    "template": build_service(chat_template=BrokenTemplate("x", bos_token="", eos_token="")),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [LineFormatter, JsonFormatter])
@pytest.mark.parametrize("part", BROKEN)
def test_an_unforeseen_error_is_logged_with_its_place_and_type_and_without_its_text(
    part: str, kind: type[LineFormatter | JsonFormatter], stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, "stream": stream}
    built = BROKEN[part]  # an engine's thread starts once
    tokenizer = built.model.tokenizer
    assert isinstance(tokenizer, FakeTokenizer)
    service = build_service(tokenizer=tokenizer, chat_template=built.model.chat_template)
    with logged(kind()) as log:
        answer = ask("/v1/chat/completions", body, service=service)
    assert answer.status_code == 500 or '"type":"server_error"' in answer.text
    assert "s3cret" not in answer.text
    assert "s3cret" not in log.getvalue()
    assert "builtins.ValueError (its text may hold a prompt" in log.getvalue()
    assert Path(__file__).name in log.getvalue(), "where it was raised"
    if part == "encoder":
        assert "builtins.UnicodeEncodeError" in log.getvalue(), "its cause"


def test_with_prompts_in_the_log_errors_have_their_texts() -> None:
    with logged(LineFormatter(texts=True)) as log:
        ask("/v1/completions", {"prompt": SECRET}, service=with_tokenizer(BrokenEncoder()))
    assert f"ValueError: cannot encode '{SECRET}'" in log.getvalue()


def test_a_failed_step_is_logged_with_its_text_since_a_runner_knows_no_prompt() -> None:
    def fail(_: object) -> None:
        raise RuntimeError("out of memory: 17 GiB asked for")

    with logged(LineFormatter()) as log:
        ask("/v1/completions", {"prompt": SECRET}, service=build_service(ScriptedRunner(before=fail)))
    assert "step 0 of 14 tokens failed: out of memory: 17 GiB asked for" in log.getvalue()


def test_groups_of_errors_and_errors_in_a_circle_have_no_texts_either() -> None:
    first, second = ValueError(SECRET), KeyError(SECRET)
    first.__context__, second.__context__ = second, first
    for error in (first, BaseExceptionGroup(SECRET, [first, ExceptionGroup(SECRET, [OSError(SECRET)])])):
        with logged(LineFormatter()) as log:
            logging.getLogger("legato").error("failed", exc_info=error)
        assert "s3cret" not in log.getvalue()
        assert "builtins.ValueError" in log.getvalue()
    assert "builtins.OSError" in log.getvalue()


def test_what_asyncio_tells_of_lost_errors_has_no_texts() -> None:
    async def fail(text: str) -> None:
        raise ValueError(text)

    def fail_too(text: str) -> None:
        raise KeyError(text)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_unhandled)
        loop.call_soon(fail_too, SECRET)
        task = asyncio.create_task(fail(SECRET), name=SECRET)
        await asyncio.sleep(0.01)
        del task

    with logged(LineFormatter()) as log:
        asyncio.run(run())
    text = log.getvalue()
    assert "s3cret" not in text
    assert "Task exception was never retrieved" in text
    assert "an error in a callback" in text
    assert "builtins.ValueError" in text
    assert "builtins.KeyError" in text


def test_a_thread_that_ends_by_an_error_is_logged_without_its_text(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", threading.excepthook)
    monkeypatch.setattr("sys.unraisablehook", None)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure(ServerSettings())

        def fail() -> None:
            raise ValueError(SECRET)

        thread = threading.Thread(target=fail, name=SECRET)
        thread.start()
        thread.join()

        class Lost:
            def __del__(self) -> None:
                raise KeyError(SECRET)

        Lost()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)
    text = "".join(capfd.readouterr())
    assert "s3cret" not in text
    assert "a thread ended by an error" in text
    assert "an error that nobody gets" in text
    assert "builtins.ValueError" in text
    assert "builtins.KeyError" in text


def models(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from models(inner)


def test_every_model_of_ours_hides_what_it_was_given_in_its_errors() -> None:
    assert {Body, legato.config.settings.Section, legato.engine.cost_file.CostFile} < {*models(BaseModel)}
    for kind in models(BaseModel):
        if kind.__module__.startswith("legato."):
            assert kind.model_config.get("hide_input_in_errors"), kind


@pytest.mark.parametrize(("kind", "field"), [(CompletionBody, "prompt"), (ChatBody, "messages")])
def test_the_text_of_a_validation_error_has_no_input(kind: type[Body], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({field: [SECRET, 5], "temperature": SECRET, "n": [SECRET]})
    assert "s3cret" not in str(caught.value)
