"""Strings that a template compares as they are, and writes with marks around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Word(str):
    """A string that begins, ends or is a piece of a special token.

    A template may ask ``type == "object"`` although the tokenizer has ``<|object_ref_start|>``: comparisons,
    hashes and tests see the plain text. Whatever makes text of the word gets ``str(word)``, which has marks
    on both sides, and so cannot become a special token together with its neighbours. What string methods
    return is a word again. The text must not spell a whole special token: see ``Marks.around``.
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
    plain_method = getattr(str, name)

    def method(self: Word, *args: Any, **kwargs: Any) -> Any:
        return _again(plain_method(str.__str__(self), *args, **kwargs), self._mark)

    method.__name__ = name
    return method


def _again(value: Any, mark: str) -> Any:
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
    """``value`` with each word in it as it is written: for operations that make text of what they get."""
    if type(value) is Word:
        return str(value)
    if isinstance(value, list | tuple):
        return [written(item) for item in value]
    if isinstance(value, dict):
        return {written(key): written(item) for key, item in value.items()}
    return value


def sent(value: Any, tag: str) -> Any:
    """``value`` with each word as a plain string behind ``tag``, for JSON; see `received`.

    ``tag``: a secret that no other string of ``value`` begins with.
    """
    if type(value) is Word:
        return f"{tag}{value._mark} {str.__str__(value)}"
    if isinstance(value, list | tuple):
        return [sent(item, tag) for item in value]
    if isinstance(value, dict):
        return {sent(key, tag): sent(item, tag) for key, item in value.items()}
    return value


def received(value: Any, tag: str) -> Any:
    """The value of which `sent` made ``value``, its words included."""
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
