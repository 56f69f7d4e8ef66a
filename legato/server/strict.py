"""What all request bodies and their parts have in common."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

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
    """Strict: no unknown field, no conversion between types, no NaN and no infinity."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are not supported -> the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: object) -> object:
        if not isinstance(data, dict):
            raise PydanticCustomError("not_an_object", "must be a JSON object")
        known = {field.alias or name for name, field in cls.model_fields.items()}
        asked = {}
        for name, value in data.items():
            if name in cls.neutral:
                if not any(_same(value, neutral) for neutral in cls.neutral[name]):
                    raise PydanticCustomError("not_supported", "is not supported", {"field": name})
            elif name not in known:
                raise PydanticCustomError("unknown", "unknown field", {"field": name})
            elif value is not None:
                asked[name] = value
        return asked

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """What is taken: also null for a default, and of what is not supported the values that ask for
        nothing."""
        schema = handler(core)
        body = handler.resolve_ref_schema(schema)
        for name, field in body["properties"].items():
            if name not in body.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                body["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        for name, values in cls.neutral.items():
            body["properties"][name] = {"enum": [*values], "description": "Not supported."}
        return schema


def _same(value: object, neutral: object) -> bool:
    """Whether they are one value in JSON, where 1 is 1.0, but not true."""
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral


def unicode(text: str) -> str:
    """For a text that is used as text: JSON can hold what is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "holds a lone surrogate") from None
    return text
