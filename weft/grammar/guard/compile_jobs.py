"""Compile grammars outside the step loop: bounded cache, deadlines, and compile threads shared fairly by
clients.

    submit ──► cache ──► one queue per client ──► a thread, round robin ──► every waiter's Compile ends

A compile runs in a thread. ``MAX_RUNNING`` compiles run at a time, at most ``CLIENT_RUNNING`` of them for one
client. Slow grammars of one client therefore do not delay the grammars of another client. Equal grammars
compile once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from weft.common.clock import Clock, SystemClock
from weft.common.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, WeftError
from weft.common.log import get_logger
from weft.grammar.base import CompiledGrammar, Compiler
from weft.grammar.guard.stack import with_stack
from weft.types.grammar import Grammar

_log = get_logger(__name__)

MAX_RUNNING = 3
"""Maximum concurrent compiles."""
CLIENT_RUNNING = 2
"""Maximum concurrent compiles of one client."""
MAX_WAITING = 1024
"""Maximum unfinished compiles of all clients, running compiles included."""
CLIENT_WAITING = 512
"""Maximum queued compiles of one client."""
MAX_ENTRIES = 256
MAX_CACHE_BYTES = 32 << 20
"""Maximum bytes of the cache: sources and compiled grammars."""


class Compile:
    """A running or finished compile for one request. Thread-safe; made by ``submit``."""

    def __init__(self, clock: Clock, deadline: float) -> None:
        """``deadline``: seconds on ``clock``; from then on the compile is done without a result."""
        self._clock = clock
        self._deadline = deadline
        self._ended = threading.Event()
        self._compiled: CompiledGrammar | None = None
        self._error: WeftError | None = None
        self._calls: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Return True if ``result`` returns at once: finished, or past the deadline. Never blocks."""
        return self._ended.is_set() or self._clock.now() >= self._deadline

    def result(self) -> CompiledGrammar:
        """Return the compiled grammar. Call only if ``done``.

        Raises InvalidRequest (400) for a grammar the backend cannot enforce or that costs too much. Raises
        DeadlineExceeded (504) after the deadline, Overloaded (429) if this client has too many grammars
        waiting, and Unavailable (503) if all clients together have too many or the server is stopping.
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
        """Block until the compile ends or the deadline passes. Then return or raise like ``result``."""
        while not self._ended.is_set() and (left := self.left):
            self._ended.wait(left)
        return self.result()

    def end(self, compiled: CompiledGrammar | None, error: WeftError | None) -> None:
        """Store the result. Only the service calls this method, and ``call_back`` afterwards."""
        self._compiled = compiled
        self._error = error
        self._ended.set()

    def call_back(self) -> None:
        """Call the callbacks. The service holds no lock: a callback may use the service."""
        for call in list(self._calls):
            call()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` from any thread once there is a result; immediately if the compile has already ended.

        In a race, ``call`` may be called twice.
        """
        # Append before the check: otherwise an end between the two would be missed.
        self._calls.append(call)
        if self._ended.is_set():
            call()

    @property
    def nbytes(self) -> int:
        """Current bytes of the compiled grammar."""
        return 0 if self._compiled is None else self._compiled.nbytes

    @property
    def spent(self) -> bool:
        """True if further outputs need a newly compiled grammar."""
        return self._compiled is not None and self._compiled.spent

    @property
    def late(self) -> bool:
        """True if the deadline passed without a result."""
        return not self._ended.is_set() and self._clock.now() >= self._deadline


_Key: TypeAlias = tuple[int, bytes]
"""(client, or 0 if clients share compiled grammars; source)."""


class _Work:
    """One grammar to compile, and all waiting requests."""

    def __init__(self, key: _Key, grammar: Grammar) -> None:
        """``key``: the key of the cache, see ``submit``."""
        self.key = key
        self.grammar = grammar
        self.waiters: list[Compile] = []
        self.clients: set[int] = set()
        """Clients with this work in their queues."""
        self.taken = False
        """True once a thread compiles the grammar."""

    @property
    def wanted(self) -> bool:
        """True if no thread compiles the grammar and at least one waiter is in time."""
        return not self.taken and not all(waiter.late for waiter in self.waiters)


