"""What a grammar backend is: one compiler a model, one compiled grammar a source, one matcher a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from weft.types.grammar import Grammar


class Matcher(Protocol):
    """Where one sequence is in its grammar. Not thread-safe.

    ``accept`` and ``fill`` raise InvalidRequest when the output has become too complex to follow (limits of
    the backend): the sequence cannot go on, others are not touched.
    """

    def accept(self, token: int) -> bool:
        """Takes the next token; False, and nothing changes, when the grammar does not allow it. Behind an end
        of turn only ends of turn are taken."""

    def rollback(self, tokens: int) -> None:
        """Takes back the last ``tokens`` that were accepted."""

    def fill(self, words: np.ndarray) -> None:
        """Writes which tokens may follow: int32 [ceil(vocabulary / 32)], bit i of word w is token 32 w + i.
        Ids that end a turn are allowed where the grammar may end, and only there."""

    def fill_each(self, matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
        """``fill`` of each of ``matchers``, of any grammars of this one's compiler, into its row of
        ``words``: int32 [matchers, ceil(vocabulary / 32)], contiguous. Returns the numbers of those that
        failed: their rows are arbitrary, and ``fill`` raises why."""

    @property
    def ended(self) -> bool:
        """Whether the output is complete, and only an end-of-turn id may follow."""


def fill_one_by_one(matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
    """``Matcher.fill_each`` of a backend that has nothing better."""
    failed = []
    for number, matcher in enumerate(matchers):
        try:
            matcher.fill(words[number])
        except Exception:
            failed.append(number)
    return failed


class CompiledGrammar(Protocol):
    """A grammar for one tokenizer. Thread-safe; shared by sequences."""

    def matcher(self) -> Matcher:
        """At the start of an output."""

    @property
    def nbytes(self) -> int:
        """Bytes that the grammar takes now, about. Grows with the outputs that follow the grammar."""

    @property
    def spent(self) -> bool:
        """True when further outputs need a grammar that is compiled again."""


class Compiler(Protocol):
    """Compiles grammars for one tokenizer. Thread-safe: ``compile`` is called from threads, and releases the
    GIL.
    """

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest (400), naming the keyword or the position, for what it cannot hold to
        exactly.
        """


class GrammarCompiler(Compiler, Protocol):
    """A backend: ``compile`` in two parts, of which the first is Python."""

    name: str

    def lower(self, grammar: Grammar) -> str:
        """The grammar in the library's own language. Raises InvalidRequest (400), naming the keyword or the
        position, for what it cannot hold to exactly.
        """

    def build(self, source: str, nbytes: int = 0) -> CompiledGrammar:
        """Compiles what ``lower`` returned; ``nbytes``: measured before. Releases the GIL. Raises
        InvalidRequest.
        """


class CompilerFactory(Protocol):
    """Makes a backend's compiler."""

    def __call__(self, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> GrammarCompiler:
        """``tokenizer``: folder of ``tokenizer.json``. ``vocab_size``: width of the logits; ids beyond the
        tokenizer's are never allowed. Raises ConfigError, naming what to install, when the backend is not
        there."""
