"""Settings from their sources, with errors that name the source, the limits and the value."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from legato.config.bounded_file import read_bounded
from legato.config.faults import as_config_error
from legato.config.settings import EngineSettings, ModelSettings, Settings, fields
from legato.config.suggest import did_you_mean
from legato.config.vllm import RENAMED, find_other, translate
from legato.errors import ConfigError

Table = TypeVar("Table", ModelSettings, EngineSettings)


def load_settings(
    file: Path | None, overrides: Mapping[str, object], origins: Mapping[str, str] = MappingProxyType({})
) -> Settings:
    """Settings from runtime.toml, if given, with `overrides` (name -> value) on top.

    `origins` says of an override where it came from, such as `--port` or `LEGATO_PORT`. Raises `ConfigError`,
    one line: where the value came from (or the file and the setting), what is allowed, the value.
    """
    tables = {} if file is None else _read_toml(file)
    merged: dict[str, object] = dict(tables)
    for section, name, _ in fields():
        table = merged.get(section, {})
        if name in overrides and isinstance(table, Mapping):
            merged[section] = {**table, name: overrides[name]}
    sources = {name: origins.get(name, f"{section}.{name}") for section, name, _ in fields()}
    given = {name: sources[name] for name in overrides if name in sources}
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise as_config_error(error, str(file or "settings"), Settings, given) from None


def as_sections(
    model: ModelSettings, engine: EngineSettings, changes: Mapping[str, object]
) -> tuple[ModelSettings, EngineSettings]:
    """The same settings with changes, by our names or vLLM's. Raises `ConfigError`."""
    known = {name: section for section, name, _ in fields() if section != "server"}
    ours: dict[str, object] = {}
    for name, value in changes.items():
        if name in known:
            ours[name] = value
        elif name in RENAMED or find_other(name):
            ours |= [translated] if (translated := translate(name, value)) else []
        else:
            raise ConfigError(f"{name}: no such setting{did_you_mean(name, known)}", param=name)
    return _changed(model, ours), _changed(engine, ours)


def _changed(section: Table, changes: Mapping[str, object]) -> Table:
    given = {name: getattr(section, name) for name in section.model_fields_set}
    own = {name: value for name, value in changes.items() if name in type(section).model_fields}
    return type(section)(**(given | own))


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bounded(file).decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML ({error})") from error