class GrammarService:
    """Compiles grammars for one model. Thread-safe. The owner must call ``close``."""

    def __init__(
        self,
        compiler: Compiler,
        *,
        timeout: float,
        per_client: bool = False,
        clock: Clock | None = None,
        entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        """``timeout``: seconds from ``submit`` to the deadline of a compile. ``per_client``: clients do not
        share compiled grammars, so that the outputs of one client cannot fill the lexer of another client.
        ``entries``: maximum number of cached results. ``max_bytes``: maximum bytes of the cache.
        """
        self._compiler: Final = compiler
        self._timeout = timeout
        self._per_client = per_client
        self._clock = clock or SystemClock()
        self._entries = entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Compile] = OrderedDict()
        """Results by source, refusals included. The least recently used result is first."""
        self._unfinished: dict[_Key, _Work] = {}
        self._queues: OrderedDict[int, deque[_Work]] = OrderedDict()
        """Non-empty queues by client. The client with the next turn is first."""
        self._running: dict[int, int] = {}
        """Number of running compiles by client."""
        self._closed = False

    @property
    def cached(self) -> tuple[int, int]:
        """Return (cache entries, bytes of the cache)."""
        with self._lock:
            return len(self._cache), self._size()

    def submit(self, grammar: Grammar, client: int = 0) -> Compile:
        """Start a compile of ``grammar`` for ``client``, or return the cached result.

        Never blocks.

        Equal grammars share one compile. Errors of the grammar, and refusals beyond the limits, are raised by
        ``Compile.result``, not here.
        """
        key = (client if self._per_client else 0, msgspec.msgpack.encode(grammar))
        with self._lock:
            found = self._find(key)
            if found is not None:
                return found
            task = Compile(self._clock, self._clock.now() + self._timeout)
            work = self._unfinished.get(key)
            refusal = self._refusal(client) if work is None or client not in work.clients else None
            if refusal is not None:
                task.end(None, refusal)
                return task
            if work is None:
                work = self._unfinished[key] = _Work(key, grammar)
            work.waiters.append(task)
            if client not in work.clients and not work.taken:
                # Queue the work also for this client: the queue of the other client may be long.
                work.clients.add(client)
                self._queues.setdefault(client, deque()).append(work)
            self._start_threads()
        return task

    def compile(self, grammar: Grammar, client: int = 0) -> CompiledGrammar:
        """Compile and wait until the deadline. Raises like ``Compile.result``."""
        return self.submit(grammar, client).wait()

    def close(self) -> None:
        """End all waiting compiles with Unavailable. Does not wait for running threads. Idempotent."""
        with self._lock:
            self._closed = True
            waiters = [task for work in self._unfinished.values() for task in work.waiters]
            for task in waiters:
                task.end(None, Unavailable("the server is stopping"))
            self._queues.clear()
            self._cache.clear()
            self._unfinished.clear()
        for task in waiters:
            task.call_back()

    def _find(self, key: _Key) -> Compile | None:
        """Return a cached result, or None.

        The result becomes the most recently used. A spent grammar leaves the cache.
        """
        found = self._cache.get(key)
        if found is None:
            return None
        if found.spent:
            del self._cache[key]
            return None
        self._cache.move_to_end(key)
        return found

    def _refusal(self, client: int) -> WeftError | None:
        """Return the error for a new compile beyond the limits: Overloaded for this client, Unavailable for
        all clients or after ``close``.

        Return None if the compile may start. The lock must be held.
        """
        if self._closed:
            return Unavailable("the server is stopping")
        if len(self._queues.get(client, ())) >= CLIENT_WAITING:
            return Overloaded(
                "too many of your grammars wait to be compiled; try again later", code="grammar_overload"
            )
        if len(self._unfinished) >= MAX_WAITING:
            return Unavailable(
                "too many grammars wait to be compiled; try again later", code="grammar_overload"
            )
        return None

    def _start_threads(self) -> None:
        """Start threads for queued work, up to the limits. The lock must be held."""
        while (taken := self._next()) is not None:
            thread = threading.Thread(target=self._run, args=taken, daemon=True, name="weft-grammar")
            with_stack(thread)

    def _next(self) -> tuple[_Work, int] | None:
        """Take the next work from the queues and return the work and its client; the work then counts as
        running.

        Return None at the limit or without queued work. Work without waiters is dropped. The lock must
        be held.
        """
        if sum(self._running.values()) >= MAX_RUNNING:
            return None
        for client in list(self._queues):
            if self._running.get(client, 0) >= CLIENT_RUNNING:
                continue
            queue = self._queues[client]
            while queue:
                work = queue.popleft()
                if work.wanted:
                    work.taken = True
                    self._running[client] = self._running.get(client, 0) + 1
                    # Round robin: a client whose work starts goes to the end.
                    if queue:
                        self._queues.move_to_end(client)
                    else:
                        del self._queues[client]
                    return work, client
                if self._unfinished.get(work.key) is work and not work.taken:
                    del self._unfinished[work.key]  # no waiter is left
            del self._queues[client]
        return None

    def _run(self, work: _Work, client: int) -> None:
        """Compile until no work is left: the body of a thread. At most ``MAX_RUNNING`` such threads run."""
        current: tuple[_Work, int] | None = (work, client)
        while current is not None:
            work, client = current
            compiled, error = self._compile(work.grammar)
            with self._lock:
                self._running[client] -= 1
                if not self._running[client]:
                    del self._running[client]
                waiters = [] if self._closed else work.waiters  # `close` has ended the waiters
                if waiters:
                    self._end(work, compiled, error)
                current = self._next()
                self._start_threads()
            for task in waiters:
                task.call_back()

    def _compile(self, grammar: Grammar) -> tuple[CompiledGrammar | None, WeftError | None]:
        """Return (compiled grammar, None) or (None, error).

        Unexpected errors are logged. Nothing is raised.
        """
        try:
            return self._compiler.compile(grammar), None
        except WeftError as refused:
            return None, refused
        except BaseException as unexpected:
            # A panic of the backend is a BaseException, and a thread has no caller to raise to.
            _log.error("compiling a grammar failed: %s: %s", type(unexpected).__name__, unexpected)
            return None, WeftError("the grammar could not be compiled")

    def _end(self, work: _Work, compiled: CompiledGrammar | None, error: WeftError | None) -> None:
        """Store a result for all waiters and cache the result. Errors except InvalidRequest are not
        cached. The lock must be held."""
        self._unfinished.pop(work.key, None)
        for task in work.waiters:
            task.end(compiled, error)
        if compiled is None and not isinstance(error, InvalidRequest):
            return
        self._cache[work.key] = work.waiters[0]
        # Sizes grow with use, so the sum is computed anew.
        size = self._size()
        while len(self._cache) > self._entries or size > self._max_bytes:
            key, old = self._cache.popitem(last=False)
            size -= len(key[1]) + old.nbytes

    def _size(self) -> int:
        return sum(len(key[1]) + found.nbytes for key, found in self._cache.items())
