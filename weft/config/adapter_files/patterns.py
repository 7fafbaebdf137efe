"""Patterns of module names in the settings of LoRA adapters, matched with bounded work.

An adapter comes from a stranger, and a backtracking matcher needs exponential time for some patterns. Here a
pattern becomes a list of instructions, and all positions of the list advance together over the name. So the
work is at most instructions times characters. Understood: characters, ``.``, classes, ``\\d \\w \\s``,
groups, ``|``, ``* + ?``, ``{m,n}``, ``^`` and ``$``.

Source of the method: Thompson 1968, Regular expression search algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

MOST_LENGTH = 512
"""Maximum characters of a pattern."""
MOST_INSTRUCTIONS = 2048
MOST_STEPS = 4_000_000
"""Maximum steps of all matches of one adapter: about two seconds."""
_SPECIAL = frozenset("\\[](){}*+?|^$")
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}


class PatternError(ValueError):
    """The pattern is not understood, or too expensive. The message says why."""


class _Step(NamedTuple):
    """One instruction. ``accepts``: consumes a character; ``to``: alternatives without a character."""

    accepts: Callable[[str], bool] | None = None
    to: tuple[int, ...] = ()
    """Relative targets of a jump."""
    at: str = ""
    """``^`` or ``$``: passes at the begin or the end of the name only."""


class Patterns:
    """Patterns with values, as ``rank_pattern`` has them. The first fitting pattern counts.

    A pattern fits the whole name of a module, or the part behind any dot.
    """

    def __init__(self, values: Iterable[tuple[str, object]]) -> None:
        """Raise PatternError for a pattern that is not understood."""
        self._each = [(key, _parsed(key) if _SPECIAL & set(key) else None, value) for key, value in values]
        self._steps = 0

    def find(self, name: str, default: object) -> object:
        """Return the value for the module ``name``. Raise PatternError after too many steps."""
        for key, program, value in self._each:
            self._count(1)
            if _ends(name, key) if program is None else self._fits(name, program):
                return value
        return default

    def _count(self, steps: int) -> None:
        """Count steps. Raise PatternError after too many."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise PatternError("its patterns need too many steps")

    def _fits(self, name: str, program: list[_Step]) -> bool:
        """Return True if the program reaches its end at the end of ``name``."""
        current = set[int]()
        for at in range(len(name) + 1):
            if at == 0 or name[at - 1] == ".":
                self._reach(program, [0], current, at, len(name))
            self._count(len(current) + 1)
            if at == len(name):
                break
            found = set[int]()
            moved = []
            for place in current:
                accepts = program[place].accepts if place < len(program) else None
                if accepts is not None and accepts(name[at]):
                    moved.append(place + 1)
            self._reach(program, moved, found, at + 1, len(name))
            current = found
        return len(program) in current

    def _reach(self, program: list[_Step], places: list[int], found: set[int], at: int, length: int) -> None:
        """Add to ``found`` all places that ``places`` reach without a character."""
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place in found:
                continue
            found.add(place)
            self._steps += 1
            if place == len(program):
                continue
            step = program[place]
            if step.at:
                if at == (0 if step.at == "^" else length):
                    waiting.append(place + 1)
            elif step.accepts is None:
                waiting += [place + offset for offset in step.to]


def _ends(name: str, key: str) -> bool:
    """Return True if a pattern of plain characters and dots fits. A dot fits any character."""
    begin = len(name) - len(key)
    if begin < 0 or (begin and name[begin - 1] != "."):
        return False
    return all(b in (a, ".") for a, b in zip(name[begin:], key, strict=True))


def _parsed(pattern: str) -> list[_Step]:
    """Return the instructions of a pattern. Raise PatternError."""
    if len(pattern) > MOST_LENGTH:
        raise PatternError(f"a pattern has more than {MOST_LENGTH} characters")
    parser = _Parser(pattern)
    made = parser.alternatives(0)
    if parser.at < len(pattern):
        raise PatternError(f"{pattern!r} has a closing bracket without an opening one")
    return made


