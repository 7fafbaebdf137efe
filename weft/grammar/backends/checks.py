"""Size checks of a grammar tree before a backend receives the tree."""

from __future__ import annotations

from collections.abc import Iterator

from weft.common.errors import InvalidRequest
from weft.grammar.backends.lowering import MAX_REPEATS
from weft.types.grammar import (
    MAX_DEPTH,
    MAX_PARTS,
    MAX_SOURCE,
    ContextFree,
    FreeText,
    Grammar,
    GrammarSequence,
    JsonSchema,
    OneOf,
    Regex,
    Repeated,
    Text,
    Triggered,
)


def check_tree(grammar: Grammar) -> None:
    """Raise InvalidRequest with the reason for a tree that is too deep or too large, or has an empty part."""
    parts = 0
    chars = 0
    # An explicit stack, because the tree comes from a client and may be deep.
    stack: list[tuple[Grammar, int]] = [(grammar, 1)]
    while stack:
        part, depth = stack.pop()
        parts += 1
        chars += _source_chars(part)
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"the grammar is nested more than {MAX_DEPTH} levels deep")
        if parts > MAX_PARTS:
            raise InvalidRequest(f"the grammar has more than {MAX_PARTS} parts")
        if chars > MAX_SOURCE:
            raise InvalidRequest(
                f"schemas, patterns and texts of the grammar have more than {MAX_SOURCE} characters"
            )
        _check_part(part)
        stack.extend((inner, depth + 1) for inner in _inner(part))


def _inner(part: Grammar) -> Iterator[Grammar]:
    """Yield the direct parts of ``part``; nothing for a leaf."""
    match part:
        case OneOf() | GrammarSequence() | Triggered():
            yield from part.parts
        case Repeated():
            yield part.part


def _source_chars(part: Grammar) -> int:
    """Return the number of characters of a client's text in ``part``."""
    match part:
        case Text():
            return len(part.text)
        case FreeText():
            return sum(map(len, (*part.ends, *part.without)))
        case JsonSchema():
            return len(part.schema)
        case Regex():
            return len(part.pattern)
        case ContextFree():
            return len(part.source)
        case Repeated():
            return len(part.between)
        case Triggered():
            return len(part.trigger)
    return 0


def _check_part(part: Grammar) -> None:
    """Raise InvalidRequest for an empty text, pattern or list, and for invalid counts."""
    match part:
        case OneOf() if not part.parts:
            raise InvalidRequest("a choice of grammars must have at least one option")
        case FreeText() if not all((*part.ends, *part.without)):
            raise InvalidRequest("an end of free text must have at least one character")
        case Regex() if not part.pattern:
            raise InvalidRequest("the pattern is empty")
        case ContextFree() if not part.source.strip():
            raise InvalidRequest("the context-free grammar is empty")
        case Triggered():
            if not part.trigger or not part.parts:
                raise InvalidRequest("a trigger must be non-empty and must have at least one part")
            _check_counts(part.least, part.most)
        case Repeated():
            _check_counts(part.least, part.most)


def _check_counts(least: int, most: int | None) -> None:
    if least < 0 or (most is not None and most < least):
        raise InvalidRequest("a repeated part needs 0 <= minimum <= maximum")
    if max(least, most or 0) > MAX_REPEATS:
        raise InvalidRequest(f"a part is repeated more than {MAX_REPEATS} times")
