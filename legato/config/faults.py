"""pydantic's errors about settings as one line of ours: where, what is allowed, the value, what was meant."""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from legato.config.suggest import did_you_mean
from legato.config.vllm import legato_name
from legato.errors import ConfigError


def as_config_error(
    error: ValidationError,
    where: str,
    model: type[BaseModel],
    given: Mapping[str, str] = MappingProxyType({}),
) -> ConfigError:
    """The first of pydantic's errors about `model`.

    `where` is the file or the class that was read; `given` tells of some settings where else they came from,
    such as `--port`. Values of secrets are left out.
    """
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    hidden = {name for _, name, field in settings_of(model) if _is_secret(field)}
    value, hint = first["input"], ""
    shown = "" if isinstance(value, Mapping) or hidden & set(place) else f" (not {value!r:.100})"
    if first["type"] == "extra_forbidden":
        message, shown, hint = "no such setting", "", _meant(model, place)
    elif first["type"] in ("model_type", "model_attributes_type"):
        message = "not a table"
    elif first["type"] == "literal_error" and isinstance(value, str) and not hidden & set(place):
        hint = did_you_mean(value, re.findall(r"'([^']*)'", message))
    # A fault of settings that do not go together stands at their table, and its message has their names.
    named = set(place) | (set() if place[1:] else set(re.findall(r"\w+", message)))
    at_fault = [given[name] for _, name, _ in settings_of(model) if name in named and name in given]
    origin = ", ".join(at_fault) or ": ".join(filter(None, (where, ".".join(place))))
    return ConfigError(f"{origin}: {message}{shown}{hint}", param=place[:2][-1] if place else None)


def settings_of(model: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, name, field) of every setting; the section is "" if `model` is one itself."""
    for name, field in model.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            yield from ((name, inner, info) for inner, info in table.model_fields.items())
        else:
            yield "", name, field


def _meant(model: type[BaseModel], place: list[str]) -> str:
    """What an unknown name was meant to be, as the end of a message."""
    *table, name = place
    section = "".join(table)
    homes = {known: home for home, known, _ in settings_of(model)}
    if name in homes:
        return f"; it belongs in the table [{homes[name]}]"
    own = legato_name(name)
    if own in homes:
        return f"; Legato's name for it is {'.'.join(filter(None, (homes[own], own)))}"
    tables = list(model.model_fields) if not section else []
    beside = [known for known, home in homes.items() if home == section]
    return did_you_mean(name, tables + beside) or did_you_mean(name, homes)


def _is_secret(field: FieldInfo) -> bool:
    """Whether a setting's values must not be shown."""
    return SecretStr in get_args(field.annotation)
