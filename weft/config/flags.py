"""Flags, keywords and file keys, all derived from the fields of ``sections``.

``SETTINGS`` lists all settings. A value is text (command line), a Python object (keyword of ``LLM``) or a
YAML value. ``Setting.parse`` converts each to the field's type, or raises ConfigError with the setting's name
and the accepted values. ``python -m weft.config.flags`` prints the frozen list, ``docs/flags.txt``.
"""

from __future__ import annotations

import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import inspect

from weft.common import env
from weft.common.errors import ConfigError
from weft.common.spelling import misspelt
from weft.config import foreign
from weft.config.sections.all import Config

Kind = Literal["bool", "int", "float", "text", "size", "choice"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)
_SIZE_HELP = "a size such as 512M, 4G, 1.5GiB or a number of bytes"
#: Settings with secret values: messages never repeat the value.
_SECRET = frozenset({"api_key", "admin_key", "ssl_keyfile_password"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of one section, as a flag, a keyword and a file key."""

    section: str
    name: str
    kind: Kind
    description: str
    default: Any
    many: bool = False
    optional: bool = False
    choices: tuple[str | int, ...] = ()
    """Allowed words. For kind ``int``: words allowed besides numbers."""
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    """True if ``low`` itself is out of range."""
    alias: str = ""
    """Short second name for the flag, the keyword and the file key."""
    reader: Callable[[Any], Any] | None = None
    """Function that maps other spellings of a value to the value, and returns all other values unchanged."""

    @property
    def key(self) -> str:
        """Name with dashes, as in the YAML file."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def takes(self) -> str:
        """Accepted values, in words: ``an integer of at least 1``."""
        words = {
            "bool": "true or false",
            "int": "an integer",
            "float": "a number",
            "text": "text",
            "size": _SIZE_HELP,
            "choice": f"one of {', '.join(map(str, self.choices))}",
        }[self.kind]
        words += self._range_words()
        if self.kind == "int" and self.choices:
            words += f", or {' or '.join(map(str, self.choices))}"
        return words

    def _range_words(self) -> str:
        """Return the range in words, with a space in front; "" without a range."""
        parts = []
        if self.low is not None:
            parts.append(f"{'greater than' if self.open_low else 'of at least'} {_plain(self.low)}")
        if self.high is not None:
            parts.append(f"at most {_plain(self.high)}")
        return f" {' and '.join(parts)}" if parts else ""

    @property
    def range_text(self) -> str:
        """Range in short form: ``1..65536``, ``>0..1``, ``>=0``; "" without a range."""
        if self.low is None:
            return ""
        if self.high is None:
            return f"{'>' if self.open_low else '>='}{_plain(self.low)}"
        return f"{'>' if self.open_low else ''}{_plain(self.low)}..{_plain(self.high)}"

    @property
    def type_name(self) -> str:
        """Type for lists and help: ``int``, ``auto|cpu|cuda``, ``text...``."""
        words = [] if self.kind == "choice" else [str(self.kind)]
        return "|".join([*words, *map(str, self.choices)]) + ("..." if self.many else "")

    @property
    def default_text(self) -> str:
        """Default for lists and help; ``-`` if there is none."""
        if self.default is None or self.default == ():
            return "-"
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        return str(self.default)

    def parse(self, value: Any, label: str | None = None) -> Any:
        """Return ``value`` as the field's type. Text for a setting with many values is split at commas and
        spaces.

        Raise ConfigError that calls the setting ``label`` (default: the flag). Blank text is an error even
        for many values: ``--api-key "$KEY"`` with an unset variable must not open the server.
        """
        label = label or self.flag
        if isinstance(value, os.PathLike):  # of Python callers
            value = os.fspath(value)
        value = value if self.reader is None else self.reader(value)
        if value is None and (self.optional or self.many):
            return self.default
        if not self.many:
            return self._one(value, label)
        # Blank text becomes one empty word, which every kind refuses.
        if isinstance(value, str):
            value = [part for part in re.split(r"[,\s]+", value) if part] or [""]
        if not isinstance(value, list | tuple):
            raise self._refused(value, label)
        texts = (os.fspath(item) if isinstance(item, os.PathLike) else item for item in value)
        return tuple(self._one(item, label) for item in texts)

    def _refused(self, value: Any, label: str) -> ConfigError:
        """Return the error for a bad value, without the value if the setting is a secret."""
        shown = "" if self.name in _SECRET else f", not {str(value)[:80]!r}"
        if value is None or not str(value).strip():
            shown = ", and the given value is empty"
        return ConfigError(f"{label} must be {self.takes}{shown}", param=self.flag)

    def _one(self, value: Any, label: str) -> Any:
        """Return one value as the field's type. Raise ConfigError."""
        result: Any
        # Each branch yields None for a value that the kind does not accept.
        if self.kind == "bool":
            result = _as_bool(value)
        elif self.kind == "choice":
            result = next(
                (c for c in self.choices if str(value) == str(c) and not isinstance(value, bool)), None
            )
        elif self.kind == "int":
            result = value if isinstance(value, str) and value in self.choices else self._number(value, int)
        elif self.kind == "float":
            result = self._number(value, float)
        elif self.kind == "size":
            result = str(value) if parse_size(value) is not None else None
        else:
            result = value if isinstance(value, str) and value.strip() else None
        if result is None:
            raise self._refused(value, label)
        return result

    def _number(self, value: Any, of: Callable[[Any], float]) -> float | None:
        """Return ``value`` as a number within the range, or None."""
        # Numbers of numpy count. bool is a subclass of int, but true and false are not numbers here.
        allowed: tuple[type, ...] = (str, numbers.Integral) if of is int else (str, numbers.Real)
        if isinstance(value, bool) or not isinstance(value, allowed):
            return None
        try:
            number = of(value)
        except (ValueError, OverflowError):
            return None
        if not math.isfinite(number):
            return None
        if self.low is not None and (number < self.low or (self.open_low and number == self.low)):
            return None
        if self.high is not None and number > self.high:
            return None
        return number


def _plain(number: float) -> str:
    """Return ``number`` as text, without an exponent or a fraction of zero."""
    return str(int(number) if number == int(number) else number)


def _as_bool(value: Any) -> bool | None:
    """Return the bool that ``value`` stands for, or None."""
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return words.get(value.strip().lower()) if isinstance(value, str) else None


def parse_size(value: object) -> int | None:
    """Return the bytes of ``512M``, ``4G``, ``1.5GiB`` or a plain number, or None.

    Units are powers of 1024.
    """
    if isinstance(value, bool) or not isinstance(value, str | numbers.Integral):
        return None
    found = _SIZE.fullmatch(str(value))
    if found is None:
        return None
    number = float(found[1]) * _UNITS[found[2].upper()]
    return int(number) if 1 <= number < math.inf else None


def _described(kind: inspect.Type) -> tuple[inspect.Type, str, dict[str, Any]]:
    """Return (type without its metadata, description, extra) of an annotated type."""
    if not isinstance(kind, inspect.Metadata):
        return kind, "", {}
    schema = kind.extra_json_schema or {}
    return kind.type, str(schema.get("description", "")), dict(kind.extra or {})


def _setting(section: str, found: inspect.Field) -> Setting:
    """Return the Setting for a declared field. Raise TypeError for a type without a flag form."""
    kind, description, extra = _described(found.type)
    members = list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]
    facts: dict[str, Any] = {"section": section, "name": found.name, "default": found.default}
    facts["alias"] = extra.get("alias", "")
    facts["reader"] = extra.get("reader")
    facts["optional"] = any(isinstance(m, inspect.NoneType) for m in members)
    members = [_described(m)[0] for m in members if not isinstance(m, inspect.NoneType)]
    # A tuple takes many values: the facts below are those of one element.
    if len(members) == 1 and isinstance(members[0], inspect.VarTupleType):
        facts["many"] = True
        members = [_described(members[0].item_type)[0]]
    words: list[str | int] = []
    for member in members:
        if isinstance(member, inspect.LiteralType):
            words += [value for value in member.values if value is not None]
            facts.setdefault("kind", "choice")
        elif isinstance(member, inspect.BoolType):
            facts["kind"] = "bool"
        elif isinstance(member, inspect.IntType | inspect.FloatType):
            facts["kind"] = "int" if isinstance(member, inspect.IntType) else "float"
            facts["low"] = member.ge if member.ge is not None else member.gt
            facts["open_low"] = member.gt is not None
            facts["high"] = member.le
        elif isinstance(member, inspect.StrType):
            facts["kind"] = "size" if extra.get("size") else "text"
        else:
            raise TypeError(f"no flag can be made of {found.name}: {member}")
    return Setting(**facts, choices=tuple(sorted(words, key=_word_order)), description=description)


def _word_order(word: str | int) -> tuple[bool, str]:
    """Return a sort key that puts "auto" first."""
    return (word != "auto", str(word))


def _all_settings() -> dict[str, Setting]:
    """Return the settings of all sections by field name. Raise TypeError for a duplicate name."""
    result: dict[str, Setting] = {}
    root = inspect.type_info(Config)
    assert isinstance(root, inspect.StructType)
    for section in root.fields:
        assert isinstance(section.type, inspect.StructType)
        for declared in section.type.fields:
            if declared.name in result:
                raise TypeError(f"{declared.name} is declared in two sections")
            result[declared.name] = _setting(section.name, declared)
    return result


SETTINGS: dict[str, Setting] = _all_settings()
"""Settings by field name, in the order of the sections."""

ALIASES: dict[str, str] = {s.alias: name for name, s in SETTINGS.items() if s.alias}
"""Field names by short name."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the name in ``known`` closest to a misspelled ``name``, or ""."""
    near = misspelt(name, known)
    return f" Did you mean {near}?" if near else ""


def from_values(values: Mapping[str, Any]) -> Config:
    """Return the configuration with ``values`` (field name to parsed value) and defaults for all other
    fields.

    ``WEFT_LOG_LEVEL`` is the default of ``log_level``. Raise ConfigError for a bad value of the variable.
    """
    values = dict(values)
    level = env.get("WEFT_LOG_LEVEL")
    if "log_level" not in values and level:
        values["log_level"] = SETTINGS["log_level"].parse(level.lower(), "WEFT_LOG_LEVEL")
    sections: dict[str, Any] = {}
    for name in Config.__struct_fields__:
        given = {key: value for key, value in values.items() if SETTINGS[key].section == name}
        sections[name] = msgspec.structs.replace(getattr(Config(), name), **given)
    return Config(**sections)


def from_keywords(keywords: Mapping[str, Any]) -> Config:
    """Return the configuration of ``LLM(**keywords)``.

    Raise ConfigError for unknown keywords and bad values.
    """
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for given, value in foreign.fields(keywords).items():
        name = ALIASES.get(given, given)
        if name not in SETTINGS:
            raise ConfigError(f"unknown setting {given!r}.{foreign.unknown(given, SETTINGS)}", param=given)
        parsed = SETTINGS[name].parse(value, given)
        check_same(spelled.get(name, given), values.get(name, parsed), given, parsed)
        values[name], spelled[name] = parsed, given
    return from_values(values)


def check_same(first: str, one: Any, second: str, other: Any) -> None:
    """Raise ConfigError if two names of one setting have different values."""
    if one != other:
        raise ConfigError(
            f"{first} {one} and {second} {other} are the same setting: give one of them", param=second
        )


def listing() -> str:
    """Return the frozen list, one setting per line: flag, type, range, default and section."""
    rows = [("flag", "type", "range", "default", "section")]
    for setting in SETTINGS.values():
        flag = f"{setting.flag} / --no-{setting.key}" if setting.kind == "bool" else setting.flag
        if setting.alias:
            flag += f", --{setting.alias}"
        rows.append(
            (flag, setting.type_name, setting.range_text or "-", setting.default_text, setting.section)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        # The last column (section) is not padded.
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(listing())
