"""Compiles grammars beside the loop that needs them: bounded cache, deadline, one compile a source.

A compile runs in a thread. One that is not done by its deadline is abandoned: whoever waits is told so, and
the thread ends when the backend's own limits end it. While ``MAX_ABANDONED`` such threads run, nothing new is
compiled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from weft.common.clock import Clock, SystemClock
from weft.common.errors import DeadlineExceeded, InvalidRequest, Unavailable, WeftError
from weft.common.log import get_logger
from weft.grammar.base import CompiledGrammar, GrammarCompiler
from weft.types.grammar import Grammar

_log = get_logger(__name__)

THREADS = 2
"""Compiles at a time, but for abandoned ones."""
MAX_ABANDONED = 4
STACK_BYTES = 256 << 20
"""Of a compiling thread: backends recurse over rules, and an overflow would end the process. Only what is
used of it takes memory."""
MAX_WAITING = 512
"""Compiles that wait for a thread."""
MAX_ENTRIES = 256
MAX_KEPT_BYTES = 8 << 20
"""Of the sources of compiled grammars; what a grammar takes compiled is bounded by the backend's limits."""


class Compile:
    """A compile under way, or done. Thread-safe; made by ``submit``, shared by equal sources."""

    def __init__(self, clock: Clock, deadline: float) -> None:
        self._clock = clock
        self._deadline = deadline
        self._ended = threading.Event()
        self._compiled: CompiledGrammar | None = None
        self._error: WeftError | None = None
        self._calls: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether ``result`` returns at once. True too once the deadline has passed. Never blocks."""
        return self._ended.is_set() or self._clock.now() >= self._deadline

    def result(self) -> CompiledGrammar:
        """The compiled grammar; to be called when ``done``.

        Raises InvalidRequest (400) for a grammar that the backend cannot hold to, DeadlineExceeded (504)
        when the compile took too long, Unavailable (503) when too many abandoned compiles still run.
        """
        if self._error is not None:
            error = self._error
            raise type(error)(error.message, param=error.param, code=error.error_code)
        if self._compiled is None:
            raise DeadlineExceeded(
                "the grammar was not compiled in time; make the schema or pattern smaller, or raise "
                "--grammar-compile-timeout",
                code="grammar_timeout",
            )
        return self._compiled

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - self._clock.now(), 0.0)

    def wait(self) -> CompiledGrammar:
        """``result``, when there is one."""
        while not self._ended.is_set() and (left := self.left):
            self._ended.wait(left)
        return self.result()

    def end(self, compiled: CompiledGrammar | None, error: WeftError | None) -> None:
        """For the service: this is the result."""
        self._compiled = compiled
        self._error = error
        self._ended.set()
        for call in list(self._calls):
            call()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Has ``call`` called, from any thread, once there is a result; at once, or twice, if there is
        one.
        """
        self._calls.append(call)
        if self._ended.is_set():
            call()

    @property
    def late(self) -> bool:
        """Whether the deadline passed without a result."""
        return not self._ended.is_set() and self._clock.now() >= self._deadline


_Work: TypeAlias = tuple[bytes, Grammar, Compile]
"""A grammar by its key, and who waits for it."""


