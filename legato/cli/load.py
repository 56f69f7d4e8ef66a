"""Loading a model with its stages shown on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from legato.cli.interrupts import importing
from legato.cli.options import cache_dir
from legato.config import Settings
from legato.models.source import find_files

if TYPE_CHECKING:
    from legato.engine.llm import LLM


def load_llm(
    settings: Settings, *, alone: bool = False, for_chat: bool = False, as_server: bool = False
) -> "LLM":
    """The model of the settings, ready for offline use; `alone` for one request at a time, with memory for
    no more; `for_chat` only if it has a chat template; `as_server` with all that a server would choose."""
    engine = settings.engine.model_copy(update={"max_running": 1}) if alone else settings.engine
    with stages() as progress:
        files = find_files(settings.model.model, cache_dir=cache_dir(), progress=progress)
        with importing():
            from legato.engine.build import build  # torch takes seconds, and not every command needs it
            from legato.engine.llm import LLM

        if as_server:
            return LLM(
                build(
                    settings.model,
                    engine,
                    cache_dir=cache_dir(),
                    files=files,
                    progress=progress,
                    for_chat=for_chat,
                )
            )
        return LLM.load(
            settings.model, engine, cache_dir=cache_dir(), files=files, progress=progress, for_chat=for_chat
        )


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Something to tell the stages of loading to: a spinner on a terminal, elsewhere a line for each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: console.print(stage, markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda stage: status.update(escape(stage))
