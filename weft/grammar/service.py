"""Compiles grammars beside the loop that needs them: bounded cache, deadline, one compile a source."""

from __future__ import annotations

from typing import Protocol

from weft.grammar.base import CompiledGrammar
from weft.types.grammar import Grammar


class Compile(Protocol):
    """A compile under way, or done. Thread-safe."""

    def done(self) -> bool:
        """Whether ``result`` returns at once. True too once the deadline has passed. Never blocks."""

    def result(self) -> CompiledGrammar:
        """The compiled grammar; to be called when ``done``.

        Raises InvalidRequest (400) for a grammar that the backend cannot hold to, DeadlineExceeded (504)
        when the compile took too long, Unavailable (503) when too many abandoned compiles still run.
        """


class GrammarService(Protocol):
    """Made by ``GrammarService(compiler, timeout=seconds)``. Thread-safe. The owner calls ``close``."""

    def submit(self, grammar: Grammar) -> Compile:
        """Starts to compile ``grammar``, or takes it from the cache. Never blocks, never raises for what the
        grammar says: ``result`` does."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The same, waiting for it, up to the deadline."""

    def close(self) -> None:
        """Takes no more; does not wait for abandoned compiles."""
