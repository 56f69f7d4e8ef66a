"""What a line of the log looks like. Whoever logs need not care what a text holds: no line can be forged.

As text, characters that are not printable, line ends among them, are escaped in every message, and the lines
of a traceback are indented. As JSON, each record is one object on one line.

The text of an exception may hold what its function was given, such as a prompt: tracebacks are logged without
the texts of their exceptions, unless prompts are logged too. Code that knows that a text is harmless puts it
into its message.
"""

import json
import logging
import sys
import threading
import traceback
from datetime import UTC, datetime

from legato.config import ServerSettings

logger = logging.getLogger(__name__)

WITHHELD = " (its text may hold a prompt; --log-prompts shows it)"


def configure(settings: ServerSettings) -> None:
    """Everything that this process logs goes to standard error, in one format."""
    handler = logging.StreamHandler()
    kind = JsonFormatter if settings.log_format == "json" else LineFormatter
    handler.setFormatter(kind(texts=settings.log_prompts))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn.error").setLevel("WARNING")  # it tells of every start, under that name
    # By themselves these print to standard error.
    threading.excepthook = lambda lost: logger.error("a thread ended by an error", exc_info=lost.exc_value)
    sys.unraisablehook = lambda lost: logger.error("an error that nobody gets", exc_info=lost.exc_value)


class _Formatter(logging.Formatter):
    """With tracebacks that hold the texts of exceptions only if `texts`."""

    def __init__(self, format: str | None = None, *, texts: bool = False) -> None:
        super().__init__(format)
        self._texts = texts

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # where a formatter leaves its traceback for the next one
        return super().format(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        error = ei[1]  # type: ignore[index]
        if self._texts or error is None:
            return super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(_without_texts(error))


class LineFormatter(_Formatter):
    """2026-01-31 12:00:00,000 INFO legato.access: ..."""

    def __init__(self, *, texts: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", texts=texts)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(stack_info)


class JsonFormatter(_Formatter):
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


def _without_texts(error: BaseException) -> list[str]:
    """The lines of a traceback: where each exception of the chain was raised, and its type."""
    chain = [error]
    while (earlier := _earlier(chain[-1])) is not None and earlier not in chain:
        chain.append(earlier)
    lines = []
    for number, each in enumerate(reversed(chain)):
        if number:
            lines += ["", "Then:", ""]
        lines.append("Traceback (most recent call last):")
        lines += "".join(traceback.format_tb(each.__traceback__)).splitlines()
        lines.append(f"{type(each).__module__}.{type(each).__qualname__}{WITHHELD}")
        if isinstance(each, BaseExceptionGroup):
            lines += [f"  | {line}" for inner in each.exceptions for line in _without_texts(inner)]
    return lines


def _earlier(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _escaped(text: str) -> str:
    """What is printed as it is stays; all else becomes \\n, \\x1b, \\u2028."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _indented(text: str) -> str:
    return "\n".join(f"    {_escaped(line)}" for line in text.split("\n"))
