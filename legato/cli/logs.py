"""What a line of the log looks like. Whoever logs need not care what a text holds: no line can be forged.

As text, characters that are not printable, line ends among them, are escaped in every message, and the lines
of a traceback are indented. As JSON, each record is one object on one line.
"""

import json
import logging
from datetime import UTC, datetime

from legato.config import ServerSettings


def configure(settings: ServerSettings) -> None:
    """Everything that this process logs goes to standard error, in one format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else LineFormatter())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn.error").setLevel("WARNING")  # it tells of every start, under that name


class LineFormatter(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO legato.access: ..."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802
        return _indented(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(stack_info)


class JsonFormatter(logging.Formatter):
    """An object with time, level, logger, message, and what else the record brings as `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


def _escaped(text: str) -> str:
    """What is printed as it is stays; all else becomes \\n, \\x1b, \\u2028."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _indented(text: str) -> str:
    return "\n".join(f"    {_escaped(line)}" for line in text.split("\n"))
