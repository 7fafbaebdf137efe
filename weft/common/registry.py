"""A registry for extension points: maps a name to an implementation, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Generic, TypeVar

from weft.common.errors import ConfigError
from weft.common.spelling import misspelt

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to implementations of type ``T``.

    An entry is ``"module:attribute"``, so listing the names imports nothing.
    """

    def __init__(self, kind: str) -> None:
        """``kind``: name of the entries in errors, e.g. "grammar backend"."""
        self._kind = kind
        self._entries: dict[str, str] = {}

    def add(self, name: str, target: str) -> None:
        """Register ``target`` (``"package.module:attribute"``). Raises ValueError for a second target of one
        name.
        """
        if name in self._entries and self._entries[name] != target:
            raise ValueError(f"{self._kind} {name!r} is registered already")
        self._entries[name] = target

    def get(self, name: str) -> T:
        """Import and return the implementation called ``name``. Raises ConfigError with a list of all names,
        and a suggestion for a misspelt name.
        """
        if name not in self._entries:
            near = misspelt(name, self._entries)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"no {self._kind} called {name!r}.{hint} There are: {', '.join(self)}.")
        module, attribute = self._entries[name].split(":")
        result: T = getattr(importlib.import_module(module), attribute)
        return result

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
