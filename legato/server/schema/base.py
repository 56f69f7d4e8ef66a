"""The base class of all request bodies and their parts."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from legato.server.schema.unknown_fields import UnknownFields

NONE: tuple[object, ...] = (None,)
NO_LIST: tuple[object, ...] = (None, [])
MAX_ENTRIES = 1024
"""The most entries of an object whose keys the client chooses."""

T = TypeVar("T")


def _limit_entries(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError("entries", f"has {len(value)} entries, at most {MAX_ENTRIES} possible")
    return value


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "contains a number that is not finite") from None
    except RecursionError:
        raise PydanticCustomError("deep", "is nested too deeply") from None
    return value


# Validation stops at the first error. By default pydantic collects all of them, a kilobyte each, so a body
# of errors would take a thousand times its own size.
Items = Annotated[list[T], Field(fail_fast=True)]
Entries = Annotated[dict[str, T], BeforeValidator(_limit_entries)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_json)]
"""An object of any JSON values."""


class Body(BaseModel):
    """A strict model: no conversion between types, no NaN and no infinity.

    The context of its validation is the server's `UnknownFields`.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Unsupported fields -> the values that request nothing, which are accepted."""
    labels: ClassVar[frozenset[str]] = frozenset()
    """Fields that cannot change the reply. They are accepted with any value and ignored."""
    other_types: ClassVar[Mapping[str, str]] = {}
    """Unsupported values of `type` -> what they are called in an error, in the plural."""
    location: ClassVar[str | None] = None
    """The path of this model in a body, if unknown fields are ignored there. None if they are refused."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object, info: ValidationInfo) -> object:
        """The fields of the model. Refuses unsupported fields, and drops neutral values, labels and null."""
        if not isinstance(data, dict):
            raise PydanticCustomError("not_an_object", "must be a JSON object")
        cls._check_type(data.get("type"))
        unknown = info.context or UnknownFields()
        names = {field.alias or name for name, field in cls.model_fields.items()}
        known = {}
        for name, value in data.items():
            if name in names:
                if value is not None:
                    known[name] = value
            elif name in cls.neutral:
                if not any(_equal_json(value, neutral) for neutral in cls.neutral[name]):
                    raise PydanticCustomError("not_supported", "is not supported", {"field": name})
            elif name not in cls.labels:
                unknown.check(name, cls.location)
        return known

    @classmethod
    def _check_type(cls, value: object) -> None:
        """Check `type` before all other fields, because an object of another type has other fields."""
        field = cls.model_fields.get("type")
        possible = () if field is None else get_args(field.annotation)
        if not possible or value is None or value in possible:
            return
        *first, last = map(repr, possible)
        allowed = f"{', '.join(first)} or {last}" if first else last
        problem = f"must be {allowed}"
        if isinstance(value, str) and value in cls.other_types:
            problem = f"{cls.other_types[value]} are not supported, it {problem}"
        raise PydanticCustomError("type", problem, {"field": "type"})

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of what is accepted, including null for a default, labels, and neutral values."""
        schema = handler(core)
        body = handler.resolve_ref_schema(schema)
        for name, field in body["properties"].items():
            if name not in body.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                body["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        for name, values in cls.neutral.items():
            body["properties"][name] = {"enum": [*values], "description": "Not supported."}
        for name in sorted(cls.labels):
            body["properties"][name] = {"description": "A label. Not used."}
        body["additionalProperties"] = cls.location is not None
        return schema


def _equal_json(value: object, neutral: object) -> bool:
    """Whether two values are equal in JSON, where 1 equals 1.0 but not true."""
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral
