"""The words of a command line: vLLM's flags among them, and what a misspelled one was meant to be."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import typer
from typer.core import TyperCommand

from legato.config import fields
from legato.config.suggest import did_you_mean
from legato.config.vllm import RENAMED, SHORT_FLAGS, find_other, translate
from legato.errors import ConfigError


class UsageFault(typer.TyperException):
    """A command line that makes no sense."""

    exit_code = 2


class SettingsCommand(TyperCommand):
    """A command with settings, which vLLM's flags set as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            flags = {
                flag: not getattr(param, "is_flag", False)
                for param in self.get_params(ctx)
                if param.param_type_name == "option"
                for flag in (*param.opts, *param.secondary_opts)
            }
            args = list(read_flags(args, flags))
        return super().parse_args(ctx, args)


def read_flags(words: Sequence[str], flags: dict[str, bool]) -> Iterator[str]:
    """The words of a command line, with ours in place of vLLM's flags; `_` in a flag is read as `-`.

    `flags` says of each flag of the command whether it takes a value. Raises `UsageFault` for other flags.
    """
    rest = iter(words)
    for word in rest:
        if word == "--":
            yield word
            yield from rest
            return
        short, equals, value = word.partition("=")
        word = SHORT_FLAGS.get(short, short) + equals + value
        if not word.startswith("--"):
            yield word
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in flags:
            yield from _vllm_flag(flag, value if equals else None, rest, flags)
            continue
        yield flag + equals + value
        if flags[flag] and not equals:
            yield from islice(rest, 1)


def _vllm_flag(flag: str, value: str | None, rest: Iterator[str], flags: dict[str, bool]) -> list[str]:
    """Our words for a flag that the command does not have."""
    name = flag[2:].replace("-", "_")
    is_negated = name.startswith("no_") and find_other(name) is None
    name = name.removeprefix("no_") if is_negated else name
    other = find_other(name)
    if name in RENAMED or name in {known for _, known, _ in fields()}:
        raise UsageFault(f"{flag}: this command has no use for it")
    if other is None:
        raise UsageFault(f"{flag}: no such flag{did_you_mean(flag, flags)}")
    if other.is_switch:
        value = "false" if is_negated else value or "true"
    elif value is None and (other.same or other.setting):
        value = next(rest, None)
        if value is None:
            raise UsageFault(f"{flag} needs a value")
    try:
        ours = translate(name, value, shown=flag)
    except ConfigError as error:
        raise UsageFault(error.message) from None
    if ours is None:
        return []
    setting, number = ours
    own = f"--{setting.replace('_', '-')}"
    if own not in flags:
        raise UsageFault(f"{flag}: this command has no use for it")
    if isinstance(number, bool):
        return [own if number else f"--no-{own[2:]}"]
    return [own, str(number)]
