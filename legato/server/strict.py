"""What all request bodies and their parts have in common."""

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

from legato.server.unknown_fields import UnknownFields

NONE: tuple[object, ...] = (None,)
NO_LIST: tuple[object, ...] = (None, [])
MAX_ENTRIES = 1024
"""Of an object whose keys the client chooses."""

T = TypeVar("T")


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError("entries", f"has {len(value)} entries, at most {MAX_ENTRIES} possible")
    return value


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "holds a number that is not finite") from None
    except RecursionError:
        raise PydanticCustomError("deep", "is nested too deeply") from None
    return value


# These stop at the first fault. By itself pydantic notes every one, a kilobyte each: a body of faults would
# take a thousand times its own size.
Items = Annotated[list[T], Field(fail_fast=True)]
Entries = Annotated[dict[str, T], BeforeValidator(_few)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Of whatever JSON has."""


class Body(BaseModel):
    """Strict: no conversion between types, no NaN and no infinity. The context of its validation is the
    server's `UnknownFields`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are not supported -> the values that ask for nothing."""
    labels: ClassVar[frozenset[str]] = frozenset()
    """Fields that ask nothing of the model: taken with any value, and not used."""
    other_types: ClassVar[Mapping[str, str]] = {}
    """Values of `type` that others support -> the plural of what they are."""
    place: ClassVar[str | None] = None
    """Where in a body it stands, if unknown fields are ignored there; None where they are refused."""

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, data: object, info: ValidationInfo) -> object:
        """The fields that ask for something."""
        if not isinstance(data, dict):
            raise PydanticCustomError("not_an_object", "must be a JSON object")
        cls._check_type(data.get("type"))
        unknown = info.context or UnknownFields()
        known = {field.alias or name for name, field in cls.model_fields.items()}
        asked = {}
        for name, value in data.items():
            if name in known:
                if value is not None:
                    asked[name] = value
            elif name in cls.neutral:
                if not any(_same(value, neutral) for neutral in cls.neutral[name]):
                    raise PydanticCustomError("not_supported", "is not supported", {"field": name})
            elif name not in cls.labels:
                unknown.met(name, cls.place)
        return asked

    @classmethod
    def _check_type(cls, value: object) -> None:
        """Comes before all other checks: a thing of another type has other fields. It may be missing."""
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
        """What is taken: also null for a default, labels, and of what is not supported the values that ask
        for nothing."""
        schema = handler(core)
        body = handler.resolve_ref_schema(schema)
        for name, field in body["properties"].items():
            if name not in body.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                body["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        for name, values in cls.neutral.items():
            body["properties"][name] = {"enum": [*values], "description": "Not supported."}
        for name in sorted(cls.labels):
            body["properties"][name] = {"description": "A label. Not used."}
        body["additionalProperties"] = cls.place is not None
        return schema


def _same(value: object, neutral: object) -> bool:
    """Whether they are one value in JSON, where 1 is 1.0, but not true."""
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral
