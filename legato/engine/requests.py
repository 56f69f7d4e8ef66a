"""Creates the core's requests from what clients send."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from legato.core.request import Request, RequestId
from legato.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request is scheduled. None of these options changes its tokens."""

    priority: int = 0
    """A lower value is more urgent."""
    cache_salt: str = ""
    """It shares computed blocks only with requests of the same salt."""
    tpot_target: float | None = None
    """The longest acceptable gap between two tokens of the reply, in seconds. None: the server's target."""
    ttft_target: float | None = None
    """The latest acceptable first token, in seconds after arrival. None: the server's target."""
    wants_progress: bool = False
    """Whether the progress of its prompt is reported."""
    timeout: float | None = None
    """Seconds after arrival when the request ends, whatever its state."""


DEFAULT_OPTIONS = RequestOptions()


def new_request(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    arrival: float,
    request_id: str | None = None,
    options: RequestOptions = DEFAULT_OPTIONS,
) -> Request:
    """A complete request. Without a seed or an id, it gets a random one."""
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    return Request(
        id=RequestId(request_id or f"req-{secrets.token_hex(12)}"),
        prompt=tuple(prompt),
        params=params,
        arrival=arrival,
        priority=options.priority,
        cache_salt=options.cache_salt,
        tpot_target=options.tpot_target,
        ttft_target=options.ttft_target,
        wants_progress=options.wants_progress,
        deadline=None if options.timeout is None else arrival + options.timeout,
    )