class _Parser:
    """Parser of one pattern, by recursive descent."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def _fail(self, why: str) -> PatternError:
        return PatternError(f"{self._pattern!r}: {why}")

    def _peek(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _next(self) -> str:
        found = self._peek()
        if not found:
            raise self._fail("the pattern ends too early")
        self.at += 1
        return found

    def alternatives(self, depth: int) -> list[_Step]:
        """Return the instructions of a list of alternatives."""
        if depth > 32:
            raise self._fail("groups are nested too deeply")
        made = self._sequence(depth)
        while self._peek() == "|":
            self.at += 1
            other = self._sequence(depth)
            made = [_Step(to=(1, len(made) + 2)), *made, _Step(to=(len(other) + 1,)), *other]
            self._check(made)
        return made

    def _sequence(self, depth: int) -> list[_Step]:
        made = list[_Step]()
        while self._peek() not in ("", "|", ")"):
            made += self._repeated(self._atom(depth))
            self._check(made)
        return made

    def _check(self, made: list[_Step]) -> None:
        if len(made) > MOST_INSTRUCTIONS:
            raise self._fail("the pattern is too large")

    def _atom(self, depth: int) -> list[_Step]:
        """Return the instructions of one character, class, anchor or group."""
        found = self._next()
        if found == "(":
            if self._peek() == "?":
                self.at += 1
                if self._next() != ":":
                    raise self._fail("only plain groups are understood")
            made = self.alternatives(depth + 1)
            if self._next() != ")":
                raise self._fail("a group has no end")
            return made
        if found in "^$":
            return [_Step(at=found)]
        if found == ".":
            return [_Step(accepts=lambda c: c != "\n")]
        if found == "[":
            return [_Step(accepts=self._class())]
        if found in "*+?{":
            raise self._fail(f"{found} repeats nothing")
        return [_Step(accepts=self._escaped() if found == "\\" else found.__eq__)]

    def _escaped(self) -> Callable[[str], bool]:
        """Return the test behind a backslash."""
        found = self._next()
        if found.lower() in _CLASSES:
            inside = _CLASSES[found.lower()]
            return inside if found.islower() else lambda c: not inside(c)
        if found.isalnum():
            raise self._fail(f"\\{found} is not understood")
        return found.__eq__

    def _class(self) -> Callable[[str], bool]:
        """Return the test of a class in brackets, behind the opening bracket."""
        negated = self._peek() == "^"
        self.at += negated
        tests = list[Callable[[str], bool]]()
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._next()
            if low == "\\":
                tests.append(self._escaped())
            elif self._peek() == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("", "]"):
                self.at += 1
                tests.append(_between(low, self._next()))
            else:
                tests.append(low.__eq__)
        self.at += 1
        return lambda c: any(test(c) for test in tests) != negated

    def _repeated(self, made: list[_Step]) -> list[_Step]:
        """Return ``made`` with the repetitions that follow in the pattern."""
        while (found := self._peek()) and found in "*+?{":
            self.at += 1
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found) or self._counts()
            if self._peek() in ("?", "+"):  # lazy and possessive forms fit the same names here
                if self._peek() == "+":
                    raise self._fail("possessive repetitions are not understood")
                self.at += 1
            if max(low, high or 0, 1) * (len(made) + 1) > MOST_INSTRUCTIONS:
                raise self._fail("the pattern is too large")
            size = len(made)
            tail = [_Step(to=(1, size + 2)), *made, _Step(to=(-size - 1,))] if high is None else []
            for _ in range((high or low) - low):
                tail = [_Step(to=(1, size + len(tail) + 1)), *made, *tail]
            made = made * low + tail
        return made

    def _counts(self) -> tuple[int, int | None]:
        """Return the numbers behind an opening brace: ``m}``, ``m,}`` or ``m,n}``."""
        inside, _, rest = self._pattern[self.at :].partition("}")
        low, comma, high = inside.partition(",")
        if not rest and not self._pattern.endswith("}"):
            raise self._fail("a repetition has no end")
        if not low.isdecimal() or (high and not high.isdecimal()) or len(inside) > 9:
            raise self._fail("a repetition needs numbers")
        self.at += len(inside) + 1
        most = int(low) if not comma else int(high) if high else None
        if most is not None and most < int(low):
            raise self._fail("a repetition needs numbers in order")
        return int(low), most


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda c: low <= c <= high
