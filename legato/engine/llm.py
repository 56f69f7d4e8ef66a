"""Offline use: a model in this process, driven by the caller. No thread, no server.

llm = LLM("gemma3-270m")
for completion in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(completion.text)
"""

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from legato.config import EngineSettings, ModelSettings
from legato.core.events import Event, TokenEvent
from legato.core.plan import Sampled
from legato.core.request import Request, RequestId, SamplingParams
from legato.core.stopping import FinishReason
from legato.engine.build import Built, build
from legato.engine.output import Delta, Reply
from legato.errors import RequestError

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt and what became of it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Every generated token, a stop token included."""
    text: str
    finish_reason: str
    """stop, length or error."""
    logprobs: tuple[Sampled, ...] | None
    """One entry a token, if `SamplingParams.logprobs` asked for them."""


class LLM:
    """A loaded model. Requests of one call run together, in mixed batches, as a server would run them."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self._numbers = itertools.count()

    @classmethod
    def load(
        cls,
        model: str | ModelSettings = "gemma3-270m",
        settings: EngineSettings | None = None,
        *,
        cache_dir: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> "LLM":
        """Load a model by name, path or hub id. Raises `ModelError` or `ConfigError`."""
        model = ModelSettings(model=model) if isinstance(model, str) else model
        cache_dir = cache_dir or Path.home() / ".cache" / "legato"
        return cls(build(model, settings or EngineSettings(), cache_dir=cache_dir, progress=progress))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Complete prompts (texts or lists of token ids), in order.

        `stop` are strings that end a reply. Raises `RequestError` before any work if a prompt can never fit.
        """
        params = self._complete(params or SamplingParams(max_tokens=16), ignore_eos)
        requests = [self._request(prompt, params) for prompt in _as_list(prompts)]
        for request in requests:
            self.built.engine.scheduler.validate(request)
        replies = {request.id: Reply(request, self.built.tokenizer, stop) for request in requests}
        deltas: dict[RequestId, list[Delta]] = {request.id: [] for request in requests}
        with _progress(show_progress) as bar:
            task = bar.add_task("Prompts", total=len(requests), tokens=0)
            for request_id, delta in self._run(requests, replies):
                deltas[request_id].append(delta)
                bar.update(task, advance=int(delta.finish is not None))
        return [_completion(request, deltas[request.id]) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[Delta]:
        """Complete one prompt, delta by delta. Closing the iterator aborts the request."""
        request = self._request(prompt, self._complete(params or SamplingParams(max_tokens=16), ignore_eos))
        reply = Reply(request, self.built.tokenizer, stop)
        for _, delta in self._run([request], {request.id: reply}):
            yield delta

    def _run(
        self, requests: Sequence[Request], replies: dict[RequestId, Reply]
    ) -> Iterator[tuple[RequestId, Delta]]:
        engine = self.built.engine
        try:
            for request in requests:
                engine.submit(request)
            while engine.has_work:
                for event in engine.step():
                    yield event.request_id, self._push(replies[event.request_id], event)
        finally:
            for request in requests:
                engine.abort(request.id)

    def _push(self, reply: Reply, event: Event) -> Delta:
        delta = reply.push(event)
        if delta.finish is not None and isinstance(event, TokenEvent) and event.finish is None:
            self.built.engine.abort(event.request_id, FinishReason.STOP)  # a stop string
        return delta

    def _complete(self, params: SamplingParams, ignore_eos: bool) -> SamplingParams:
        if ignore_eos:
            return params
        return replace(params, stop_token_ids=params.stop_token_ids | self.built.tokenizer.eos_ids)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.built.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        return Request(
            id=RequestId(f"llm-{next(self._numbers)}"),
            prompt=tuple(ids),
            params=params,
            arrival=self.built.engine.clock(),
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text is one, and so is a sequence of ids."""
    if isinstance(prompts, str):
        return [prompts]
    many = [prompt for prompt in prompts if not isinstance(prompt, int)]
    ids = [prompt for prompt in prompts if isinstance(prompt, int)]
    if many and ids:
        raise RequestError("prompts mix token ids with texts or lists", param="prompts")
    return [ids] if ids else many


def _completion(request: Request, deltas: Sequence[Delta]) -> Completion:
    sampled = tuple(delta.sampled for delta in deltas if delta.sampled is not None)
    finish = deltas[-1].finish
    assert finish is not None
    return Completion(
        prompt_token_ids=request.prompt,
        token_ids=tuple(token.token for token in sampled),
        text="".join(delta.text for delta in deltas),
        finish_reason=finish.reason.value,
        logprobs=None if request.params.logprobs is None else sampled,
    )


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not show)
