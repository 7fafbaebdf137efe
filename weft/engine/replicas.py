"""Several replicas of a model as one engine, for callers in this process: a head process for each.

The heads are those of ``weft serve``, and so are the messages; only HTTP and text are missing in between.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from weft.common import env, signals
from weft.common.errors import ConfigError, EngineDead, Overloaded, WeftError
from weft.common.folder import private_folder
from weft.common.log import get_logger
from weft.config.gpus import gpu_environment, head_rank
from weft.config.hosts import uses_board
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.parallel.remote import REFUSED, RemoteHead, RemoteHeads
from weft.routing.ledger import Ledger
from weft.routing.policy import Policy, PrefixAffinity
from weft.routing.registry import Registry
from weft.types import messages as m

log = get_logger(__name__)

LOAD_S = 3600.0
"""Seconds that living heads may take to load their models."""
SILENCE_S = 120.0
"""Seconds without a heartbeat, which leaves a head between its steps, after which it counts as dead."""
POLL_MS = 100
ANSWER_S = 10.0
CLOSE_S = 5.0


def start_engine(config: EngineConfig) -> EngineCore | Replicas:
    """The engine of ``config`` in this process, or of its replicas behind this process. See both."""
    return EngineCore(config) if config.parallel.data_parallel_size == 1 else Replicas(config)


class _Head:
    """One head process, and the link to it."""

    def __init__(self, process: subprocess.Popen[bytes] | RemoteHead, socket: zmq.Socket[bytes]) -> None:
        self.process, self.socket = process, socket
        self.reached = False
        self.welcome: m.Welcome | None = None
        self.stats = m.HeadStats()
        self.beats = 0
        self.heard = time.monotonic()

    def reach(self, endpoint: str | None) -> None:
        """Connects once it is known where, and says hello."""
        if endpoint is not None and not self.reached:
            self.reached = True
            self.socket.connect(endpoint)
            self.send(_hello())

    def send(self, message: m.ToHead) -> None:
        """Raises EngineDead when it does not read."""
        try:
            self.socket.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDead("a replica does not read what it is sent") from None

    def dead(self) -> str | None:
        """Why it counts as dead, whatever it does."""
        status = self.process.poll()
        if status is not None:
            return f"a replica's process ended with status {status}"
        return None

    def silent(self) -> str | None:
        """Why one that works counts as dead."""
        if time.monotonic() - self.heard <= SILENCE_S:
            return None
        return f"a replica has been silent for {SILENCE_S:g} seconds"


class Replicas:
    """What ``EngineCore`` is to those who submit, step and finish. Not thread-safe.

    A replica that shares no experts may die: its sequences go on elsewhere. With any other ends the engine.
    """

    def __init__(self, config: EngineConfig, policy: Policy | None = None) -> None:
        """Starts all heads and waits until they have loaded. Raises ConfigError, and EngineDead."""
        count = config.parallel.data_parallel_size
        self.config = config
        self._shared = config.parallel.enable_expert_parallel
        self._policy = policy or PrefixAffinity()
        self._registry, self._ledger = Registry(count), Ledger()
        self._requests: dict[int, list[int]] = {}
        """Request -> head, and how many of its sequences are open."""
        self._request_of: dict[int, int] = {}
        self._capacity = config.scheduler.max_num_seqs + config.scheduler.max_queued_requests
        self._folder = private_folder()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        # The kernel ties a child's life to the thread that made it: to one that lives as long as this.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-heads")
        self._heads: list[_Head] = []
        self._remote: RemoteHeads | None = None
        self._kept: list[m.TokenEvent] = []
        """Events that came while something else was waited for."""
        try:
            self._remote = RemoteHeads(config) if uses_board(config.parallel) else None
            for replica in range(count):
                self._heads.append(self._start(replica))
            self._await_welcomes()
        except BaseException:
            self.close()
            raise

    # ---- what EngineCore has

    @property
    def deterministic(self) -> bool:
        """See ``EngineCore.deterministic``."""
        return all(head.welcome is not None and head.welcome.deterministic for head in self._heads)

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        """Sends a sequence to a replica. What is wrong with it comes as an event.

        Raises Overloaded when every replica's queue is full.
        """
        if self._capacity * len(self._registry.up()) <= len(self._ledger):
            raise Overloaded("every replica's queue is full; try again later")
        self._ledger.open(submit)
        try:
            self._send(submit)
        except WeftError:
            self._forget(submit.sequence)
            raise
        return []

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        """Ends a sequence wherever it is. Idempotent; nothing more is heard of it."""
        home = self._registry.home(sequence)
        if home is not None:
            self._forget(sequence)
            self._heads[home].send(m.Finish(sequence=sequence))
        return []

    def has_work(self) -> bool:
        """Whether sequences are open."""
        return len(self._ledger) > 0

    def step(self) -> list[m.TokenEvent]:
        """What came from replicas; waits a moment for it. Raises EngineDead."""
        events = self._receive(POLL_MS)
        for number, head in enumerate(self._heads):
            instance = self._registry.instances[number]
            reason = head.dead() or (head.silent() if instance.open else None)
            if instance.up and reason is not None:
                events += self._lose(number, reason)
        return events

    def stats(self) -> m.HeadStats:
        """All replicas' counters and gauges, asked for now; of fill levels the highest."""
        asked = {}
        for number, head in enumerate(self._heads):
            if self._registry.instances[number].up:
                asked[number] = head.beats
                head.send(_hello())
        until = time.monotonic() + ANSWER_S
        while any(self._heads[n].beats == beats for n, beats in asked.items()):
            if time.monotonic() > until:
                raise EngineDead("a replica does not say how it is")
            self._kept += self._receive(POLL_MS)
        return summed([head.stats for head in self._heads])

    def welcome(self, incarnation: int) -> m.Welcome:
        """What a front must know of this engine."""
        welcomes = [head.welcome for head in self._heads if head.welcome is not None]
        least = min(welcomes, key=lambda welcome: welcome.max_model_len)
        return msgspec.structs.replace(least, incarnation=incarnation)

    def close(self) -> None:
        """Has every head end, and ends those that do not."""
        for head in self._heads:
            try:
                if head.reached:
                    head.send(m.Shutdown())
            except WeftError as error:
                log.warning("while closing: %s", error.message)
        until = time.monotonic() + CLOSE_S
        for head in self._heads:
            if isinstance(head.process, RemoteHead):  # it is told twice: its host is, too
                head.socket.close(linger=500)
                continue
            try:
                head.process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                head.process.kill()
                head.process.wait()
            head.socket.close(linger=0)
        self._heads = []
        if self._remote is not None:
            self._remote.close(CLOSE_S)
            self._remote = None
        self._context.destroy(linger=0)
        self._maker.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- heads

    def _start(self, replica: int) -> _Head:
        socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)  # what is under way is bounded by what is open
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        self._poller.register(socket, zmq.POLLIN)
        if self._remote is not None and replica in self._remote:
            self._remote.keys.guard_rank(socket)
            return _Head(self._remote.start(replica), socket)
        endpoint = f"ipc://{self._folder}/head{replica}"
        config = msgspec.structs.replace(self.config, replica=replica, domain=str(self._folder))
        head = _Head(self._maker.submit(_spawn, config, endpoint).result(60.0), socket)
        head.reach(endpoint)
        return head

    def _await_welcomes(self) -> None:
        until = time.monotonic() + LOAD_S
        while waiting := [head for head in self._heads if head.welcome is None]:
            self._receive(POLL_MS)
            for head in waiting:
                if isinstance(head.process, RemoteHead):
                    head.reach(head.process.endpoint())
                if (reason := head.dead()) is not None:
                    why = f"{reason} before it was ready; see its log"
                    raise ConfigError(why) if head.process.poll() == REFUSED else EngineDead(why)
            if time.monotonic() > until:
                raise EngineDead("a replica did not start in time")
        for instance in self._registry.instances:
            instance.up = True

    def _receive(self, wait_ms: int) -> list[m.TokenEvent]:
        events, self._kept = self._kept, []
        ready = dict(self._poller.poll(0 if events else wait_ms))
        for number, head in enumerate(self._heads):
            while head.socket in ready:
                try:
                    message = m.decode_to_front(head.socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                head.heard = time.monotonic()
                events += self._take(number, head, message)
        return events

    def _take(self, number: int, head: _Head, message: m.ToFront) -> list[m.TokenEvent]:
        if isinstance(message, m.Tokens):
            return [fresh for event in message.events if (fresh := self._note(event)) is not None]
        if isinstance(message, m.Heartbeat):
            head.stats, head.beats = message.stats, head.beats + 1
        elif isinstance(message, m.Welcome):
            head.welcome = message
        elif self._registry.instances[number].up:
            return self._lose(number, message.error.message)
        else:
            raise EngineDead(message.error.message)
        return []

    def _note(self, event: m.TokenEvent) -> m.TokenEvent | None:
        fresh = self._ledger.take(event)
        if event.token_ids:
            self._registry.computed(event.sequence)
        if event.finish is not None:
            self._forget(event.sequence)
        return fresh

    def _lose(self, number: int, reason: str) -> list[m.TokenEvent]:
        """A replica is gone: its sequences go on elsewhere. Raises EngineDead where they cannot."""
        instance = self._registry.instances[number]
        instance.up = False
        log.error("replica %d is lost: %s", number, reason)
        if self._shared or not self._registry.up():
            raise EngineDead(reason)
        events = []
        for sequence in list(instance.open):
            request = self._request_of.get(sequence)
            if request is not None and self._requests[request][0] == number:
                self._requests[request][0] = -1
            try:
                self._send(self._ledger.again(sequence))
            except WeftError as error:
                self._forget(sequence)
                events.append(m.TokenEvent(sequence=sequence, finish="error", error=error.info()))
        return events

    def _send(self, submit: m.Submit) -> None:
        """To the head that has the prompt's other sequences, or that the policy names."""
        known = self._requests.get(submit.request)
        if known is None or known[0] < 0:
            up = self._registry.up()
            number = self._policy.choose(up, submit.prompt_ids, submit.salt, 1).number
            tokens = len(submit.prompt_ids) // 4
        else:
            number, tokens = known[0], 0
        if not self._registry.instances[number].open:  # it had no reason to speak
            self._heads[number].heard = time.monotonic()
        self._heads[number].send(submit)
        if known is None:
            known = self._requests[submit.request] = [number, 0]
        known[0] = number
        if submit.sequence not in self._request_of:
            self._request_of[submit.sequence] = submit.request
            known[1] += 1
        self._registry.begin(number, submit.sequence, tokens)

    def _forget(self, sequence: int) -> None:
        self._ledger.close(sequence)
        self._registry.end(sequence)
        request = self._request_of.pop(sequence, None)
        if request is not None:
            known = self._requests[request]
            known[1] -= 1
            if not known[1]:
                del self._requests[request]


def _hello() -> m.Hello:
    return m.Hello(versions=(m.VERSION, m.VERSION), front=secrets.token_hex(8), quiet=True)


def _spawn(config: EngineConfig, endpoint: str) -> subprocess.Popen[bytes]:
    level = logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower()
    command = [sys.executable, "-m", "weft.launch.head_main", str(os.getpid()), endpoint, level]
    environment = env.child_environment(**gpu_environment(config, head_rank(config)))
    with signals.blocked():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(config))
    except BrokenPipeError:  # it died before it read its configuration; its status will tell
        pass
    return process


def summed(stats: Sequence[m.HeadStats]) -> m.HeadStats:
    """Of all heads: sums, element by element in tuples, and the highest fill level."""
    made = {}
    for name in m.HeadStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name == "kv_usage":
            made[name] = max(values)
        elif isinstance(values[0], tuple):
            longest = max(map(len, values))
            padded = [value + (0,) * (longest - len(value)) for value in values]
            made[name] = tuple(map(sum, zip(*padded, strict=True)))
        else:
            made[name] = sum(values)
    return m.HeadStats(**made)
