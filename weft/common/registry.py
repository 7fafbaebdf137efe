"""One registry form for every plug point: a name maps to a lazy factory of an implementation."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Generic, TypeVar

from weft.common.errors import ConfigError
from weft.common.spelling import misspelt

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to implementations, imported when first asked for.

    An entry is ``"module:attribute"``; so listing what exists imports none of it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, str] = {}

    def add(self, name: str, target: str) -> None:
        """Registers ``target`` (``"package.module:attribute"``). A second target of one name is an error."""
        if name in self._entries and self._entries[name] != target:
            raise ValueError(f"{self._what} {name!r} is registered already")
        self._entries[name] = target

    def get(self, name: str) -> T:
        """The implementation called ``name``. Raises ConfigError that lists what exists, and which of them
        ``name`` may misspell."""
        if name not in self._entries:
            near = misspelt(name, self._entries)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"no {self._what} called {name!r}.{hint} There are: {', '.join(self)}.")
        module, attribute = self._entries[name].split(":")
        result: T = getattr(importlib.import_module(module), attribute)
        return result

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
