"""A model in an asyncio program: many callers at a time, one engine in its own thread.

async with AsyncLLM("gemma3-270m") as llm:
    async for delta in llm.stream("The capital of France is", SamplingParams(max_tokens=8)):
        print(delta.text, end="", flush=True)
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from legato.config import EngineSettings, ModelSettings
from legato.engine.async_engine import AsyncEngine
from legato.engine.build import LoadedModel
from legato.engine.inputs import (
    Completion,
    Message,
    PreparedRequest,
    Prompt,
    as_conversations,
    chat_prompt,
    prepare,
)
from legato.engine.llm import checked_delta, load
from legato.engine.output_processor import Delta
from legato.engine.params import SamplingParams, model_defaults
from legato.errors import UnavailableError


class AsyncLLM:
    """A loaded model. Use it within `async with`. All requests run together, as in a server.

    All methods must be called in the event loop's thread.
    """

    def __init__(
        self,
        model: str | Path | ModelSettings | LoadedModel = "gemma3-270m",
        settings: EngineSettings | None = None,
        *,
        max_waiting: int | None = None,
        cache_dir: str | Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
        for_chat: bool = False,
        **changes: Any,
    ) -> None:
        """Load a model, as `LLM` does. This blocks for seconds: call it before the event loop runs, or in
        `asyncio.to_thread`. If more than `max_waiting` requests wait, further ones raise `QueueFullError`."""
        self.model = load(model, settings, changes, cache_dir=cache_dir, progress=progress, for_chat=for_chat)
        self._engine = AsyncEngine(self.model.engine, self.model.tokenizer, max_waiting=max_waiting)
        self._is_running = False

    async def __aenter__(self) -> Self:
        await self._engine.start()
        self._is_running = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_running = False
        await self._engine.stop()

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling parameters (its generation_config.json), with changes."""
        return model_defaults(self.model.sampling_defaults, **changes)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Complete one prompt, delta by delta. Closing the iterator or cancelling its task aborts the
        request.

        Raises `RequestError` if the prompt cannot be served, `QueueFullError` if too many requests wait, and
        `StepError` if a model step fails.
        """
        return self._deltas(self._prepare(prompt, params))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Complete one prompt. For several: `await asyncio.gather(*map(llm.generate, prompts))`.

        Raises what `stream` raises.
        """
        prepared = self._prepare(prompt, params)
        async with aclosing(self._deltas(prepared)) as deltas:
            return prepared.completion([delta async for delta in deltas])

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Reply to a conversation, a list of messages as in OpenAI's API. `options` are those of
        `LLM.chat`."""
        return await self.generate(self.chat_prompt(messages, **options), params)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a conversation, for `stream`."""
        (conversation,) = as_conversations(messages)
        return chat_prompt(
            self.model,
            conversation,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def _prepare(self, prompt: Prompt, params: SamplingParams | None) -> PreparedRequest:
        if not self._is_running:
            raise UnavailableError(
                "AsyncLLM is not running: use it within `async with AsyncLLM(...) as llm:`"
            )
        return prepare(self.model, prompt, params)

    async def _deltas(self, prepared: PreparedRequest) -> AsyncGenerator[Delta, None]:
        request = prepared.request
        with self._engine.submit(
            request.prompt,
            request.params,
            text=prepared.text,
            request_id=request.id,
            arrival=request.arrival,
        ) as deltas:
            async for delta in deltas:
                yield checked_delta(delta)
