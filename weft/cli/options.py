"""Click options made from the settings, and the conversion of a command line to a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from weft.common.errors import ConfigError
from weft.config import foreign
from weft.config.file import read_values
from weft.config.flags import SETTINGS, Setting, from_values
from weft.config.sections.all import Config, title

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
# In older supported versions of click, ParamType is generic only for type checkers.
else:
    _ParamType = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])
Decorator: TypeAlias = Callable[[F], F]

ENGINE = ("model", "cache", "scheduler", "speculation", "grammar", "runner", "parallel")
"""Sections of a command without a server."""
ALL = (*ENGINE, "transfer", "media", "events", "lora", "tier", "front")


class SettingType(_ParamType):
    """Click type that converts and checks values by the rules of a setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.name = setting.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value (a tuple for a setting with many values).

        Raise UsageError with the valid range.
        """
        try:
            return self.setting.parse(value)
        except ConfigError as error:
            raise click.UsageError(error.message, ctx) from error

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return (
            self.setting.type_name.upper() if self.setting.kind != "choice" else f"[{self.setting.type_name}]"
        )


class SettingOption(click.Option):
    """Flag of a setting.

    ``heading``: title of the flag's list in the help; "" for the command's own options.
    """

    heading = ""


class Command(click.Command):
    """Command with help in two parts: the command's own options, then the settings by section.

    Flags may have the spellings of ``weft.config.foreign``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse Weft's and foreign spellings, set the parameters on ``ctx``, and return the rest of the
        arguments.

        Raise UsageError for an unknown flag, with Weft's replacement.
        """
        try:
            return super().parse_args(ctx, foreign.arguments(args))
        except click.NoSuchOption as error:
            known = [name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)]
            hint = foreign.unknown(error.option_name, known)
            raise click.UsageError(f"there is no flag {error.option_name}.{hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list per heading, in the order of the first use of each heading."""
        lists: dict[str, list[tuple[str, str]]] = {"": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                lists.setdefault(getattr(param, "heading", ""), []).append(record)
        for heading, records in lists.items():
            with formatter.section(heading or "Options"):
                formatter.write_dl(records)


def _option(setting: Setting) -> SettingOption:
    """Return the click option for a setting."""
    default = f"default: {setting.default_text}" if setting.default_text != "-" else ""
    many = "separated by commas, or repeated" if setting.many else ""
    notes = "; ".join(note for note in (setting.range_text, many, default) if note)
    text = setting.description + (f"  [{notes}]" if notes else "")
    # Click names a parameter after the first name without dashes, or else after the first flag.
    short = [setting.name, f"--{setting.alias}"] if setting.alias else []
    if setting.kind == "bool":
        return SettingOption([*short, f"{setting.flag}/--no-{setting.key}"], default=None, help=text)
    return SettingOption(
        [*short, setting.flag], type=SettingType(setting), multiple=setting.many, default=None, help=text
    )


def joined(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Return a decorator that adds options to a command, in the given order of the help."""

    def add(function: F) -> F:
        # Decorators apply from the last to the first.
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return add


def settings(sections: Iterable[str], also: Iterable[str] = (), *, file: bool = True) -> Callable[[F], F]:
    """Return a decorator that adds flags to a command: all of ``sections``, the fields ``also``, and
    ``--config``.

    ``--config`` is left out if ``file`` is False. The command should be a ``Command``, so that the help
    groups the flags by section.
    """
    chosen = set(sections)
    single = set(also)

    def add(function: F) -> F:
        options: list[click.Option] = []
        for setting in SETTINGS.values():
            if setting.section in chosen or setting.name in single:
                flag = _option(setting)
                flag.heading = title(setting.section) if setting.section in chosen else ""
                options.append(flag)
        if file:
            about = "YAML file of flags, e.g. max-num-seqs: 16. Flags on the command line override the file."
            options.append(click.Option(["--config"], type=click.Path(), help=about))
        # Click reverses the order of appended options.
        for option in reversed(options):
            function.__dict__.setdefault("__click_params__", []).append(option)
        return function

    return add


def build(given: dict[str, Any], model: str | None = None) -> Config:
    """Return the configuration of a command line: defaults, overridden by the --config file, overridden by
    flags.

    ``given``: click's values of settings, unset values as None or (), and ``config``. ``model``: the
    positional MODEL. Raise ConfigError.
    """
    values = read_values(Path(given["config"])) if given.get("config") else {}
    values.update(given_values(given))
    if model is not None:
        if given.get("model") not in (None, model):
            raise ConfigError(
                f"MODEL {model!r} and --model {given['model']!r} differ: give only one of them",
                param="--model",
            )
        values["model"] = model
    return from_values(values)


def given_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return field name to value, for all settings that are set."""
    return {
        name: tuple(one for many in value for one in many) if SETTINGS[name].many else value
        for name, value in given.items()
        if name in SETTINGS and value is not None and value != ()
    }


def keywords(config: Config) -> dict[str, Any]:
    """Return the configuration as keywords of ``LLM``: the model and all settings that differ from the
    default.
    """
    result = {"model": config.model.model}
    for name, setting in SETTINGS.items():
        value = getattr(getattr(config, setting.section), name)
        if value != setting.default:
            result[name] = value
    return result
