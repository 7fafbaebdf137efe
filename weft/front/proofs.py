"""Proof that the grammars of a request compile, before any is sent to an engine.

A thread of the front asks the front's ``GrammarCheck`` and raises Compiling rather than wait. A read worker
has no compiler: it raises NeedsProof, the front finds out, and the worker reads the body again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import msgspec

from weft.common.errors import DeadlineExceeded, ErrorInfo, InvalidRequest, ReportedError
from weft.grammar.service import Compile
from weft.types.grammar import Grammar


class Compiling(Exception):
    """A grammar that a request asks for is not compiled yet: when it is, the body is to be read again."""

    def __init__(self, task: Compile, param: str) -> None:
        """``param``: the request's field that asks for the grammar."""
        super().__init__("a grammar is being compiled")
        self.task = task
        self.param = param


class Proof(Protocol):
    """The part of ``grammar.service.Compile`` that reading needs."""

    def done(self) -> bool:
        """True when ``wait`` returns at once."""

    def wait(self) -> object:
        """Raises WeftError for a grammar that does not compile."""


class Grammars(Protocol):
    """Proves that grammars compile: ``setup.GrammarCheck``, ``Told``."""

    def submit(self, grammar: Grammar, client: int) -> Proof:
        """Begins for ``client``; never waits. Raises what makes the front read the body again."""


class Unproved(msgspec.Struct, frozen=True):
    """A grammar of which a read worker knows nothing yet."""

    grammar: Grammar


class NeedsProof(Exception):
    """A read worker cannot go on without the verdict on a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__("a grammar was not compiled")
        self.unproved = Unproved(grammar)


class Told:
    """``Grammars`` of one request, from the verdicts of the front."""

    def __init__(self, verdicts: Mapping[str, ErrorInfo | None]) -> None:
        self._verdicts = verdicts

    def submit(self, grammar: Grammar, client: int) -> _Verdict:
        """Raises NeedsProof."""
        digest = digest_of(grammar)
        if digest not in self._verdicts:
            raise NeedsProof(grammar)
        return _Verdict(self._verdicts[digest])


class _Verdict:
    def __init__(self, error: ErrorInfo | None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Raises InvalidRequest, which readers can answer with a looser grammar, or ReportedError."""
        if self._error is None:
            return
        if self._error.http_status == InvalidRequest.http_status:
            raise InvalidRequest(self._error.message, param=self._error.param, code=self._error.code)
        if self._error.http_status == DeadlineExceeded.http_status:
            raise DeadlineExceeded(self._error.message)
        raise ReportedError(self._error)


def digest_of(grammar: Grammar) -> str:
    """The name of ``grammar`` in ``Known``."""
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).hexdigest()
