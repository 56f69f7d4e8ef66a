"""`legato generate`: one prompt, one reply, printed as it comes."""

from legato.cli.load import load_llm
from legato.config import Settings
from legato.core.request import SamplingParams


def print_reply(
    settings: Settings,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop: list[str],
) -> None:
    """The reply goes to standard output, everything else to standard error."""
    llm = load_llm(settings)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    for delta in llm.stream(prompt, params, stop=stop):
        print(delta.text, end="", flush=True)
    print()
