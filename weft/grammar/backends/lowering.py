"""Reduce a grammar tree to the few forms that backends translate. Tags become tokens, triggers become
sequences.

Literal | Until | Pattern | Json | Rules | GrammarChoice | GrammarChain | Loop | Token
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise

import msgspec

from weft.common.errors import InvalidRequest
from weft.types import grammar as g


class Literal(msgspec.Struct, frozen=True):
    """Exactly this text, in text tokens."""

    text: str


class Token(msgspec.Struct, frozen=True):
    """Exactly this control token."""

    text: str


class Until(msgspec.Struct, frozen=True):
    """Any text without any of ``without``, then ``end``.

    With ``end`` "", the text may stop anywhere. Otherwise ``end`` is the first text of ``without`` to occur;
    ``without`` may include ``end``. Control tokens do not occur in the text.
    """

    without: tuple[str, ...]
    end: str


class Pattern(msgspec.Struct, frozen=True):
    """Text that matches the whole of a regular expression."""

    regex: str


class Json(msgspec.Struct, frozen=True):
    """A JSON value valid under a schema."""

    schema: str
    compact: bool


class Rules(msgspec.Struct, frozen=True):
    """A client's context-free grammar."""

    source: str


class GrammarChoice(msgspec.Struct, frozen=True):
    """One of several alternatives."""

    parts: tuple[Node, ...]


class GrammarChain(msgspec.Struct, frozen=True):
    """All parts in order. Without parts: the empty text."""

    parts: tuple[Node, ...]


class Loop(msgspec.Struct, frozen=True):
    """``part`` repeated ``least`` to ``most`` times (None: any number)."""

    part: Node
    least: int
    most: int | None


Node = Literal | Token | Until | Pattern | Json | Rules | GrammarChoice | GrammarChain | Loop

MAX_REPEATS = 4096
"""Maximum count of a repeated part."""


def lower(grammar: g.Grammar, controls: Collection[str]) -> Node:
    """Return the grammar as a tree of ``Node``. ``controls``: texts of the tokenizer's control tokens.

    Raises InvalidRequest for open free text before JSON or rules.
    """
    node = _Lowering(controls).node(grammar)
    _check_ends(node)
    return node


def is_regular(node: Node) -> bool:
    """Return True if ``node`` is one regular expression over text: no tokens, JSON or rules inside."""
    match node:
        case Literal() | Until() | Pattern():
            return True
        case GrammarChoice() | GrammarChain():
            return all(is_regular(part) for part in node.parts)
        case Loop():
            return is_regular(node.part)
        case _:
            return False


def _check_ends(node: Node) -> None:
    """Raise InvalidRequest if free text without an end stands before JSON or rules.

    The border between text and JSON would be ambiguous.
    """
    match node:
        case GrammarChain():
            # A control token also marks the border.
            for one, following in pairwise(node.parts):
                if _is_open(one) and not (is_regular(following) or _starts_with_token(following)):
                    raise InvalidRequest("free text in front of JSON or of a grammar must have an end")
            for part in node.parts:
                _check_ends(part)
        case GrammarChoice():
            for part in node.parts:
                _check_ends(part)
        case Loop():
            _check_ends(node.part)


def _is_open(node: Node) -> bool:
    """Return True if ``node`` may end with free text without an end."""
    match node:
        case Until():
            return not node.end
        case GrammarChain():
            return bool(node.parts) and _is_open(node.parts[-1])
        case GrammarChoice():
            return any(map(_is_open, node.parts))
        case Loop():
            return _is_open(node.part)
        case _:
            return False


def _starts_with_token(node: Node) -> bool:
    """Return True if every text of ``node`` starts with a control token."""
    match node:
        case Token():
            return True
        case GrammarChain():
            return bool(node.parts) and _starts_with_token(node.parts[0])
        case GrammarChoice():
            return all(map(_starts_with_token, node.parts))
        case Loop():
            return node.least > 0 and _starts_with_token(node.part)
        case _:
            return False


