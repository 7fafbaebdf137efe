"""Strings compared as plain text by a template, but written with marks around."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Word(str):
    """A string that is the start, the end or the middle of a special token.

    A template may compare ``type == "object"`` although the tokenizer has ``<|object_ref_start|>``.
    Comparisons, hashes and tests therefore see the plain text. Any conversion to text uses ``str(word)``,
    which has marks on both sides and cannot form a special token with its neighbours. String methods return
    words again. The text must not spell a whole special token: see ``Marks.around``.
    """

    __slots__ = ("_mark",)
    _mark: str

    def __new__(cls, plain: str, mark: str) -> Word:
        made = super().__new__(cls, plain)
        made._mark = mark
        return made

    def __str__(self) -> str:
        return f"{self._mark}{str.__str__(self)}{self._mark}"

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"

    def __iter__(self) -> Iterator[str]:
        return (Word(char, self._mark) for char in str.__str__(self))


def _deriving(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of ``str`` for words: each string of the result becomes a word with the same
    mark.
    """
    plain_method = getattr(str, name)

    def method(self: Word, *args: Any, **kwargs: Any) -> Any:
        return _again(plain_method(str.__str__(self), *args, **kwargs), self._mark)

    method.__name__ = name
    return method


def _again(value: Any, mark: str) -> Any:
    """Return ``value``, the result of a string method, with each string as a word."""
    if isinstance(value, str):
        return Word(value, mark) if value else value
    if isinstance(value, list | tuple):
        return type(value)(_again(item, mark) for item in value)
    return value


for _name in (
    *(
        "__getitem__",
        "__mul__",
        "__rmul__",
        "capitalize",
        "casefold",
        "center",
        "expandtabs",
        "ljust",
        "lower",
    ),
    *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rjust", "rpartition", "rsplit"),
    *("rstrip", "split", "splitlines", "strip", "swapcase", "title", "translate", "upper", "zfill"),
):
    setattr(Word, _name, _deriving(_name))


def written(value: Any) -> Any:
    """Return ``value`` with each word as its marked text, at any depth, for operations that make text."""
    if type(value) is Word:
        return str(value)
    if isinstance(value, list | tuple):
        return [written(item) for item in value]
    if isinstance(value, dict):
        return {written(key): written(item) for key, item in value.items()}
    return value


def sent(value: Any, tag: str) -> Any:
    """Return ``value`` with each word as a plain string behind ``tag``, for JSON; see ``received``.

    ``tag`` must be a secret: no other string of ``value`` may start with ``tag``.
    """
    if type(value) is Word:
        return f"{tag}{value._mark} {str.__str__(value)}"
    if isinstance(value, list | tuple):
        return [sent(item, tag) for item in value]
    if isinstance(value, dict):
        return {sent(key, tag): sent(item, tag) for key, item in value.items()}
    return value


def received(value: Any, tag: str) -> Any:
    """Return the original of a value made by ``sent``, including words."""
    if isinstance(value, str):
        if not value.startswith(tag):
            return value
        mark, _, plain = value[len(tag) :].partition(" ")
        return Word(plain, mark)
    if isinstance(value, list):
        return [received(item, tag) for item in value]
    if isinstance(value, dict):
        return {received(key, tag): received(item, tag) for key, item in value.items()}
    return value
