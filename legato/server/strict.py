"""What all request bodies and their parts have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

NONE: tuple[object, ...] = (None,)
NO_LIST: tuple[object, ...] = (None, [])


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
            elif value is not None or name not in known:
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