class _Lowering:
    def __init__(self, controls: Collection[str]) -> None:
        self._controls = frozenset(controls)
        longest_first = sorted(self._controls, key=lambda text: (-len(text), text))
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def node(self, part: g.Grammar) -> Node:
        """Return the lowered form of ``part``, at any depth."""
        match part:
            case g.Text():
                return self._text(part.text)
            case g.FreeText():
                return self._until(part.ends, (*part.ends, *part.without))
            case g.Regex():
                return Pattern(part.pattern)
            case g.JsonSchema():
                return Json(part.schema, part.compact)
            case g.ContextFree():
                return Rules(part.source)
            case g.OneOf():
                return _choice([self.node(inner) for inner in part.parts])
            case g.GrammarSequence():
                return _chain([self.node(inner) for inner in part.parts])
            case g.Repeated():
                return self._repeated(part)
            case g.Triggered():
                return self._triggered(part)

    def _text(self, text: str) -> Node:
        """Return ``text`` with the texts of control tokens replaced by the tokens."""
        if not self._controls:
            return Literal(text)
        pieces = [piece for piece in self._pattern.split(text) if piece]
        return _chain([Token(piece) if piece in self._controls else Literal(piece) for piece in pieces])

    def _until(self, ends: tuple[str, ...], without: tuple[str, ...]) -> Node:
        """Return free text up to one of ``ends``. Each end is an alternative: text without any end, then this
        end.

        An end spelled like a control token is that token. The same spelling in other tokens must not occur in
        the text.
        """
        if not ends:
            return Until(without, "")
        return _choice([self._until_one(end, without) for end in ends])

    def _until_one(self, end: str, without: tuple[str, ...]) -> Node:
        node = self._text(end)
        return Until(without, end) if isinstance(node, Literal) else _chain([Until(without, ""), node])

    def _repeated(self, part: g.Repeated) -> Node:
        """Return a loop of the part, with the separator between two repetitions."""
        inner = self.node(part.part)
        if not part.between:
            return _loop(inner, part.least, part.most)
        if part.most == 0:
            return GrammarChain(())
        between = self._text(part.between)
        # inner (between inner)*: the first repetition has no separator.
        most = None if part.most is None else part.most - 1
        least = max(part.least - 1, 0)
        whole = _chain([inner, _loop(_chain([between, inner]), least, most)])
        return whole if part.least > 0 else _loop(whole, 0, 1)

    def _triggered(self, part: g.Triggered) -> Node:
        """Return a loop of free text up to the trigger and one of the parts, then free text without the
        trigger."""
        once = _chain(
            [
                self._until((part.trigger,), (part.trigger,)),
                _choice([self.node(inner) for inner in part.parts]),
            ]
        )
        return _chain([_loop(once, part.least, part.most), Until((part.trigger,), "")])


def _choice(parts: list[Node]) -> Node:
    unique = list(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else GrammarChoice(tuple(unique))


def _chain(parts: list[Node]) -> Node:
    """Return a flat chain: nested chains are merged, adjacent literals joined, and empty literals dropped.

    A single part is returned without a chain.
    """
    flat: list[Node] = []
    for part in parts:
        for inner in part.parts if isinstance(part, GrammarChain) else (part,):
            if isinstance(inner, Literal) and not inner.text:
                continue
            # Join neighbours, so that a token may span both texts.
            if isinstance(inner, Literal) and flat and isinstance(flat[-1], Literal):
                inner = Literal(flat.pop().text + inner.text)  # type: ignore[union-attr]
            flat.append(inner)
    return flat[0] if len(flat) == 1 else GrammarChain(tuple(flat))


def _loop(part: Node, least: int, most: int | None) -> Node:
    if most == 0:
        return GrammarChain(())
    return part if (least, most) == (1, 1) else Loop(part, least, most)
