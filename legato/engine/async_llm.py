"""A model in an asyncio program: many callers at a time, one engine in a thread of its own.

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
from legato.engine.asking import Asked, Completion, Message, Prompt, as_conversations, ask, chat_prompt
from legato.engine.async_engine import AsyncEngine
from legato.engine.build import Built
from legato.engine.llm import checked_delta, load
from legato.engine.output import Delta
from legato.engine.params import SamplingParams, defaults_of
from legato.errors import UnavailableError


class AsyncLLM:
    """A loaded model; it works between `async with` and its end. All requests run together, as in a server.

    All methods are called in the event loop's thread.
    """

    def __init__(
        self,
        model: str | Path | ModelSettings | Built = "gemma3-270m",
        settings: EngineSettings | None = None,
        *,
        max_waiting: int | None = None,
        cache_dir: str | Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
        for_chat: bool = False,
        **changes: Any,
    ) -> None:
        """Load a model, as `LLM` does: this blocks for seconds, so do it before the event loop runs, or in
        `asyncio.to_thread`. Where more than `max_waiting` requests wait, more raise `QueueFullError`."""
        self.built = load(model, settings, changes, cache_dir=cache_dir, progress=progress, for_chat=for_chat)
        self._engine = AsyncEngine(self.built.engine, self.built.tokenizer, max_waiting=max_waiting)
        self._runs = False

    async def __aenter__(self) -> Self:
        await self._engine.start()
        self._runs = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runs = False
        await self._engine.stop()

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's makers want where nothing is said (its generation_config.json), with changes."""
        return defaults_of(self.built.sampling_defaults, **changes)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Complete one prompt, delta by delta. Closing the iterator or cancelling its task aborts it.

        Raises `RequestError` if it cannot be served, `QueueFullError` if too many wait, and `StepError` if a
        model step fails.
        """
        return self._deltas(self._ask(prompt, params))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Complete one prompt. For many, gather: `await asyncio.gather(*map(llm.generate, prompts))`.

        Raises what `stream` does.
        """
        asked = self._ask(prompt, params)
        async with aclosing(self._deltas(asked)) as deltas:
            return asked.completion([delta async for delta in deltas])

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Answer a conversation, a list of messages as in OpenAI's API; `options` as in `LLM.chat`."""
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
            self.built,
            conversation,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def _ask(self, prompt: Prompt, params: SamplingParams | None) -> Asked:
        if not self._runs:
            raise UnavailableError("AsyncLLM does not run: use it within `async with AsyncLLM(...) as llm:`")
        return ask(self.built, prompt, params)

    async def _deltas(self, asked: Asked) -> AsyncGenerator[Delta, None]:
        request = asked.request
        with self._engine.submit(
            request.prompt, request.params, text=asked.text, request_id=request.id, arrival=request.arrival
        ) as deltas:
            async for delta in deltas:
                yield checked_delta(delta)
