"""The interface of grammar backends: one compiler per model, one compiled grammar per source, one matcher per
sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from weft.types.grammar import Grammar


class Matcher(Protocol):
    """The position of one sequence in a grammar. Not thread-safe.

    ``accept`` and ``fill`` raise InvalidRequest if the output exceeds the complexity limits of the backend.
    The sequence cannot continue; other sequences are not affected.
    """

    def accept(self, token: int) -> bool:
        """Accept the next token. Return False, with nothing changed, if the grammar does not allow the token.

        After an end-of-turn token, only end-of-turn tokens are accepted.
        """

    def rollback(self, tokens: int) -> None:
        """Take back the last ``tokens`` accepted tokens."""

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of allowed next tokens: int32 [ceil(vocabulary / 32)]. Bit i of word w is token 32 w
        + i.

        End-of-turn ids are allowed exactly where the grammar may end.
        """

    def fill_each(self, matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
        """Fill one row per matcher: ``words`` is int32 [matchers, ceil(vocabulary / 32)], contiguous.

        All matchers must come from the same compiler; their grammars may differ. Return the row numbers of
        failed matchers. The content of a failed row is arbitrary, and ``fill`` of the matcher raises the
        error.
        """

    @property
    def ended(self) -> bool:
        """True if the output is complete and only end-of-turn ids may follow."""


def fill_one_by_one(matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
    """Fill row i of ``words`` by ``fill`` of matcher i. Return the indices of matchers that raised."""
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
        """Return a new matcher at the start of an output."""

    @property
    def nbytes(self) -> int:
        """Approximate current size in bytes. Grows with the outputs of the grammar."""

    @property
    def spent(self) -> bool:
        """True if further outputs need a newly compiled grammar."""


class Compiler(Protocol):
    """Compiles grammars for one tokenizer. Thread-safe. ``compile`` runs in threads and releases the GIL."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar. Raises InvalidRequest (400), with the keyword or position, for a
        grammar the backend cannot enforce exactly."""


class GrammarCompiler(Compiler, Protocol):
    """A backend. ``compile`` has two parts: ``lower`` (Python) and ``build`` (library)."""

    name: str

    def lower(self, grammar: Grammar) -> str:
        """Return the grammar in the library's own language. Raises InvalidRequest (400), with the keyword or
        position, for a grammar the backend cannot enforce exactly."""

    def build(self, source: str, nbytes: int = 0) -> CompiledGrammar:
        """Compile the source made by ``lower``. Releases the GIL. Raises InvalidRequest.

        ``nbytes``: size of the compiled grammar, if already measured.
        """


class CompilerFactory(Protocol):
    """Makes a backend's compiler."""

    def __call__(self, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> GrammarCompiler:
        """Return a compiler for the tokenizer in the folder ``tokenizer``.

        ``vocab_size``: width of the logits. Ids beyond the tokenizer are never allowed. Raises ConfigError
        with an install hint if the backend is not installed.
        """
