"""Every setting, once: name, type, limits, default and help. Frozen, validated once.

`runtime.toml`, the command line's flags, the `LEGATO_*` variables and the JSON Schema are all made from this
table. Precedence, lowest first: default, runtime.toml, environment, flag.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from legato.config.faults import as_config_error, settings_of
from legato.errors import ConfigError

SIZE = r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgKMG]i?)?[bB]?\s*"
"""What a size in bytes looks like as a text."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: object) -> object:
    """ "4GiB", "512 MB" or a number of bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(SIZE, value)
    if match is None:
        raise ValueError("not a size such as 4GiB or 512MB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


Bytes = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(parse_bytes),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": f"^{SIZE}$"}]}
    ),
]


def also_spelled(**others: str) -> BeforeValidator:
    """Other words for values of a setting: vLLM's word -> ours."""
    return BeforeValidator(lambda value: others.get(value, value) if isinstance(value, str) else value)


def parse_target(value: object) -> object:
    """ "auto" or a number of milliseconds, which may be a text."""
    if not isinstance(value, str) or value == "auto":
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a number of milliseconds, 0 for no target, or auto") from None


TargetMs = Annotated[
    float | Literal["auto"],
    BeforeValidator(parse_target),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 3_600_000}, {"const": "auto"}]}),
]


def in_seconds(milliseconds: float | None) -> float | None:
    """A time that may be missing."""
    return None if milliseconds is None else milliseconds / 1000


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _Checked
else:

    class _Checked(type(BaseModel)):
        """Makes what is wrong with a call of a class a `ConfigError`."""

        def __call__(self, *arguments: object, **values: object) -> object:
            if arguments:
                raise ConfigError(f"{self.__name__} takes settings by name: {self.__name__}(name=value)")
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise as_config_error(error, self.__name__, self) from None


