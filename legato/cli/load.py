"""Loading a model with its stages shown on standard error."""

from rich.console import Console
from rich.markup import escape

from legato.cli.options import cache_dir
from legato.config import Settings
from legato.engine.llm import LLM


def load_llm(settings: Settings) -> LLM:
    """The model of the settings, ready for offline use."""
    console = Console(stderr=True)
    with console.status("starting") as status:
        return LLM.load(
            settings.model,
            settings.engine,
            cache_dir=cache_dir(),
            progress=lambda stage: status.update(escape(stage)),
        )
