"""A served model: engine, model, limits and access rules. This module knows no HTTP routes."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from legato.engine.async_engine import AsyncEngine
from legato.errors import RequestError, UnavailableError
from legato.metrics.http_series import HttpSeries
from legato.server.schema.unknown_fields import UnknownFields
from legato.server.transport.api_keys import ApiKeys
from legato.server.transport.event_loop import Turns
from legato.server.transport.work_pool import WorkPool
from legato.text.chat import ChatTemplate
from legato.text.grammar import Grammars
from legato.text.sampling_defaults import SamplingDefaults
from legato.text.tokenizer import Tokenizer
from legato.text.tool_calls import ToolUse, tool_use

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one request may ask for, so that no request can exhaust the server."""

    n: int = 128
    """Replies to one prompt (as in OpenAI's API)."""
    prompts: int = 1024
    """Prompts in one completion request."""
    choices: int = 1024
    """Prompts times `n`."""
    logprobs: int = 20
    """Most likely tokens for each token (as in OpenAI's API)."""
    body_bytes: int = 8 * 2**20
    """Bytes in the body of one request."""
    all_body_bytes: int = 64 * 2**20
    """Bytes in the bodies of all requests that are not answered yet."""

    def check(self, value: int, limit: int, name: str) -> None:
        """Raises `RequestError` with both numbers if `value`, of the field `name`, is above `limit`."""
        if value > limit:
            raise RequestError(f"{name}: {value} asked for, at most {limit} possible", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The rules of who may use the server."""

    keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    """Without keys, everyone may use the server."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that browsers allow to use the server. * allows any."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names of the server. * allows any."""
    loopback_only: bool = False
    """Whether the server listens on a loopback address and has no key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model, as requests see it."""

    name: str
    """The name in the API."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None for a base model: it supports completions but no chat."""
    max_model_len: int
    """The most tokens of a prompt and its reply together."""
    vocab_size: int
    """Token ids are in 0 .. vocab_size - 1."""
    grammars: Grammars
    """Compiles constraints."""
    tool_call_parser: str = "auto"
    """The name of the tool format. auto: that of the chat template."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The sampling parameters of requests that do not set them."""

    @property
    def tool_use(self) -> ToolUse | None:
        """How the model calls tools. None without a chat template."""
        return None if self.chat_template is None else tool_use(self.chat_template, self.tool_call_parser)


class Readiness:
    """Whether new requests are accepted. Mutable."""

    def __init__(self) -> None:
        self.status = "loading"
        """loading, ok or draining."""
        self.problem: str | None = "the server is loading"
        """Why requests are refused. None if they are accepted."""

    def set_ready(self) -> None:
        self.status, self.problem = "ok", None

    def set_draining(self) -> None:
        self.status, self.problem = "draining", "the server is shutting down"

    def check(self) -> None:
        """Raises `UnavailableError` unless requests are accepted."""
        if self.problem is not None:
            raise UnavailableError(self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One served model."""

    engine: AsyncEngine
    model: ServedModel
    metrics_text: Callable[[], tuple[bytes, str]]
    """The metrics page and its content type. Thread-safe."""
    version: Mapping[str, str]
    """The response of `GET /version`."""
    limits: Limits = Limits()
    access: AccessRules = field(default_factory=AccessRules)
    sse_keep_alive: float = 10.0
    """Seconds without an event after which a stream sends a comment. 0 turns it off."""
    takes_priority: bool = False
    """Whether requests may set `priority`."""
    access_log: bool = False
    log_prompts: bool = False
    http: HttpSeries = field(default_factory=HttpSeries)
    """Counts HTTP requests for the metrics."""
    readiness: Readiness = field(default_factory=Readiness)
    turns: Turns = field(default_factory=Turns)
    """The turns of the event loop that serves."""
    work: WorkPool = field(default_factory=WorkPool)
    """Runs work that would block the event loop."""
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)


class ServiceLifecycle:
    """Starts and stops the engine of a service. Implements `transport.server.Lifecycle`."""

    def __init__(self, service: Service) -> None:
        self._engine = service.engine
        self._readiness = service.readiness

    @property
    def num_replies(self) -> int:
        return self._engine.num_streams

    async def start(self) -> None:
        await self._engine.start()
        self._readiness.set_ready()

    def refuse_requests(self) -> None:
        self._readiness.set_draining()

    async def drain(self) -> None:
        await self._engine.drain()

    async def stop(self, timeout_s: float) -> None:
        await self._engine.stop(timeout_s)

    def end_replies(self) -> None:
        self._engine.end_streams()

    async def watch(self) -> None:
        """Log what /health reports, because nobody may be asking."""
        was_stalled = False
        while self._engine.failure is None:
            reason = self._engine.stall_reason
            if reason is not None and not was_stalled:
                logger.error("%s\n%s", reason, self._engine.stack_trace)
            elif reason is None and was_stalled:
                logger.warning("the engine continues")
            was_stalled = reason is not None
            await asyncio.sleep(WATCH_INTERVAL_S)
