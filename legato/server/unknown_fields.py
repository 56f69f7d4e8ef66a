"""Fields that a request body does not have: they are refused, or ignored with a line in the log."""

import logging
import re

from pydantic_core import PydanticCustomError

logger = logging.getLogger(__name__)

MAX_LINES = 100
"""Clients choose the names, so their number has no limit of its own."""
_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.-]{0,63}", re.ASCII)


class UnknownFields:
    """The rule of one server. Mutable: it knows which names the log has. Threads may share it."""

    def __init__(self, *, ignore: bool = False) -> None:
        """Within messages, their parts and tools they are ignored in any case; `ignore` says so for all of a
        body."""
        self._ignore = ignore
        self._logged: set[str] = set()

    def met(self, name: str, place: str | None) -> None:
        """A body has the field `name` at `place`, such as `messages[]`; None where it must be refused.

        Raises `PydanticCustomError` if it is refused. Each name gets one line, however often it comes. A name
        that is no identifier may be text of a prompt, and is not shown.
        """
        if place is None and not self._ignore:
            raise PydanticCustomError("unknown", "unknown field", {"field": name})
        shown = name if _IDENTIFIER.fullmatch(name) else "(a name that is no identifier)"
        field = f"{place}.{shown}" if place else shown
        if field in self._logged or len(self._logged) > MAX_LINES:
            return
        self._logged.add(field)
        if len(self._logged) > MAX_LINES:
            logger.warning("more than %d unknown fields: further ones are not logged", MAX_LINES)
        else:
            logger.warning("requests have the unknown field %s; it is ignored", field)
