"""Grammars of sequences on their way: compiled outside the step loop, which goes on meanwhile.

    submit ──► compiled in a thread, within a deadline ──► take: the scheduler gets a matcher
                                                         ╰► or the sequence ends with the compiler's error

The sequence awaits its grammar as another one awaits its cache (``Scheduler.add``). An idle loop sleeps on a
descriptor that is written to when a compile ends.
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
from weft.grammar.guarded import Backend, GuardedCompiler
from weft.grammar.registry import make_compiler
from weft.grammar.service import GrammarService
from weft.text.model import TextModel
from weft.types.grammar import Grammar
from weft.types.messages import Submit, TokenEvent

log = get_logger(__name__)

AWAIT_S = 60.0
"""Seconds that a sequence awaits its grammar at most. A compiler's own deadline is well before."""


class Compile(Protocol):
    """A compile under way, or done."""

    def done(self) -> bool:
        """Whether ``result`` returns at once: also once its deadline has passed."""

    def result(self) -> CompiledGrammar:
        """Raises WeftError: what is wrong with the grammar, or that it took too long."""


class Compiler(Protocol):
    """Compiles grammars for the model of this engine, in threads."""

    @property
    def end_ids(self) -> Iterable[int]:
        """Ids that its masks allow where a grammar may end."""

    def submit(self, grammar: Grammar, ring: Callable[[], None], client: int) -> Compile:
        """Begins for ``client``; never waits. ``ring`` is called, from any thread, when it has ended, if not
        in time."""

    def close(self) -> None:
        """Takes no more. Does not wait."""


class GrammarSource:
    """The ``AwaitedSource`` of grammars. Used from the thread that steps."""

    def __init__(self, make: Callable[[], Compiler]) -> None:
        """``make`` is called for the first grammar."""
        self._make = make
        self._compiler: Compiler | None = None
        self._pending: dict[int, Compile] = {}
        """By sequence."""
        self._bell = -1
        self._lock = threading.Lock()
        self._closed = False
        self._rung = False
        self.compiled = 0
        """Grammars compiled, or found compiled, for a sequence."""

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._own_bell(),)

    def open(self, submit: Submit, scheduler: StepScheduler) -> list[TokenEvent]:
        """Begins to compile the grammar of a sequence that was added. Returns the sequence's end, if it is of
        no use; what was compiled before is there at once.
        """
        assert submit.grammar is not None
        compiler = self._compiler = self._compiler or self._make()
        self._own_bell()
        self._pending[submit.sequence] = compiler.submit(submit.grammar, self._ring, submit.client)
        return self._settle(submit.sequence, scheduler)

    def forget(self, sequence: int) -> None:
        """The sequence has ended. Unknown ones are fine."""
        self._pending.pop(sequence, None)

    def take(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """What has been compiled goes to the scheduler. Cheap while nothing is."""
        if self._rung:  # also for what was settled before it rang: else an idle loop would never sleep
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        if not self._pending:
            return []
        return [event for sequence in list(self._pending) for event in self._settle(sequence, scheduler)]

    def asked(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """The scheduler asks for no grammar: it is told with the Submit."""
        return []

    def close(self) -> None:
        """Drops what is under way."""
        self._pending.clear()
        with self._lock:
            self._closed = True
            if self._bell >= 0:
                os.close(self._bell)
        if self._compiler is not None:
            self._compiler.close()

    def _settle(self, sequence: int, scheduler: StepScheduler) -> list[TokenEvent]:
        compile_ = self._pending[sequence]
        if not compile_.done():
            return []
        del self._pending[sequence]
        assert self._compiler is not None
        try:
            matcher = compile_.result().matcher()
        except Exception as error:  # a compiler is another library's: it ends one sequence, and nothing else
            known = error if isinstance(error, WeftError) else EngineDead("the grammar could not be compiled")
            if known is not error:
                log.exception("a grammar could not be compiled")
            return scheduler.fail(sequence, known.info())
        self.compiled += 1
        return scheduler.constrain(sequence, matcher, self._compiler.end_ids)

    def _own_bell(self) -> int:
        if self._bell < 0:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._bell

    def _ring(self) -> None:
        with self._lock:  # a compile may end after this source
            if not self._closed:
                os.eventfd_write(self._bell, 1)
                self._rung = True


class ModelGrammars:
    """The ``Compiler`` of one model: its tokenizer, and the backend of ``--grammar-backend``.

    The backend is made with the first grammar, in the thread that compiles: reading a tokenizer's tokens
    takes a second, which servers without grammars do not pay.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.end_ids: tuple[int, ...] = ()
        """Once something was compiled."""
        seconds = config.grammar.grammar_compile_timeout
        self._compiler = GuardedCompiler(self._backend, seconds, _made)
        self._service = GrammarService(self._compiler, timeout=seconds, apart=True)

    def submit(self, grammar: Grammar, ring: Callable[[], None], client: int = 0) -> Compile:
        made = self._service.submit(grammar, client)
        if not made.done():
            made.when_ended(ring)
        return made

    def close(self) -> None:
        self._service.close()
        self._compiler.close()

    def _backend(self) -> Backend:
        spec, folder = self._config.spec, str(self._config.tokenizer_path)
        self.end_ids = tuple(sorted({*TextModel.load(folder).end_ids, *spec.eos_ids}))
        name = self._config.grammar.grammar_backend
        return Backend(name=name, tokenizer=folder, vocab_size=spec.vocab_size, end_ids=self.end_ids)


def _made(backend: Backend) -> GrammarCompiler:
    return make_compiler(backend.name, backend.tokenizer, backend.vocab_size, backend.end_ids)
