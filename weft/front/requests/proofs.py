"""Proof that a request's grammars compile, before any grammar reaches an engine.

A thread of the API server asks ``GrammarCheck``, and raises Compiling rather than wait. A read worker has
no compiler. The worker raises NeedsProof, the API server compiles the grammar, and the worker reads the
body again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import msgspec

from weft.common.errors import DeadlineExceeded, ErrorInfo, InvalidRequest, ReportedError
from weft.grammar.guard.service import Compile
from weft.types.grammar import Grammar


class Compiling(Exception):
    """A grammar of the request is still compiling. Read the body again afterwards."""

    def __init__(self, task: Compile, param: str) -> None:
        """``param``: request field of the grammar."""
        super().__init__("a grammar is being compiled")
        self.task = task
        self.param = param


class Proof(Protocol):
    """The part of ``grammar.service.Compile`` used by readers."""

    def done(self) -> bool:
        """Return True if ``wait`` would not block."""

    def wait(self) -> object:
        """Block until the compile ends. Raises WeftError for a grammar that does not compile."""


class Grammars(Protocol):
    """Compiles grammars: implemented by ``setup.GrammarCheck`` and ``Told``."""

    def submit(self, grammar: Grammar, client: int) -> Proof:
        """Start a compile for ``client``; never blocks. May raise NeedsProof, which makes the API server
        compile the grammar and read again."""


class Unproved(msgspec.Struct, frozen=True):
    """A grammar without a verdict in the read worker."""

    grammar: Grammar


class NeedsProof(Exception):
    """A read worker needs the verdict on a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__("a grammar was not compiled")
        self.unproved = Unproved(grammar)


class Told:
    """``Grammars`` of one request, from the API server's verdicts."""

    def __init__(self, verdicts: Mapping[str, ErrorInfo | None]) -> None:
        self._verdicts = verdicts

    def submit(self, grammar: Grammar, client: int) -> _Verdict:
        """Return the verdict on ``grammar``, without any compile. Raises NeedsProof for a grammar without a
        verdict."""
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
        """Raise the compile error, if any; never blocks. An InvalidRequest stays an InvalidRequest, which
        readers can answer with a looser grammar. A time-out becomes DeadlineExceeded; any other error
        becomes ReportedError."""
        if self._error is None:
            return
        if self._error.http_status == InvalidRequest.http_status:
            raise InvalidRequest(self._error.message, param=self._error.param, code=self._error.code)
        if self._error.http_status == DeadlineExceeded.http_status:
            raise DeadlineExceeded(self._error.message)
        raise ReportedError(self._error)


def digest_of(grammar: Grammar) -> str:
    """Return the key of ``grammar`` in ``Known``."""
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).hexdigest()
