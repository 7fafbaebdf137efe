"""Write calls in the spelling of a model family, for templates that do not show calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.text.parsing.call_grammars import head_texts, texts_written
from weft.text.parsing.declaration import Arguments, CallObject, Keywords, OutputFormat, Parameters, Section
from weft.text.parsing.parameter_grammar import value_close, value_opening


class Piece(NamedTuple):
    """A part of written calls."""

    text: str
    markup: bool
    """True for a text of the format, False for a text of the client: a name, a key or a value."""


def written_calls(declared: OutputFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Piece]:
    """Yield the pieces of ``calls``, pairs of name and arguments, in the first spelling of ``declared``.

    A tag inside a value is not escaped, as in the templates of the families.
    """
    spelled = declared.calls[0]
    section = spelled.section or Section()
    before, after = head_texts(spelled)
    yield from _markup("".join(texts_written(section.head)))
    for number, (name, arguments) in enumerate(calls):
        yield from _markup((spelled.gap if number else "") + before.replace("\1", str(number)))
        yield Piece(name, markup=False)
        yield from _markup(after.replace("\1", str(number)))
        yield from _arguments(spelled.arguments, arguments)
        yield from _markup("".join(texts_written(spelled.tail)))
    yield from _markup("".join(texts_written(section.tail)))


def _markup(text: str) -> Iterator[Piece]:
    if text:
        yield Piece(text, markup=True)


def _arguments(spelled: Arguments, arguments: Mapping[str, Any]) -> Iterator[Piece]:
    """Yield the pieces of the arguments and of the text that ends the arguments."""
    if isinstance(spelled, Parameters):
        for key, value in arguments.items():
            text = isinstance(value, str)
            yield Piece(spelled.gap + spelled.key_open, markup=True)
            yield Piece(key, markup=False)
            yield Piece(value_opening(spelled, string=text), markup=True)
            yield Piece(value if text else _json(value), markup=False)
            yield Piece(value_close(spelled), markup=True)
        yield Piece(spelled.gap + spelled.end, markup=True)
    elif isinstance(spelled, Keywords):
        for number, (key, value) in enumerate(arguments.items()):
            yield from _markup(spelled.between if number else "")
            yield Piece(key, markup=False)
            yield Piece(spelled.assign, markup=True)
            yield from _value(spelled.quote, value)
        yield Piece(spelled.end, markup=True)
    else:
        yield Piece(_json(arguments), markup=False)
        yield from _markup("}" if isinstance(spelled, CallObject) else "")


def _value(quote: str, value: Any) -> Iterator[Piece]:
    """Yield the pieces of a value in Python's spelling, or with ``quote`` around strings."""
    # Every text of a client is a piece of its own: such a text may spell a special token.
    if isinstance(value, str) and quote:
        yield from (Piece(quote, markup=True), Piece(value, markup=False), Piece(quote, markup=True))
    elif isinstance(value, Mapping):
        yield Piece("{", markup=True)
        for number, (key, one) in enumerate(value.items()):
            yield Piece((", " if number else "") + _json(key) + ": ", markup=False)
            yield from _value(quote, one)
        yield Piece("}", markup=True)
    elif isinstance(value, list):
        yield Piece("[", markup=True)
        for number, one in enumerate(value):
            yield from _markup(", " if number else "")
            yield from _value(quote, one)
        yield Piece("]", markup=True)
    elif value is None or isinstance(value, bool):
        yield Piece(_json(value) if quote else str(value), markup=True)
    else:
        yield Piece(_json(value), markup=False)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