class GrammarService:
    """Compiles for one model. Thread-safe. The owner calls ``close``."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        timeout: float,
        clock: Clock | None = None,
        entries: int = MAX_ENTRIES,
        kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._compiler: Final = compiler
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._entries = entries
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Compile] = OrderedDict()
        """Results by source, refusals too; the one that was used longest ago first."""
        self._bytes = 0
        self._under_way: dict[bytes, Compile] = {}
        """Waiting or in a thread, abandoned ones until their threads end."""
        self._waiting: deque[_Work] = deque()
        self._running: set[Compile] = set()
        self._closed = False

    @property
    def backend(self) -> str:
        """Name of the backend that compiles."""
        return self._compiler.name

    @property
    def abandoned(self) -> int:
        """Threads whose compile is past its deadline."""
        with self._lock:
            return self._count_late()

    @property
    def kept(self) -> tuple[int, int]:
        """Entries of the cache, and bytes of their sources."""
        with self._lock:
            return len(self._kept), self._bytes

    def submit(self, grammar: Grammar) -> Compile:
        """Starts to compile ``grammar``, or takes it from the cache. Never blocks, never raises for what the
        grammar says: ``result`` does."""
        key = msgspec.msgpack.encode(grammar)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            found = self._under_way.get(key)
            if found is not None:
                return found
            task = Compile(self._clock, self._clock.now() + self._timeout)
            refusal = self._refusal()
            if refusal is not None:
                task.end(None, refusal)
                return task
            self._under_way[key] = task
            self._waiting.append((key, grammar, task))
            self._start_threads()
        return task

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles, and waits for it up to the deadline."""
        return self.submit(grammar).wait()

    def close(self) -> None:
        """Takes no more; does not wait for threads that compile."""
        with self._lock:
            self._closed = True
            for _, _, task in self._waiting:
                task.end(None, Unavailable("the server is stopping"))
            self._waiting.clear()
            self._kept.clear()
            self._under_way.clear()
            self._bytes = 0

    def _refusal(self) -> WeftError | None:
        if self._closed:
            return Unavailable("the server is stopping")
        if self._count_late() >= MAX_ABANDONED:
            return Unavailable(
                "too many grammars that take too long are being compiled; try again later",
                code="grammar_overload",
            )
        if len(self._waiting) >= MAX_WAITING:
            return Unavailable(
                "too many grammars wait to be compiled; try again later", code="grammar_overload"
            )
        return None

    def _count_late(self) -> int:
        return sum(task.late for task in self._running)

    def _start_threads(self) -> None:
        """As many threads as there is work for. Under the lock."""
        while (work := self._next()) is not None:
            _start(threading.Thread(target=self._run, args=work, daemon=True))

    def _next(self) -> _Work | None:
        """What a thread is to compile now; None where enough of them do. Under the lock."""
        late = self._count_late()
        while self._waiting and late < MAX_ABANDONED and len(self._running) - late < THREADS:
            work = self._waiting.popleft()
            key, _, task = work
            if not task.late:
                self._running.add(task)
                return work
            self._under_way.pop(key, None)
        return None

    def _run(self, *work: *_Work) -> None:
        """A thread: goes on as long as there is work, so that threads are no more than what they compile."""
        going: _Work | None = work
        while going is not None:
            key, grammar, task = going
            compiled, error = self._compile(grammar)
            with self._lock:
                late = task.late
                self._running.discard(task)
                self._under_way.pop(key, None)
                task.end(compiled, error)
                if not self._closed and (compiled is not None or isinstance(error, InvalidRequest)):
                    self._keep(key, task)
                going = self._next()
                self._start_threads()
            if late:
                _log.warning("a grammar was compiled after its deadline")

    def _compile(self, grammar: Grammar) -> tuple[CompiledGrammar | None, WeftError | None]:
        try:
            return self._compiler.compile(grammar), None
        except WeftError as refused:
            return None, refused
        except BaseException as unexpected:
            # a backend's panic is a BaseException; the thread has no caller to pass it on to
            _log.error("compiling a grammar failed: %s: %s", type(unexpected).__name__, unexpected)
            return None, WeftError("the grammar could not be compiled")

    def _keep(self, key: bytes, task: Compile) -> None:
        self._kept[key] = task
        self._bytes += len(key)
        while len(self._kept) > self._entries or self._bytes > self._kept_bytes:
            old, _ = self._kept.popitem(last=False)
            self._bytes -= len(old)


_stack_lock = threading.Lock()


def _start(thread: threading.Thread) -> None:
    """Starts ``thread`` with a stack of ``STACK_BYTES``; the size is a setting of the process, put back."""
    thread.name = "weft-grammar"
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
