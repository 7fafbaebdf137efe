"""Typed access to the fields of ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weft.common.errors import ConfigError

_CHANGES = re.compile(r"rotat|hadamard|smooth_?quant|^pre_quant|^adapter|^transforms?(_config)?$")
"""Names of settings that change inputs or outputs of layers."""


class QuantizationFields:
    """Typed access to one object of the configuration. Errors name the field by its path."""

    def __init__(self, found: Mapping[str, Any], where: str) -> None:
        self._found = found
        self._where = where

    def fail(self, name: str, problem: str) -> ConfigError:
        """Return the error for field ``name``; the caller raises the error."""
        return ConfigError(f"{self._where}.{name} {problem}", param="--model")

    def get(self, name: str) -> Any:
        """Return the raw value, or None if missing."""
        return self._found.get(name)

    def choice(self, name: str, allowed: tuple[Any, ...], *, default: Any = None) -> Any:
        """Return one of ``allowed``; ``default`` for a missing or null field. Raise ConfigError."""
        value = self.get(name)
        if value is None:
            return default
        if not any(value == known and type(value) is type(known) for known in allowed):
            shown = ", ".join(map(str, allowed))
            raise self.fail(name, f"= {value!r} is not supported; there are: {shown}")
        return value

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raise ConfigError unless the field is missing, null or one of ``harmless``."""
        value = self.get(name)
        if value is not None and not any(value == h and type(value) is type(h) for h in harmless):
            raise self.fail(name, f"= {value!r} is not supported by this version")

    def names(self, *fields: str) -> None:
        """Raise ConfigError unless each field is missing, null or a list of names."""
        for name in fields:
            value = self.get(name)
            if value is not None and not (
                isinstance(value, list) and all(isinstance(item, str) for item in value)
            ):
                raise self.fail(name, f"must be a list of names, not {value!r}")

    def pair(self, name: str) -> tuple[int, int] | None:
        """Return two positive integers, or None for a missing or null field. Raise ConfigError.

        Older files write the pair as a text: 128x128.
        """
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
            value = [int(number) for number in value.split("x")]
        if not (
            isinstance(value, list)
            and len(value) == 2
            and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)
        ):
            raise self.fail(name, f"must be two positive integers, not {value!r}")
        return value[0], value[1]

    def refuse_changes(self) -> None:
        """Raise ConfigError for a setting that changes inputs or outputs of layers, unless switched off.

        Examples are rotations, transforms and low-rank corrections beside the quantized weights.
        """
        for name in self._found:
            if _CHANGES.search(name):
                self.refuse(name, False, "", {}, [])

    def group_size(self, name: str) -> int | None:
        """Return a positive integer, -1 for a single group, or None for a missing or null field.

        Raise ConfigError.
        """
        value = self.get(name)
        if value is None or value == -1:
            return None if value is None else -1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(name, f"must be a positive integer or -1, not {value!r}")
        return value

    def inner(self, name: str) -> QuantizationFields | None:
        """Return the object ``name``, or None for a missing or null field. Raise ConfigError."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, not {value!r}")
        return QuantizationFields(value, f"{self._where}.{name}")

    def each(self, name: str) -> list[QuantizationFields]:
        """Return the objects in the object ``name``."""
        return [fields for _, fields in self.named(name)]

    def named(self, name: str) -> list[tuple[str, QuantizationFields]]:
        """Return (key, object) for each object in the object ``name``."""
        found = self.inner(name)
        if found is None:
            return []
        made = [(key, found.inner(key)) for key in found._found]
        return [(key, fields) for key, fields in made if fields is not None]
