"""What all request bodies and their parts have in common."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

NONE: tuple[object, ...] = (None,)
NO_LIST: tuple[object, ...] = (None, [])


class Body(BaseModel):
    """Strict: no unknown field, no conversion between types, no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are not supported -> the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: object) -> object:
        if not isinstance(data, dict):
            raise PydanticCustomError("not_an_object", "must be a JSON object")
        asked = {}
        for name, value in data.items():
            if name in cls.neutral:
                if value not in cls.neutral[name]:
                    raise PydanticCustomError("not_supported", "is not supported", {"field": name})
            elif value is not None or name not in cls.model_fields:
                asked[name] = value
        return asked


def unicode(text: str) -> str:
    """For a text that is used as text: JSON can hold what is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "holds a lone surrogate") from None
    return text
