"""Unknown fields of request bodies: they are refused, or ignored with a line in the log."""

import logging
import re

from pydantic_core import PydanticCustomError

logger = logging.getLogger(__name__)

MAX_LOGGED = 100
"""The most names that are logged. Clients choose the names, so there is no other limit."""
_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.-]{0,63}", re.ASCII)


class UnknownFields:
    """How one server treats unknown fields. It remembers which names it has logged. Thread-safe."""

    def __init__(self, *, ignore: bool = False) -> None:
        """Unknown fields within messages, content parts and tools are always ignored. With `ignore`, all
        are."""
        self._ignore = ignore
        self._logged: set[str] = set()

    def check(self, name: str, location: str | None) -> None:
        """Refuse or log the unknown field `name` at `location`, such as `messages[]`.

        A `location` of None refuses the field unless all are ignored. Raises `PydanticCustomError` if it is
        refused. Each name is logged once. A name that is not an identifier may be text of a prompt, so it is
        not shown.
        """
        if location is None and not self._ignore:
            raise PydanticCustomError("unknown", "unknown field", {"field": name})
        shown = name if _IDENTIFIER.fullmatch(name) else "(a name that is no identifier)"
        field = f"{location}.{shown}" if location else shown
        if field in self._logged or len(self._logged) > MAX_LOGGED:
            return
        self._logged.add(field)
        if len(self._logged) > MAX_LOGGED:
            logger.warning("more than %d unknown fields: further ones are not logged", MAX_LOGGED)
        else:
            logger.warning("requests have the unknown field %s; it is ignored", field)
