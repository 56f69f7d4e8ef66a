"""`legato chat`: a conversation in the terminal, streamed."""

import contextlib

from rich.console import Console
from rich.markup import escape

from legato.cli.load import load_llm
from legato.config import Settings
from legato.engine.inputs import chat_prompt
from legato.errors import RequestError, StepError

with contextlib.suppress(ImportError):  # not on every system; gives `input` line editing and a history
    import readline  # noqa: F401

HELP = "An empty line or Ctrl-D ends the conversation, /new starts over."


def talk(settings: Settings, system: str | None, max_tokens: int, temperature: float | None) -> None:
    """Read a line, stream the answer, remember both. Without `temperature` the model's own sampling holds."""
    asked = {} if temperature is None else {"temperature": temperature}
    llm = load_llm(settings, alone=True, for_chat=True)
    console = Console()
    console.print(f"[bold]{escape(llm.model.name)}[/bold]. {HELP}")
    start: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, object]] = list(start)
    while line := _read(console):
        if line == "/new":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            ids = chat_prompt(llm.model, messages)
            room = llm.model.max_model_len - len(ids)
            params = llm.get_default_sampling_params(max_tokens=max(1, min(max_tokens, room)), **asked)
            for delta in llm.stream(ids, params):
                console.print(delta.text, end="", markup=False, highlight=False, soft_wrap=True)
                answer += delta.text
        except (RequestError, StepError) as error:
            console.print(f"[red]{escape(error.message)}[/red] /new starts over.")
            messages.pop()
            continue
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/dim]", end="")
        console.print()
        messages.append({"role": "assistant", "content": answer})


def _read(console: Console) -> str:
    try:
        return console.input("[bold cyan]> [/bold cyan]").strip()
    except EOFError:
        return ""
