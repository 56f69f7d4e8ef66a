"""A client's request in plain numbers. A prompt is token ids; text does not appear in the core."""

from dataclasses import dataclass, field
from typing import NewType

from legato.sampling_params import SamplingParams

RequestId = NewType("RequestId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and how one reply to it is to be computed."""

    id: RequestId
    prompt: tuple[int, ...] = field(repr=False)
    """Token ids, at least one. Not part of `repr`, so that prompts do not get into logs."""
    params: SamplingParams
    arrival: float
    """Seconds on the engine's clock."""
    cache_salt: str = field(default="", repr=False)
    """Requests share computed blocks only with requests of the same salt."""
    priority: int = 0
    """A lower value is more urgent."""
    tpot_target: float | None = None
    """The longest acceptable gap between two tokens of the reply, in seconds. None: the server's target."""
    ttft_target: float | None = None
    """The latest acceptable first token, in seconds after `arrival`. None: the server's target."""
    wants_progress: bool = False
    """Whether `ProgressEvent`s are sent for its prompt."""
    deadline: float | None = None
    """When the request ends, whatever its state; seconds on the engine's clock."""

    @property
    def max_computed(self) -> int:
        """The largest number of positions whose K and V this request can ever need.

        The last generated token is returned to the client and never computed.
        """
        return len(self.prompt) + max(self.params.max_tokens - 1, 0)