class Checked(BaseModel, metaclass=_Checked):
    """Values that are checked once. What is wrong with them is a `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class Section(Checked):
    """One table of runtime.toml."""


class ModelSettings(Section):
    """Which model, and what it is called."""

    model: str = Field(
        default="gemma3-270m",
        description="A packaged name, a GGUF file, a folder in Hugging Face form, or a hub id (org/name).",
    )
    served_model_name: str | None = Field(
        default=None, description="Name in the API. Default: the model's own."
    )
    chat_template: str | None = Field(
        default=None, description="A built-in name, a .jinja file or a template, instead of the model's own."
    )
    trust_special_tokens: bool = Field(
        default=False,
        description="Let the names of control tokens in a chat's messages and tools become those tokens. "
        "Without, only the chat template writes control tokens; elsewhere their names are ordinary text.",
    )
    generation_config: Annotated[Literal["auto", "none"], also_spelled(vllm="none")] = Field(
        default="auto",
        description="What a request gets that does not say how to sample. auto: what the model's "
        "generation_config.json says. none: OpenAI's defaults.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and reply. Default: what the model and the cache allow.",
    )
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], also_spelled(half="float16", float="float32")
    ] = Field(
        default="auto",
        description="Type of activations. auto: float32 on a CPU, bfloat16 on a GPU.",
    )
    weights: Literal["auto", "dense", "fp16", "w16", "w8"] = Field(
        default="auto",
        description="How linear layers keep weights. dense: in dtype. fp16: packed 16-bit floats. w16, w8: "
        "integers of 12 and 8 bits, in 2 and 1 bytes. All but dense are for CPUs. auto: w16 where this CPU "
        "is fast at it, else fp16, else dense.",
    )


class EngineSettings(Section):
    """The step, and the memory behind it."""

    tpot_target_ms: TargetMs = Field(
        default="auto",
        description="Longest gap between two tokens of a reply, in milliseconds: each step takes as much of "
        "the waiting prompts as keeps to it. Requests may set their own. 0: no target. auto: 200, or as much "
        "more or less as leaves prompts 70 to 83 % of a step beside 8 replies, by what steps cost here.",
    )
    ttft_target_ms: float | None = Field(
        default=None,
        gt=0,
        le=3_600_000,
        description="Time to first token that is aimed at, in milliseconds; the metrics count who misses it. "
        "Requests may set their own. Default: no target.",
    )
    calibrate: bool = Field(
        default=True,
        description="With tpot_target_ms, measure for some seconds at the first start what steps cost, and "
        "keep it for the next. Without, the steps teach it as they come, and tpot_target_ms auto is 0.",
    )
    max_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Token budget: the most tokens in one step, decodes and prompt chunks together. Default: "
        "2048, below which tpot_target_ms decides; 256 without a target.",
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=0,
        description="Most tokens of one prompt in one step. 0 turns chunking off. Default: fill the budget.",
    )
    max_running: int | None = Field(
        default=None,
        ge=1,
        description="Most requests that run at once. Default: 64, or max_batch_tokens if that is less.",
    )
    min_chunk: int = Field(
        default=32,
        ge=1,
        description="A chunk that the budget would cut shorter waits for the next step, unless it is the "
        "first of its step or ends its prompt.",
    )
    policy: Literal["fair", "fcfs", "shortest", "priority"] = Field(
        default="fair",
        description="Which prompt comes first. fair: the one that would be through first if all shared every "
        "step equally. fcfs: who came first. shortest: the fewest tokens to compute. priority: the lowest "
        "priority that a request names, then who came first.",
    )
    admission: Literal["expected", "strict"] = Field(
        default="expected",
        description="Blocks that must be free to start a request. expected: for its prompt and a reply "
        "of the usual length. strict: for all that it may ask for, so that nothing is ever preempted.",
    )
    prefix_cache: bool = Field(
        default=True, description="Requests with the same beginning share its computed blocks."
    )
    block_size: int = Field(default=32, ge=1, le=1024, description="Tokens in a block of the KV cache.")
    num_blocks: int | None = Field(
        default=None, ge=1, description="Blocks in the KV cache, instead of kv_memory."
    )
    kv_memory: Bytes | None = Field(
        default=None,
        description="Size of the KV cache, such as 4GiB. Default: room for one request of max_model_len, or "
        "for 1,024 tokens of each of max_running requests if that is more, and at most a quarter of the "
        "memory that weights and intermediate results leave (0.9 on a GPU).",
    )
    device: str = Field(
        default="auto", description="auto (the CPU), cpu, cuda or cuda:N. CUDA was never tried."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads that compute on a CPU. Default: OMP_NUM_THREADS, else one for each core, and no "
        "more than the process's affinity and the CPU quota of its container allow.",
    )
    attention: Literal["auto", "cpu", "reference"] = Field(
        default="auto",
        description="cpu: compiled, bit-exact in every schedule. reference: plain torch. auto: cpu on a CPU.",
    )
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Type in which K and V are kept. auto: float16 for the compiled attention, else that of "
        "the activations.",
    )

    @property
    def token_limit(self) -> int:
        """`max_batch_tokens`, or its default."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        return 256 if self.tpot_target_ms == 0 else 2048

    @property
    def tpot_target(self) -> float | None:
        """`tpot_target_ms` in seconds; None for no target. It must be a number: see `resolve_target`."""
        if self.tpot_target_ms == "auto":
            raise RuntimeError("the automatic target has to be resolved with the costs of steps first")
        return self.tpot_target_ms / 1000 or None

    @property
    def running_limit(self) -> int:
        """`max_running`, or its default."""
        return min(64, self.token_limit) if self.max_running is None else self.max_running

    @model_validator(mode="after")
    def _go_together(self) -> "EngineSettings":
        if self.tpot_target_ms != "auto" and not 0 <= self.tpot_target_ms <= 3_600_000:
            raise ValueError(
                f"tpot_target_ms ({self.tpot_target_ms:g}) must be auto, or from 0 to 3600000 milliseconds"
            )
        if self.running_limit > self.token_limit:
            raise ValueError(
                f"max_running ({self.max_running}) is above max_batch_tokens ({self.token_limit}): "
                "the decodes of all running requests must fit in one step"
            )
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError("num_blocks and kv_memory both set the size of the KV cache; give one of them")
        return self


