"""Grammars compile in a process of their own first, so that what they cost is known and bounded.

    front   thread ──grammar──► guard process ──► a verdict: fine, or why not
    head    thread ──grammar──► guard process ──► the library's source, and its size
                   ──source───► the library, in this process: a compile that is known to end

The guard process has limits of CPU time and memory. A compiled grammar holds pointers and cannot move between
processes; a head therefore compiles again what the guard has admitted. What Python does to a grammar is done
in the guard alone.
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
"""CPU time of one compile, by backend; --grammar-compile-timeout for others. llguidance takes milliseconds
for schemas that people write."""
MAX_BYTES = 16 << 20
"""Size of one compiled grammar."""


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``make_compiler``."""

    name: str
    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a guard found out about a grammar."""

    source: str = ""
    """In the library's own language."""
    nbytes: int = 0
    """Size of the compiled grammar."""
    message: str | None = ""
    """Why the grammar is refused; "" where it is not, None for a defect of this server."""
    param: str | None = None
    code: str = ""


_decode = msgspec.msgpack.Decoder(Verdict).decode


class Proved:
    """A grammar that compiles: the ``CompiledGrammar`` of a process that follows none."""

    nbytes = 0
    spent = False

    def matcher(self) -> Matcher:
        raise AssertionError("grammars are only checked here")


class GuardedCompiler:
    """Compiles grammars behind a guard. Thread-safe. ``close`` ends its processes."""

    def __init__(
        self,
        backend: Callable[[], Backend],
        seconds: float,
        make: Callable[[Backend], GrammarCompiler] | None = None,
    ) -> None:
        """``backend`` is called for the first grammar. ``seconds``: for one compile. ``make``: makes the
        compiler of this process; None where grammars are only checked."""
        self._backend = backend
        self._seconds = seconds
        self._make = make
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        self._compiler: GrammarCompiler | None = None
        self._closed = False

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest (400) for a grammar that the backend cannot hold to, or that costs too much;
        DeadlineExceeded (504) when the machine had no time for it."""
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
        if time.monotonic() - begin > LONG_S:  # another one may follow in this thread, but not often
            step_back(threading.current_thread())
        return Proved() if compiler is None else compiler.build(verdict.source, verdict.nbytes)

    def close(self) -> None:
        """End the processes. What compiles in one fails."""
        with self._lock:
            self._closed = True
            guard = self._guard
        if guard is not None:
            guard.close()

    def _parts(self) -> tuple[Guard, GrammarCompiler | None]:
        with self._lock:
            if self._guard is None:
                backend = self._backend()
                seconds = min(self._seconds, CPU_SECONDS.get(resolved(backend.name), self._seconds))
                command = (sys.executable, "-m", "weft.grammar.guard_worker", f"{seconds:g}")
                guard = Guard(command, msgspec.msgpack.encode(backend))
                self._compiler = None if self._make is None else self._make(backend)
                self._guard = guard
                if self._closed:
                    guard.close()
            return self._guard, self._compiler
