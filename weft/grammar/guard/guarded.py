"""Compile each grammar in a separate process first, so that the cost is known and bounded.

    API server  thread ──grammar──► guard process ──► a verdict: accepted, or the reason against
    engine      thread ──grammar──► guard process ──► the library's source, and its size
                       ──source───► the library, in this process: a compile known to end

The guard process has limits of CPU time and memory. A compiled grammar contains pointers and cannot move
between processes. Therefore an engine compiles every accepted grammar again. All Python work on
a grammar happens in the guard alone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import msgspec

from weft.common.errors import DeadlineExceeded, InvalidRequest, WeftError
from weft.common.guard import Guard
from weft.common.priority import LONG_S, step_back
from weft.common.workers import CpuSpent, WorkerDied
from weft.grammar.base import CompiledGrammar, GrammarCompiler, Matcher
from weft.grammar.registry import resolved
from weft.types.grammar import Grammar

CPU_SECONDS = {"llguidance": 2.0}
"""CPU seconds of one compile by backend; other backends use --grammar-compile-timeout. llguidance takes
milliseconds for realistic schemas."""
MAX_BYTES = 16 << 20
"""Maximum bytes of one compiled grammar."""


class BackendArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``make_compiler``."""

    name: str
    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a guard for one grammar."""

    source: str = ""
    """The grammar in the library's own language."""
    nbytes: int = 0
    """Size of the compiled grammar in bytes."""
    message: str | None = ""
    """Reason of a refusal; "" if accepted; None for an internal error."""
    param: str | None = None
    code: str = ""


_decode = msgspec.msgpack.Decoder(Verdict).decode


class CheckedGrammar:
    """A grammar that compiles. Stands for the ``CompiledGrammar`` in a process without matchers."""

    nbytes = 0
    spent = False

    def matcher(self) -> Matcher:
        """Raise AssertionError: this process only checks grammars."""
        raise AssertionError("this compiler only checks grammars")


class GuardedCompiler:
    """Compiles grammars behind a guard. Thread-safe. ``close`` ends the guard processes."""

    def __init__(
        self,
        backend: Callable[[], BackendArguments],
        seconds: float,
        make: Callable[[BackendArguments], GrammarCompiler] | None = None,
    ) -> None:
        """``backend`` is called for the first grammar. ``seconds``: limit for one compile. ``make``: makes
        the compiler of this process; None for a process that only checks grammars."""
        self._backend = backend
        self._seconds = seconds
        self._make = make
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        self._compiler: GrammarCompiler | None = None
        self._closed = False

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar, or a ``CheckedGrammar`` without ``make``.

        Blocks until the guard has answered.

        Raises InvalidRequest (400) for a grammar the backend cannot enforce or that costs too much. Raises
        DeadlineExceeded (504) if the machine was too busy, WeftError for an internal error. A long compile
        lowers the priority of the calling thread for good.
        """
        guard, compiler = self._parts()
        begin = time.monotonic()
        try:
            verdict = _decode(guard.call(msgspec.msgpack.encode(grammar), self._seconds))
        except CpuSpent:
            raise InvalidRequest(
                "the grammar takes too long to compile; make the schema or pattern simpler",
                code="grammar_timeout",
            ) from None
        except DeadlineExceeded:
            raise DeadlineExceeded(
                "the grammar was not compiled in time; make the schema or pattern simpler, or raise "
                "--grammar-compile-timeout",
                code="grammar_timeout",
            ) from None
        except WorkerDied:
            raise InvalidRequest(
                "the grammar takes too much memory to compile; make the schema or pattern simpler",
                code="grammar_too_large",
            ) from None
        if verdict.message is None:
            raise WeftError("the grammar could not be compiled")
        if verdict.message:
            raise InvalidRequest(verdict.message, param=verdict.param, code=verdict.code)
        # The library's compile takes long too. The thread stays at low priority, but later grammars are rare.
        if time.monotonic() - begin > LONG_S:
            step_back(threading.current_thread())
        return CheckedGrammar() if compiler is None else compiler.build(verdict.source, verdict.nbytes)

    def close(self) -> None:
        """End the guard processes. Compiles in progress fail."""
        with self._lock:
            self._closed = True
            guard = self._guard
        if guard is not None:
            guard.close()

    def _parts(self) -> tuple[Guard, GrammarCompiler | None]:
        """Return the guard and the compiler of this process (None without ``make``), made at the first call.

        After ``close``, the guard is closed.
        """
        with self._lock:
            if self._guard is None:
                backend = self._backend()
                seconds = min(self._seconds, CPU_SECONDS.get(resolved(backend.name), self._seconds))
                command = (sys.executable, "-m", "weft.grammar.guard.guard_worker", f"{seconds:g}")
                guard = Guard(command, msgspec.msgpack.encode(backend))
                self._compiler = None if self._make is None else self._make(backend)
                self._guard = guard
                if self._closed:
                    guard.close()
            return self._guard, self._compiler
