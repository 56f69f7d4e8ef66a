"""An adapter: the continuous batching of Hugging Face transformers behind POST /v1/completions.

`transformers serve` takes prompts as text only, and the client sends token ids: this hands the ids to the
same manager. Run from the project's root, in an environment with torch and transformers: see
benchmarks/README.md.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import torch
import transformers
import uvicorn

from benchmarks.adapter import Body, application


class Bridge:
    """Requests to the manager's thread, results back to the event loop."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._count = 0

    async def stream(self, body: Body) -> AsyncIterator[list[int]]:
        self._count += 1
        name = f"request-{self._count}"
        results: asyncio.Queue[Any] = asyncio.Queue()
        self._manager.register_result_handler(name, results.put_nowait)
        self._manager.add_request(
            body.prompt, request_id=name, max_new_tokens=body.max_tokens, streaming=True, eos_token_id=-1
        )
        sent, is_finished = 0, False
        try:
            while not is_finished:
                result = await results.get()
                if result.error is not None:
                    raise RuntimeError(result.error)
                is_finished = result.is_finished()
                yield result.generated_tokens[sent:]
                sent = len(result.generated_tokens)
        finally:
            if not is_finished:
                self._manager.cancel_request(name)


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' continuous batching over HTTP.")
    parser.add_argument("model", help="folder in Hugging Face form")
    parser.add_argument("--port", type=int, default=8410)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    )
    make_config: Any = transformers.GenerationConfig
    manager = model.init_continuous_batching(generation_config=make_config(do_sample=False, eos_token_id=-1))
    manager.start()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)

    def tokenize(text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    app = application(f"transformers {transformers.__version__}", Bridge(manager).stream, tokenize)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")
    manager.stop(block=True)


if __name__ == "__main__":
    main()