class ServerSettings(Section):
    """The HTTP side."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. 0.0.0.0 is every interface: set an api_key then.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    uds: str | None = Field(
        default=None,
        description="Unix socket to listen on, instead of host and port. A stale one is replaced.",
    )
    uds_mode: str = Field(default="600", pattern="^0?[0-7]{3}$", description="Its file mode, in octal.")
    api_key: tuple[SecretStr, ...] = Field(
        default=(),
        strict=False,
        description="Keys, one of which every request must bring, but those to /health and /ready. As a flag "
        "it shows in the list of processes: better a variable (several keys with spaces between) or a file.",
    )
    api_key_file: str | None = Field(default=None, description="File with more keys, one a line.")
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Web pages that browsers let use this server (CORS), such as https://example.org, or *.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Further names of this server, such as that of a proxy before it, or *. Without a key on "
        "a loopback address, requests to other public names are refused.",
    )
    max_waiting: int = Field(
        default=2048,
        ge=1,
        description="Most replies that wait at once. A request for which there is no room gets 429 and the "
        "seconds after which to try again.",
    )
    max_waiting_tokens: int = Field(
        default=4_194_304,
        ge=1,
        description="Most prompt tokens that wait at once, those of requests without a first token; more are "
        "told to come later (429). A prompt that waits alone may be longer.",
    )
    max_body_size: Bytes = Field(
        default=8 * 2**20,
        description="Largest body of a request (else 413). While JSON is read nothing else runs: some "
        "30 ms for each MiB.",
    )
    max_wait: float = Field(
        default=120.0,
        ge=0,
        description="Seconds that waiting may be predicted to take; else requests get 429. 0: no limit.",
    )
    max_body_memory: Bytes = Field(
        default=64 * 2**20,
        description="Most bytes of all bodies held at once, each until its answer begins (else 429).",
    )
    max_n: int = Field(default=128, ge=1, description="Most replies to one prompt: the field n.")
    max_prompts: int = Field(
        default=1024, ge=1, description="Most prompts in one request, and most replies to all of them."
    )
    max_logprobs: int = Field(
        default=20, ge=0, description="Most likely tokens that may be asked for with each token."
    )
    step_timeout: float = Field(
        default=300.0, gt=0, description="Seconds after which a step that goes on makes /health fail."
    )
    sse_keep_alive: float = Field(
        default=10.0,
        ge=0,
        description="Seconds of silence after which a stream sends a comment, to stay open. 0: never.",
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0,
        description="Seconds from SIGTERM to the end of the process, at least 1. Running replies get "
        "nine tenths of it to finish.",
    )
    send_timeout: float = Field(
        default=60.0,
        gt=0,
        description="Seconds after which a client that takes nothing sent to it is dropped.",
    )
    receive_timeout: float = Field(
        default=120.0, gt=0, description="Seconds that a request may take to come, from first byte to last."
    )
    timeout_keep_alive: float = Field(
        default=75.0, gt=0, description="Seconds that an idle connection stays open."
    )
    journal: str | None = Field(default=None, description="File that gets one line of JSON for each step.")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        default="auto",
        description="The form in which the model calls tools. auto: that of its chat template, else hermes.",
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="Fields of a request that Legato does not know, outside of messages and tools. ignore: "
        "each gets one line in the log.",
    )
    access_log: bool = Field(default=False, description="Log every HTTP request.")
    log_prompts: bool = Field(
        default=False, description="Log the text of every prompt, and the texts of unforeseen errors."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="What is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="json: one object a line, for everything that is logged."
    )

    @model_validator(mode="after")
    def _where(self) -> "ServerSettings":
        if not self.host.strip():
            raise ValueError("host must name an address, such as 127.0.0.1, or 0.0.0.0 for every interface")
        if self.uds is not None and self.model_fields_set & {"host", "port"}:
            raise ValueError("uds stands for host and port; give one of them")
        return self


class Settings(Checked):
    """The whole table: one section for each table of runtime.toml."""

    model_config = ConfigDict(title="runtime.toml of Legato")

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    server: ServerSettings = ServerSettings()


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, name, field) of every setting. Names are unique over all sections."""
    return settings_of(Settings)
