"""What the HTTP room is given: the engine behind it, the names it serves, the limits it keeps.

Built once by whoever starts a server; nothing here knows HTTP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from legato.engine.async_engine import AsyncEngine
from legato.errors import RequestError, UnavailableError
from legato.metrics.http_series import HttpSeries
from legato.server.event_loop import Turns
from legato.server.guards import ApiKeys
from legato.server.unknown_fields import UnknownFields
from legato.server.work_pool import WorkPool
from legato.text.chat import ChatTemplate
from legato.text.grammar import Grammars
from legato.text.sampling_defaults import SamplingDefaults
from legato.text.tokenizer import Tokenizer
from legato.text.tool_calls import ToolUse, tool_use


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one request may ask for, so that none can exhaust the server."""

    n: int = 128
    """Replies to one prompt (as OpenAI)."""
    prompts: int = 1024
    """Prompts in one completion request."""
    choices: int = 1024
    """Prompts times `n`."""
    logprobs: int = 20
    """Most likely tokens listed for each token (as OpenAI)."""
    body_bytes: int = 8 * 2**20
    """The body of one HTTP request."""
    all_body_bytes: int = 64 * 2**20
    """The bodies of all requests that are not answered yet."""

    def check(self, value: int, limit: int, name: str) -> None:
        """Raises `RequestError` with both numbers if `value`, of the field `name`, is above `limit`."""
        if value > limit:
            raise RequestError(f"{name}: {value} asked for, at most {limit} possible", param=name)


class Readiness:
    """Whether new requests are taken. Mutable: it follows the server's life."""

    def __init__(self) -> None:
        self.status = "loading"
        """In one word: loading, ok or draining."""
        self.obstacle: str | None = "the server is loading"
        """Why no request is taken; None while they are."""

    def ready(self) -> None:
        self.status, self.obstacle = "ok", None

    def drain(self) -> None:
        self.status, self.obstacle = "draining", "the server is shutting down"

    def check(self) -> None:
        """Raises `UnavailableError` unless requests are taken."""
        if self.obstacle is not None:
            raise UnavailableError(self.obstacle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model, served."""

    engine: AsyncEngine
    chat_template: ChatTemplate | None
    """None for a base model: it has completions and no chat."""
    model_name: str
    """What clients call the model."""
    max_model_len: int
    """The most tokens of a prompt and its reply together."""
    vocab_size: int
    """Token ids run from 0 to vocab_size - 1."""
    grammars: Grammars
    """Compiles the forms that replies must have."""
    tool_call_parser: str = "auto"
    """The form of tool calls: a name in `FORMATS`; auto for that of the chat template."""
    keep_alive: float = 10.0
    """Seconds without an event after which a stream sends a comment; 0 for never."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """What a request gets that does not say how to sample."""
    takes_priority: bool = False
    """Whether requests may say how urgent they are."""
    metrics_text: Callable[[], tuple[bytes, str]]
    """The metrics page and its content type; may be called in any thread."""
    http: HttpSeries = field(default_factory=HttpSeries)
    """Counts requests. Whoever makes the metrics page puts it there."""
    version: Mapping[str, str]
    """What `GET /version` says."""
    limits: Limits = Limits()
    keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    """Without one, everybody may come in."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that browsers let use the server; * is any."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which clients may call the server; * is any."""
    own_machine_only: bool = False
    """Whether only programs of its own machine can connect, and it asks for no key."""
    access_log: bool = False
    log_prompts: bool = False
    readiness: Readiness = field(default_factory=Readiness)
    turns: Turns = field(default_factory=Turns)
    """Those of the event loop that serves."""
    work: WorkPool = field(default_factory=WorkPool)
    """Does what would hold up the event loop."""
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)

    @property
    def tool_use(self) -> ToolUse | None:
        """How the model calls tools; None without a chat template."""
        return None if self.chat_template is None else tool_use(self.chat_template, self.tool_call_parser)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer
