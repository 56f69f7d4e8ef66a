"""Offline use: a model in this process, driven by the caller. There is no thread and no server.

llm = LLM("gemma3-270m")
for completion in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(completion.text)
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from legato.config import EngineSettings, ModelSettings, as_sections
from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.engine.build import LoadedModel, build
from legato.engine.inputs import (
    Completion,
    Message,
    PreparedRequest,
    Prompt,
    as_conversations,
    as_params,
    as_prompts,
    chat_prompt,
    prepare,
)
from legato.engine.output_processor import Delta, OutputProcessor
from legato.engine.params import SamplingParams, model_defaults
from legato.engine.scheduling import resolve_target
from legato.errors import ConfigError, ConstraintError, StepError
from legato.models.source import ModelFiles

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model. Requests that are open at the same time run together in mixed batches, as in a server.

    The caller that reads drives the engine: a step runs whenever a token is needed that is not there yet.
    Tokens of other open requests are buffered.
    """

    def __init__(
        self,
        model: str | Path | ModelSettings | LoadedModel = "gemma3-270m",
        settings: EngineSettings | None = None,
        *,
        cache_dir: str | Path | None = None,
        files: ModelFiles | None = None,
        progress: Callable[[str], None] = lambda _: None,
        for_chat: bool = False,
        **changes: Any,
    ) -> None:
        """Load a model by name, path or hub id.

        `changes` are settings of the model or the engine by name: `LLM("gemma3-270m", max_running=8)`.
        `files` are the model's files, if they are known already. Raises `ModelError` or `ConfigError`, with
        `for_chat` also if the model has no chat template.
        """
        self.model = load(
            model,
            settings,
            changes,
            cache_dir=cache_dir,
            files=files,
            progress=progress,
            for_chat=for_chat,
            offline=True,
        )
        self._open: dict[RequestId, tuple[OutputProcessor, deque[Delta]]] = {}
        """The replies in progress, and the deltas of each that were not read yet."""

    @classmethod
    def load(cls, *arguments: Any, **values: Any) -> Self:
        """The same as calling the class."""
        return cls(*arguments, **values)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling parameters (its generation_config.json), with changes."""
        return model_defaults(self.model.sampling_defaults, **changes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Complete prompts (texts or lists of token ids). The completions are in the same order.

        `params` apply to all prompts, or are a list with one entry for each. None: the model's own. Raises
        `RequestError` before any work if a prompt can never be served. A reply whose model step fails has the
        `finish_reason` error; the others continue.
        """
        many = as_prompts(prompts)
        pairs = zip(many, as_params(params, len(many)), strict=True)
        return self._complete([prepare(self.model, *pair) for pair in pairs], show_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        show_progress: bool = True,
    ) -> list[Completion]:
        """OutputProcessor to one conversation or to several. A conversation is a list of messages as in
        OpenAI's API.

        `params`, the order and the errors are as in `generate`.
        """
        prompts = [
            chat_prompt(
                self.model,
                conversation,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, params, show_progress=show_progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt, delta by delta. Closing the iterator aborts the request.

        Raises `RequestError` if the prompt cannot be served and `StepError` if a model step fails.
        """
        prepared = prepare(self.model, prompt, params)
        return (checked_delta(delta) for _, delta in self._run([prepared]))

    def _complete(self, prepared: Sequence[PreparedRequest], show_progress: bool) -> list[Completion]:
        deltas: dict[RequestId, list[Delta]] = {one.request.id: [] for one in prepared}
        with _progress_bar(show_progress) as bar:
            task = bar.add_task("Prompts", total=len(prepared))
            for request_id, delta in self._run(prepared):
                deltas[request_id].append(delta)
                if delta.finish is not None:
                    bar.update(task, advance=1)
        return [one.completion(deltas[one.request.id]) for one in prepared]

    def _run(self, prepared: Sequence[PreparedRequest]) -> Iterator[tuple[RequestId, Delta]]:
        """The deltas of some requests in the order of arrival. Closing the iterator aborts what still
        runs."""
        engine, tokenizer = self.model.engine, self.model.tokenizer
        left = {one.request.id: OutputProcessor(one.request, tokenizer, one.text) for one in prepared}
        try:
            for one in prepared:
                self._open[one.request.id] = left[one.request.id], deque()
                engine.submit(one.request)
            while left:
                for request_id in tuple(left):
                    processor, unread = self._open[request_id]
                    while unread:
                        yield request_id, unread.popleft()
                    if processor.is_finished:
                        del left[request_id], self._open[request_id]
                if left:
                    self._step()
        finally:
            for request_id in left:
                self._open.pop(request_id, None)
                engine.abort(request_id)

    def _step(self) -> None:
        """Run a step and distribute its events. A request whose iterator was closed is not open any more."""
        engine = self.model.engine
        for event in engine.step():
            if event.request_id not in self._open:
                continue
            processor, unread = self._open[event.request_id]
            unread.append(processor.push(event))
            if processor.must_abort:
                engine.abort(event.request_id, FinishReason.STOP)


def load(
    model: str | Path | ModelSettings | LoadedModel,
    settings: EngineSettings | None,
    changes: Mapping[str, object],
    *,
    cache_dir: str | Path | None,
    files: ModelFiles | None = None,
    progress: Callable[[str], None] = lambda _: None,
    for_chat: bool = False,
    offline: bool = False,
) -> LoadedModel:
    """A model with its engine. A `LoadedModel` is returned unchanged. Raises `ModelError` or `ConfigError`.

    With `offline`, an automatic target means no target, because no client waits for the next token.
    """
    if isinstance(model, LoadedModel):
        return model
    if not isinstance(model, str | Path | ModelSettings):
        raise ConfigError(
            f"model must be a name, a path, a hub id or ModelSettings, not {model!r:.100}", param="model"
        )
    if not isinstance(settings, EngineSettings | None):
        raise ConfigError(f"settings must be EngineSettings, not {settings!r:.100}", param="settings")
    start = model if isinstance(model, ModelSettings) else ModelSettings(model=str(model))
    model_settings, engine = as_sections(start, settings or EngineSettings(), changes)
    engine = resolve_target(engine, None) if offline else engine
    folder = Path.home() / ".cache" / "legato" if cache_dir is None else Path(cache_dir)
    return build(model_settings, engine, cache_dir=folder, files=files, progress=progress, for_chat=for_chat)


def checked_delta(delta: Delta) -> Delta:
    """Raises `StepError` or `ConstraintError` if the reply has failed. Otherwise returns the delta."""
    if delta.finish is not None and delta.finish.reason is FinishReason.ERROR:
        raise StepError(delta.finish.message)
    if delta.finish is not None and delta.finish.reason is FinishReason.CONSTRAINT:
        raise ConstraintError(delta.finish.message)
    return delta


def _progress_bar(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not show)
