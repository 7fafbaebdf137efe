"""Proof that a request's grammars compile, before any grammar reaches an engine.

A reader does not wait for a compile, and a read worker has no compiler. The reader raises NeedsProof, the API
server waits for the compile on the event loop, and the body is read again with the verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import msgspec

from weft.common.errors import ErrorInfo, InvalidRequest, ReportedError
from weft.types.grammar import Grammar


class Proof(Protocol):
    """The part of ``grammar.guard.compile_jobs.Compile`` used by readers."""

    def done(self) -> bool:
        """Return True if ``wait`` would not block."""

    def wait(self) -> object:
        """Block until the compile ends. Raises WeftError for a grammar that does not compile."""


class Grammars(Protocol):
    """Compiles grammars: implemented by ``setup.GrammarCheck`` and ``KnownVerdicts``."""

    def submit(self, grammar: Grammar, client: int) -> Proof:
        """Start a compile for ``client``; never blocks."""


class Unproved(msgspec.Struct, frozen=True):
    """A grammar without a verdict, and the request field of the grammar."""

    grammar: Grammar
    param: str


class NeedsProof(Exception):
    """A reader needs the verdict on a grammar. Read the body again with the verdict."""

    def __init__(self, grammar: Grammar, param: str) -> None:
        """``param``: request field of the grammar."""
        super().__init__("a grammar has no verdict yet")
        self.unproved = Unproved(grammar, param)


class KnownVerdicts:
    """``Grammars`` of one request, from the API server's verdicts."""

    def __init__(self, verdicts: Mapping[str, ErrorInfo | None], compiler: Grammars | None = None) -> None:
        """``compiler``: compiles grammars without a verdict; None in a read worker."""
        self._verdicts = verdicts
        self._compiler = compiler

    def submit(self, grammar: Grammar, client: int) -> Proof:
        """Return the verdict on ``grammar``. Without a verdict, start a compile; without a compiler, return a
        proof that is not done."""
        digest = digest_of(grammar)
        known = digest in self._verdicts
        if known or self._compiler is None:
            return _Verdict(self._verdicts.get(digest), known)
        return self._compiler.submit(grammar, client)


class _Verdict:
    def __init__(self, error: ErrorInfo | None, known: bool) -> None:
        self._error, self._known = error, known

    def done(self) -> bool:
        return self._known

    def wait(self) -> None:
        """Raise the compile error, if any; never blocks. An InvalidRequest stays an InvalidRequest, which
        readers can answer with a looser grammar. Any other error becomes ReportedError."""
        if self._error is None:
            return
        if self._error.http_status == InvalidRequest.http_status:
            raise InvalidRequest(self._error.message, param=self._error.param, code=self._error.code)
        raise ReportedError(self._error)


def digest_of(grammar: Grammar) -> str:
    """Return the key of ``grammar`` in ``Known``."""
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).hexdigest()
