"""Offline use: a model in this process, driven by the caller. No thread, no server.

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
from legato.engine.asking import (
    Asked,
    Completion,
    Message,
    Prompt,
    as_conversations,
    as_params,
    as_prompts,
    ask,
    chat_prompt,
)
from legato.engine.build import Built, build
from legato.engine.output import Delta, Reply
from legato.engine.params import SamplingParams, defaults_of
from legato.engine.scheduling import resolve_target
from legato.errors import ConfigError, ConstraintError, StepError
from legato.models.source import ModelFiles

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model. All that is asked for at a time runs together, in mixed batches, as in a server.

    Whoever reads drives the engine: a step is run when somebody wants a token that is not there yet, and
    what it gives to others waits for them.
    """

    def __init__(
        self,
        model: str | Path | ModelSettings | Built = "gemma3-270m",
        settings: EngineSettings | None = None,
        *,
        cache_dir: str | Path | None = None,
        files: ModelFiles | None = None,
        progress: Callable[[str], None] = lambda _: None,
        for_chat: bool = False,
        **changes: Any,
    ) -> None:
        """Load a model by name, path or hub id.

        `changes` are settings by name, of the model or the engine: `LLM("gemma3-270m", max_running=8)`.
        `files` are the model's, if they were found already. Raises `ModelError` or `ConfigError`; with
        `for_chat` also if it has no chat template.
        """
        self.built = load(
            model,
            settings,
            changes,
            cache_dir=cache_dir,
            files=files,
            progress=progress,
            for_chat=for_chat,
            offline=True,
        )
        self._open: dict[RequestId, tuple[Reply, deque[Delta]]] = {}
        """The replies in the making, and of each the deltas that nobody read yet."""

    @classmethod
    def load(cls, *arguments: Any, **values: Any) -> Self:
        """The same as calling the class."""
        return cls(*arguments, **values)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's makers want where nothing is said (its generation_config.json), with changes."""
        return defaults_of(self.built.sampling_defaults, **changes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Complete prompts (texts or lists of token ids), in order.

        `params` are for all of them, or a list with one for each; None: the model's own sampling. Raises
        `RequestError` before any work if a prompt can never be served. A reply whose model step fails has
        `finish_reason` error; the others go on.
        """
        many = as_prompts(prompts)
        asked = [ask(self.built, *pair) for pair in zip(many, as_params(params, len(many)), strict=True)]
        return self._complete(asked, show_progress)

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
        """Answer a conversation, or several, in order. One is a list of messages as in OpenAI's API.

        The rest is as in `generate`.
        """
        prompts = [
            chat_prompt(
                self.built,
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

        Raises `RequestError` if it cannot be served and `StepError` if a model step fails.
        """
        asked = ask(self.built, prompt, params)
        return (checked_delta(delta) for _, delta in self._run([asked]))

    def _complete(self, asked: Sequence[Asked], show_progress: bool) -> list[Completion]:
        deltas: dict[RequestId, list[Delta]] = {one.request.id: [] for one in asked}
        with _progress(show_progress) as bar:
            task = bar.add_task("Prompts", total=len(asked))
            for request_id, delta in self._run(asked):
                deltas[request_id].append(delta)
                bar.update(task, advance=int(delta.finish is not None))
        return [one.completion(deltas[one.request.id]) for one in asked]

    def _run(self, asked: Sequence[Asked]) -> Iterator[tuple[RequestId, Delta]]:
        """The deltas of some requests as they come; leaving aborts what is left of them."""
        engine = self.built.engine
        mine = {one.request.id: Reply(one.request, self.built.tokenizer, one.text) for one in asked}
        try:
            for one in asked:
                self._open[one.request.id] = mine[one.request.id], deque()
                engine.submit(one.request)
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


def load(
    model: str | Path | ModelSettings | Built,
    settings: EngineSettings | None,
    changes: Mapping[str, object],
    *,
    cache_dir: str | Path | None,
    files: ModelFiles | None = None,
    progress: Callable[[str], None] = lambda _: None,
    for_chat: bool = False,
    offline: bool = False,
) -> Built:
    """A model with its engine; one that is built already as it is. Raises `ModelError` or `ConfigError`.

    `offline`: nobody waits for the next token, so an automatic target is none.
    """
    if isinstance(model, Built):
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
    """A delta of a reply that has not failed. Raises `StepError` or `ConstraintError` if it has."""
    if delta.finish is not None and delta.finish.reason is FinishReason.ERROR:
        raise StepError(delta.finish.message)
    if delta.finish is not None and delta.finish.reason is FinishReason.CONSTRAINT:
        raise ConstraintError(delta.finish.message)
    return delta


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not show)
