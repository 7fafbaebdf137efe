"""Grammars over token ids for tests: automata, their matchers, and a compiler that finds automata by
number.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.common.errors import WeftError
from weft.engine.grammars import GrammarSource
from weft.grammar.base import Matcher, fill_one_by_one
from weft.types.grammar import Grammar, Text


@dataclass(frozen=True)
class Automaton:
    """State 0 is the start. A state without edges is the end of the output."""

    edges: tuple[dict[int, int], ...]
    """Transitions by state: token -> next state."""
    accepting: frozenset[int]
    """States after which an end id may follow."""
    ends: tuple[int, ...] = ()
    """The end ids."""

    def allowed(self, tokens: Sequence[int]) -> set[int] | None:
        """Return the tokens that may follow ``tokens``, or None if ``tokens`` do not match. Nothing follows
        an end id.
        """
        state = 0
        for number, token in enumerate(tokens):
            if token in self.ends and state in self.accepting:
                return set() if number == len(tokens) - 1 else None
            if token not in self.edges[state]:
                return None
            state = self.edges[state][token]
        return {*self.edges[state], *(self.ends if state in self.accepting else ())}


def random_automaton(rng: random.Random, vocab: int, ends: Sequence[int] = (), states: int = 7) -> Automaton:
    """Every state but the last leads to one or a few others, never nowhere; the last is an end, if
    ``ends``.
    """
    ids = [token for token in range(vocab) if token not in ends]
    edges: list[dict[int, int]] = []
    for state in range(states):
        count = rng.choice((1, 1, 2, 3, 12))
        last = states if ends and state > states // 2 else states - 1
        edges.append({token: rng.randrange(last) for token in rng.sample(ids, count)})
    accepting = {state for state in range(states) if ends and rng.random() < 0.12}
    if ends:
        edges[-1] = {}
        accepting.add(states - 1)
    return Automaton(tuple(edges), frozenset(accepting), tuple(ends))


_OVER = -1


@dataclass
class AutomatonMatcher:
    """Implement ``weft.grammar.base.Matcher``. Every wrong use raises AssertionError."""

    automaton: Automaton
    path: list[int] = field(default_factory=lambda: [0])
    """States; ``_OVER`` behind an end id."""
    rolled: int = 0
    """Number of rolled-back tokens."""

    def accept(self, token: int) -> bool:
        state = self.path[-1]
        if state == _OVER:
            return False
        if token in self.automaton.ends and state in self.automaton.accepting:
            self.path.append(_OVER)
        elif token in self.automaton.edges[state]:
            self.path.append(self.automaton.edges[state][token])
        else:
            return False
        return True

    def rollback(self, tokens: int) -> None:
        assert 0 < tokens < len(self.path)
        self.rolled += tokens
        del self.path[-tokens:]

    def fill(self, words: np.ndarray) -> None:
        assert words.dtype == np.int32
        assert words.ndim == 1
        assert words.flags.c_contiguous
        state = self.path[-1]
        allowed = [] if state == _OVER else [*self.automaton.edges[state]]
        allowed += self.automaton.ends if state in self.automaton.accepting else ()
        bits = np.zeros(32 * len(words), np.uint8)
        bits[allowed] = 1
        words[:] = np.packbits(bits, bitorder="little").view("<i4")

    def fill_each(self, matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
        return fill_one_by_one(matchers, words)

    @property
    def ended(self) -> bool:
        return self.path[-1] == _OVER or not self.automaton.edges[self.path[-1]]


def named(number: int) -> Grammar:
    """Return the grammar with the name of automaton ``number`` of an ``Automata``."""
    return Text(f"automaton {number}")


class _Compile:
    """Stand in for a compile that ends after ``turns`` polls, with ``error`` if set."""

    def __init__(self, automata: Automata, grammar: Grammar, turns: int) -> None:
        self._automata, self._grammar, self._turns = automata, grammar, turns

    def done(self) -> bool:
        self._turns -= 1
        return self._turns < 0

    def result(self) -> Any:
        return self

    def matcher(self) -> Any:
        assert isinstance(self._grammar, Text)
        found = self._automata.automata[int(self._grammar.text.split()[1])]
        if isinstance(found, WeftError):
            raise found
        made = found if not isinstance(found, Automaton) else AutomatonMatcher(found)
        self._automata.matchers.append(made)
        return made


@dataclass
class Automata:
    """A ``weft.engine.grammars.Compiler`` of automata."""

    automata: Sequence[Automaton | WeftError | Any]
    """Automata by number. An error is raised by its compile; a matcher is used as it is."""
    end_ids: Iterable[int] = ()
    turns: int = 0
    """Number of polls before a compile ends."""
    rings: bool = False
    matchers: list[Any] = field(default_factory=list)
    """All matchers made so far."""
    closed: bool = False

    def submit(self, grammar: Grammar, ring: Callable[[], None], client: int = 0) -> _Compile:
        if self.rings:
            threading.Timer(0.05, ring).start()
        return _Compile(self, grammar, self.turns)

    def close(self) -> None:
        self.closed = True

    @property
    def rolled(self) -> int:
        """Return the number of tokens that matchers have rolled back."""
        return sum(matcher.rolled for matcher in self.matchers)

    def source(self) -> GrammarSource:
        return GrammarSource(lambda: self)
