"""Offline use: a model in this process, driven by the caller. No thread, no server.

llm = LLM.load("gemma3-270m")
for completion in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(completion.text)
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from legato.config import EngineSettings, ModelSettings
from legato.core.plan import Sampled
from legato.core.request import Request, RequestId, SamplingParams
from legato.core.stopping import FinishReason
from legato.engine.build import Built, build
from legato.engine.output import Delta, Reply, TextRules, new_request
from legato.errors import ConstraintError, RequestError, StepError
from legato.models.source import ModelFiles

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt and what became of it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Every generated token, a stop token included."""
    text: str
    finish_reason: str
    """stop, length, constraint (it cannot be followed any further) or error."""
    logprobs: tuple[Sampled, ...] | None
    """One entry a token, if `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: tuple[Sampled, ...] | None = None
    """One entry a token of the prompt, if `SamplingParams.prompt_logprobs` asked for them; the first one has
    no log-probability."""
    message: str = ""
    """What failed, if `finish_reason` is constraint or error."""


class LLM:
    """A loaded model. All that is asked for at a time runs together, in mixed batches, as in a server.

    Whoever reads drives the engine: a step is run when somebody wants a token that is not there yet, and
    what it gives to others waits for them.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        self._open: dict[RequestId, tuple[Reply, deque[Delta]]] = {}
        """The replies in the making, and of each the deltas that nobody read yet."""

    @classmethod
    def load(
        cls,
        model: str | ModelSettings = "gemma3-270m",
        settings: EngineSettings | None = None,
        *,
        cache_dir: Path | None = None,
        files: ModelFiles | None = None,
        progress: Callable[[str], None] = lambda _: None,
        for_chat: bool = False,
    ) -> "LLM":
        """Load a model by name, path or hub id. Raises `ModelError` or `ConfigError`; with `for_chat` also if
        it has no chat template."""
        model = ModelSettings(model=model) if isinstance(model, str) else model
        cache_dir = cache_dir or Path.home() / ".cache" / "legato"
        settings = settings or EngineSettings()
        return cls(
            build(model, settings, cache_dir=cache_dir, files=files, progress=progress, for_chat=for_chat)
        )

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

        `stop` are strings that end a reply. Raises `RequestError` before any work if a prompt can never be
        served. A reply whose model step fails has `finish_reason` error; the others go on.
        """
        params = self._params(params, ignore_eos)
        requests = [self._request(prompt, params) for prompt in _as_list(prompts)]
        deltas: dict[RequestId, list[Delta]] = {request.id: [] for request in requests}
        with _progress(show_progress) as bar:
            task = bar.add_task("Prompts", total=len(requests))
            for request_id, delta in self._run(requests, stop):
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
        """Complete one prompt, delta by delta. Closing the iterator aborts the request.

        Raises `RequestError` if it cannot be served and `StepError` if a model step fails.
        """
        request = self._request(prompt, self._params(params, ignore_eos))
        for _, delta in self._run([request], stop):
            if delta.finish is not None and delta.finish.reason is FinishReason.ERROR:
                raise StepError(delta.finish.message)
            if delta.finish is not None and delta.finish.reason is FinishReason.CONSTRAINT:
                raise ConstraintError(delta.finish.message)
            yield delta

    def _run(self, requests: Sequence[Request], stop: Sequence[str]) -> Iterator[tuple[RequestId, Delta]]:
        """The deltas of some requests as they come; leaving aborts what is left of them."""
        engine = self.built.engine
        for request in requests:
            engine.scheduler.validate(request)
        mine = {
            request.id: Reply(request, self.built.tokenizer, TextRules(stop=stop)) for request in requests
        }
        try:
            for request in requests:
                self._open[request.id] = mine[request.id], deque()
                engine.submit(request)
            while mine:
                for request_id in tuple(mine):
                    reply, unread = self._open[request_id]
                    while unread:
                        yield request_id, unread.popleft()
                    if reply.finished:
                        del mine[request_id], self._open[request_id]
                if mine:
                    self._step()
        finally:
            for request_id in mine:
                self._open.pop(request_id, None)
                engine.abort(request_id)

    def _step(self) -> None:
        """Run a step, and give each reply its part. Nobody reads on a reply that was given up."""
        engine = self.built.engine
        for event in engine.step():
            if event.request_id not in self._open:
                continue
            reply, unread = self._open[event.request_id]
            unread.append(reply.push(event))
            if reply.must_abort:
                engine.abort(event.request_id, FinishReason.STOP)

    def _params(self, params: SamplingParams | None, ignore_eos: bool) -> SamplingParams:
        params = params or SamplingParams(max_tokens=16)
        if ignore_eos:
            return params
        return replace(params, stop_token_ids=params.stop_token_ids | self.built.tokenizer.eos_ids)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.built.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return new_request(ids, params, arrival=self.built.engine.clock())


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
    scored = tuple(token for delta in deltas for token in delta.prompt)
    finish = deltas[-1].finish
    assert finish is not None
    return Completion(
        prompt_token_ids=request.prompt,
        token_ids=tuple(token.token for token in sampled),
        text="".join(delta.text for delta in deltas),
        finish_reason=finish.reason.value,
        logprobs=None if request.params.logprobs is None else sampled,
        prompt_logprobs=None if request.params.prompt_logprobs is None else scored,
        message=finish.message,
    )


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not show)
