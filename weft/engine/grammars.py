"""Compiles the grammars of sequences outside the step loop, which continues meanwhile.

    submit ──► compiled in a thread, within a deadline ──► take: the scheduler gets a matcher
                                                         ╰► or the sequence ends with the compiler's error

A sequence stays blocked until the end of the compile, just as a sequence blocked on KV (``Scheduler.add``).
An idle loop sleeps on a descriptor, readable at the end of a compile.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.engine.step_scheduler import StepScheduler
from weft.grammar.base import CompiledGrammar, GrammarCompiler
from weft.grammar.guard.compile_jobs import GrammarService
from weft.grammar.guard.guarded import BackendArguments, GuardedCompiler
from weft.grammar.registry import make_compiler
from weft.text.model import TextModel
from weft.types.grammar import Grammar
from weft.types.messages import Submit, TokenEvent

log = get_logger(__name__)


class GrammarCompile(Protocol):
    """A compile, running or complete."""

    def done(self) -> bool:
        """Return True if ``result`` would not block: the compile has ended or the deadline has passed."""

    def result(self) -> CompiledGrammar:
        """Return the compiled grammar. Raises WeftError for an invalid grammar or a compile past the
        deadline.
        """


class CompileService(Protocol):
    """Compiles grammars for the model of the engine, in threads."""

    @property
    def end_ids(self) -> Iterable[int]:
        """Token ids allowed by a mask where a grammar may end."""

    def submit(self, grammar: Grammar, ring: Callable[[], None], client: int) -> GrammarCompile:
        """Start a compile for ``client`` and return at once. Unless the compile has ended already, ``ring``
        is called at the end, from any thread.
        """

    def close(self) -> None:
        """Refuse further compiles. Does not wait."""


class GrammarSource:
    """The ``AwaitedSource`` of grammars. Used from the stepping thread."""

    def __init__(self, make: Callable[[], CompileService]) -> None:
        """``make``: creates the compiler, called for the first grammar."""
        self._make = make
        self._compiler: CompileService | None = None
        self._pending: dict[int, GrammarCompile] = {}
        """Sequence -> running compile."""
        self._wakeup = -1
        self._lock = threading.Lock()
        self._closed = False
        self._rung = False
        self.compiled = 0
        """Number of grammars compiled or found compiled, counted per sequence."""

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._own_bell(),)

    def open(self, submit: Submit, scheduler: StepScheduler) -> list[TokenEvent]:
        """Start to compile the grammar of a sequence already added to the scheduler. Return the events of the
        sequence.

        A grammar from the compiler's cache reaches the scheduler at once. An unusable grammar ends the
        sequence.
        """
        assert submit.grammar is not None
        compiler = self._compiler = self._compiler or self._make()
        self._own_bell()
        self._pending[submit.sequence] = compiler.submit(submit.grammar, self._ring, submit.client)
        return self._settle(submit.sequence, scheduler)

    def forget(self, sequence: int) -> None:
        """Drop the compile of an ended sequence. Unknown ids are ignored."""
        self._pending.pop(sequence, None)

    def take(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Pass compiled grammars to the scheduler and return the events. Cheap when no compile has ended."""
        # Also after a compile settled elsewhere: a signal left unread would keep an idle loop awake.
        if self._rung:
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
        if not self._pending:
            return []
        return [event for sequence in list(self._pending) for event in self._settle(sequence, scheduler)]

    def serve(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Return no events: the Submit carries the grammar, so the scheduler requests nothing."""
        return []

    def close(self) -> None:
        """Drop all running compiles, then close the descriptor and the compiler. Idempotent."""
        self._pending.clear()
        # Under the lock: `_ring` must not write to a closed descriptor.
        with self._lock:
            self._closed = True
            wakeup, self._wakeup = self._wakeup, -1
            if wakeup >= 0:
                os.close(wakeup)
        if self._compiler is not None:
            self._compiler.close()

    def _settle(self, sequence: int, scheduler: StepScheduler) -> list[TokenEvent]:
        """Pass the compiled grammar of a sequence to the scheduler and return the events.

        Return no events while the compile runs.

        A failed compile ends the sequence. An unexpected error is logged.
        """
        compile_ = self._pending[sequence]
        if not compile_.done():
            return []
        del self._pending[sequence]
        assert self._compiler is not None
        try:
            matcher = compile_.result().matcher()
        except Exception as error:  # an error inside a third-party compiler must end only one sequence
            known = error if isinstance(error, WeftError) else EngineDead("the grammar could not be compiled")
            if known is not error:
                log.exception("a grammar could not be compiled")
            return scheduler.fail(sequence, known.info())
        self.compiled += 1
        return scheduler.constrain(sequence, matcher, self._compiler.end_ids)

    def _own_bell(self) -> int:
        if self._wakeup < 0:
            self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._wakeup

    def _ring(self) -> None:
        # A compile may end after `close`, when the descriptor number may belong to another file.
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)
                self._rung = True


class ModelGrammars:
    """The ``CompileService`` of one model, with the tokenizer and the backend of ``--grammar-backend``.

    The compiling thread creates the backend at the first grammar. Reading a tokenizer's tokens takes a
    second, which servers without grammars do not pay.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Read nothing yet: the tokenizer is read at the first compile.

        Compiles are ended after ``--grammar-compile-timeout`` seconds.
        """
        self._config = config
        self.end_ids: tuple[int, ...] = ()
        """Sorted end-of-output token ids; empty until the first compile."""
        seconds = config.grammar.grammar_compile_timeout
        self._compiler = GuardedCompiler(self._backend, seconds, _made)
        self._service = GrammarService(self._compiler, timeout=seconds, per_client=True)

    def submit(self, grammar: Grammar, ring: Callable[[], None], client: int = 0) -> GrammarCompile:
        made = self._service.submit(grammar, client)
        if not made.done():
            made.when_ended(ring)
        return made

    def close(self) -> None:
        self._service.close()
        self._compiler.close()

    def _backend(self) -> BackendArguments:
        spec, folder = self._config.spec, str(self._config.tokenizer_path)
        self.end_ids = tuple(sorted({*TextModel.load(folder).end_ids, *spec.eos_ids}))
        name = self._config.grammar.grammar_backend
        return BackendArguments(name=name, tokenizer=folder, vocab_size=spec.vocab_size, end_ids=self.end_ids)


def _made(backend: BackendArguments) -> GrammarCompiler:
    return make_compiler(backend.name, backend.tokenizer, backend.vocab_size, backend.end_ids)
