"""`legato generate`: one prompt, one reply, printed as it comes."""

import io
import sys

from legato.cli.load import load_llm
from legato.config import Settings
from legato.engine.params import SamplingParams

DEFAULT_MAX_TOKENS = 128


def print_reply(
    settings: Settings,
    prompt: str,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop: list[str],
) -> None:
    """The reply goes to standard output, everything else to standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another alphabet
    llm = load_llm(settings, alone=True)
    ids = llm.model.tokenizer.encode(prompt)
    room = llm.model.max_model_len - len(ids)
    params = SamplingParams(
        max_tokens=max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room)),
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )
    for delta in llm.stream(ids, params):
        print(delta.text, end="", flush=True)
    print()
