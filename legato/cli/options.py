"""Settings as command-line options: made from the one table in `legato.config`, flag by flag.

`--max-batch-tokens`, `LEGATO_MAX_BATCH_TOKENS` and `[engine] max_batch_tokens` are the same setting.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from legato.config import Settings, fields, load_settings
from legato.config.suggest import closest
from legato.config.vllm import RENAMED, legato_name
from legato.errors import ConfigError
from legato.models.packaged import PACKAGED_MODELS
from legato.models.source import locate

DEFAULT_FILE = Path("runtime.toml")

_CONTEXT = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)


def takes_settings(
    *sections: str, model_argument: bool, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of some sections; it is called with `settings` first.

    `without` are settings that the command has no use for. `model_argument` makes the model the command's
    argument: `legato serve MODEL`.
    """
    offered = {name for section, name, _ in fields() if section in sections and name not in without}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        def command(context: typer.Context, **values: Any) -> None:
            file = values.pop("config")
            given = {name: values.pop(name) for name in offered}
            overrides = {name: value for name, value in given.items() if value not in (None, [])}
            if file is None and DEFAULT_FILE.is_file():
                file = DEFAULT_FILE
            origins = {name: _origin(name, context, model_argument) for name in overrides}
            settings = load_settings(file, overrides, origins)
            try:
                function(settings, **values)
            except ConfigError as error:  # a value that only this machine or model refuses
                if error.param not in origins:
                    raise
                raise ConfigError(f"{error.message} ({origins[error.param]})", param=error.param) from error

        parameters = [_CONTEXT, *own, *_parameters(offered, model_argument)]
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _origin(name: str, context: typer.Context, model_argument: bool) -> str:
    """Where the value of a setting came from, as a user would name it."""
    source = context.get_parameter_source(name)
    if source is not None and source.name == "ENVIRONMENT":
        return _variable(name)
    return "MODEL" if name == "model" and model_argument else _flag(name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"LEGATO_{name.upper()}"


def _parameters(offered: set[str], model_argument: bool) -> list[inspect.Parameter]:
    config = typer.Option("--config", envvar="LEGATO_CONFIG", help="Settings file. Default: ./runtime.toml.")
    parameters = [_parameter("config", Annotated[Path | None, config])]
    for section, name, field in fields():
        if name not in offered:
            continue
        annotation = field.annotation
        kinds = set(get_args(annotation) or (annotation,)) - {type(None)}
        kind: Any = next((k for k in (bool, int, float) if kinds == {k}), str)
        if name in ("kv_memory", "max_body_size"):
            kind = str
        if get_origin(annotation) is tuple:
            kind = list[str]
        info = _option(section, name, field, is_switch=kind is bool)
        if name == "model" and model_argument:
            info = typer.Argument(
                envvar="LEGATO_MODEL",
                help=field.description,
                show_default=field.default,
                autocompletion=lambda: [model.name for model in PACKAGED_MODELS],
            )
        parameters.append(_parameter(name, Annotated[kind | None, info]))
    return parameters


def _option(section: str, name: str, field: FieldInfo, *, is_switch: bool) -> Any:
    names = []
    for known in (name, *(theirs for theirs, ours in RENAMED.items() if ours == name)):
        flag = _flag(known)
        names.append(f"{flag}/--no-{flag[2:]}" if is_switch else flag)
    choices = _choices(field)
    return typer.Option(
        *names,
        envvar=_variable(name),
        help=field.description,
        metavar="|".join(choices) or None,
        autocompletion=lambda: list(choices),
        rich_help_panel=f"{section.capitalize()} settings",
        show_default=False if field.default in (None, ()) else str(field.default),
    )


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The values of a setting that has few."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def _parameter(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def cache_dir() -> Path:
    """Where models are put together: LEGATO_CACHE_DIR, or `legato` in the user's cache directory."""
    base = os.environ.get("LEGATO_CACHE_DIR")
    try:
        if base:
            return Path(base).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "legato"
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory: set LEGATO_CACHE_DIR to a writable folder"
        ) from None


def unknown_variables() -> list[str]:
    """A line for each LEGATO_* variable that means nothing here: it is misspelled, or put there by others
    (Kubernetes does)."""
    known = {name: _variable(name) for _, name, _ in fields()} | {
        name: _variable(name) for name in ("config", "cache_dir")
    }
    lines = []
    for variable in sorted(os.environ):
        if variable.startswith("LEGATO_") and variable not in known.values():
            word = variable.removeprefix("LEGATO_").lower()
            meant = known.get(legato_name(word) or closest(word, known) or "")
            lines.append(f"{variable}: no such setting" + (f"; did you mean {meant}?" if meant else ""))
    return lines


def check_model(settings: Settings) -> None:
    """Raise `ModelError` or `ConfigError` if there is no such model or chat template, before libraries are
    loaded that take seconds."""
    locate(settings.model.model)
    if settings.model.chat_template is not None:
        from legato.text.chat import load_template  # a tenth of a second, and few give one

        load_template(settings.model.chat_template)


def schema() -> dict[str, Any]:
    """The JSON Schema of runtime.toml."""
    return Settings.model_json_schema()
