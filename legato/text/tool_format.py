"""How model families write calls of tools: the one definition of a call.

The grammar of replies (`tool_call_grammar`) and the parser of replies (`tool_call_parser`) are made from it,
so that what the one lets in as a call is what the other finds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BLANKS: Final = " \n\t\r"
MAX_BLANKS: Final = 64
"""In one place of a call. What may become one is read again with each token: a reply of blanks must not make
that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The words around calls. Blanks may stand before each word, but for a marker that is the first."""

    first: tuple[str, ...] = ()
    """Before the first call."""
    after: tuple[str, ...] = ()
    """After each."""
    next: tuple[str, ...] = ()
    """Before each further one; none if there is one at most."""
    close: tuple[str, ...] = ()
    """After all."""


HEAD: Final = ("{", '"name"', ":")
"""Words with which a call begins."""
FRAMELESS: Final = Frame()
FENCED: Final = tuple(Frame(first=(fence,), after=("```",)) for fence in ("```json", "```"))
"""Where a reply may be text, one that is a call and nothing else needs no marker: small models leave it out.
Then the call stands alone or in a fence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """`marker before call after between call after .. close`, each call a JSON object of a name and
    arguments. Blanks may stand wherever JSON has them."""

    name: str
    marker: str = ""
    """The text, or the special token, that begins calls; "" if a reply that calls is nothing but the call."""
    before: str = ""
    after: str = ""
    between: str | None = None
    """None where a reply has one call at most."""
    close: str = ""
    arguments: str = "arguments"
    """The key beside "name"."""
    short_ids: bool = False
    """Whether templates take only ids of nine letters and digits."""

    @property
    def frame(self) -> Frame:
        """Of calls that are demanded, and of those with a marker."""
        return Frame(
            first=_words(self.marker, self.before),
            after=_words(self.after),
            next=_words(self.between or ""),
            close=_words(self.close),
        )

    @property
    def words(self) -> tuple[str, ...]:
        """All words around calls."""
        frame = self.frame
        return (*frame.first, *frame.after, *frame.next, *frame.close)

    def head(self, name: str) -> tuple[str, ...]:
        """The words from a call's beginning to the end of its name: from there on it is a call."""
        return (*HEAD, f'"{name}"')

    @property
    def joint(self) -> tuple[str, ...]:
        """The words between the name and the arguments, which are an object; after that comes "}"."""
        return ",", f'"{self.arguments}"', ":"

    def written(self, calls: Sequence[tuple[str, object]]) -> str:
        """Calls, (name, arguments) each, as the model would write them. At least one."""
        made = [
            json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False) + self.after
            for name, arguments in calls
        ]
        return self.marker + self.before + (self.between or "\n").join(made) + self.close


HERMES: Final = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    before="\n",
    after="\n</tool_call>",
    between="\n<tool_call>\n",
)
FORMATS: Final = {
    format.name: format
    for format in (
        HERMES,
        ToolFormat(name="llama3_json", arguments="parameters"),
        ToolFormat(
            name="mistral", marker="[TOOL_CALLS]", before="[", between=", ", close="]", short_ids=True
        ),
    )
}
"""By vLLM's names of its parsers. hermes is that of Hermes 2 and 3, Qwen 2.5 and 3 as well."""


def _words(*parts: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in parts)))
