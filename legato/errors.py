"""The one tree of exceptions. Each class knows the HTTP status and the OpenAI error type it becomes.

    LegatoError
    ├── ConfigError            a setting, flag or runtime.toml entry is wrong (start-up)
    ├── ModelError             a model's files are missing, damaged or not supported (start-up)
    ├── RequestError           the client's request is wrong                          400
    │   ├── AuthenticationError    it brings no key that opens this server            401
    │   ├── BodyTooLargeError      its body has more bytes than are read              413
    │   ├── ConstraintError        its grammar cannot be followed any further         400
    │   ├── ContextLengthError     it can never fit, whatever the load                400
    │   ├── ForbiddenError         another machine's web page may have sent it        403
    │   ├── MediaTypeError         its body is in an encoding that is not read        415
    │   └── NotFoundError          no such model or route                             404
    ├── QueueFullError         as many requests wait as may                           429
    ├── UnavailableError       loading, draining or shut down; a helper was killed    503
    ├── DeadlineError          the request's own timeout passed                       504
    └── StepError              a model step failed; the request in it is lost         500

Messages say what is wrong, where, and the limits in numbers; they never hold a prompt's text.
"""

from typing import ClassVar


class LegatoError(Exception):
    """Base of every error that Legato raises on purpose."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """`param` names the request field or setting at fault; `code` is the OpenAI error code."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(LegatoError):
    """A setting is wrong. Raised at start-up only."""


class ModelError(LegatoError):
    """A model cannot be loaded. The message is one line: which file, and what is wrong with it."""


class RequestError(LegatoError):
    """The request cannot be served as it is written."""

    status = 400
    type = "invalid_request_error"


class AuthenticationError(RequestError):
    """The request brings no API key, or a wrong one. The message never repeats it."""

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class BodyTooLargeError(RequestError):
    """The request's body is longer than the server reads."""

    status = 413

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request_too_large")


class ConstraintError(RequestError):
    """No token can continue the reply in the form that was asked for, or it takes too much work to tell."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt and its reply, can never fit."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ForbiddenError(RequestError):
    """A web page of another machine may have sent the request."""

    status = 403

    def __init__(self, message: str) -> None:
        super().__init__(message, code="forbidden")


class MediaTypeError(RequestError):
    """The request's body is in an encoding that the server does not read."""

    status = 415

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unsupported_media_type")


class NotFoundError(RequestError):
    """No such model or route."""

    status = 404


class QueueFullError(LegatoError):
    """As many requests, or as many of their tokens, wait as may."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        """`retry_after_s`: when it is worth asking again, in seconds."""
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class DeadlineError(LegatoError):
    """The timeout that the request asked for passed before its reply was complete."""

    status = 504
    type = "timeout_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="timeout", code="deadline_exceeded")


class UnavailableError(LegatoError):
    """The server is loading, draining or shut down, or a process that it needs was killed."""

    status = 503
    type = "service_unavailable_error"


class StepError(LegatoError):
    """The model step that this request was in failed."""
