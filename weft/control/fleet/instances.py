"""An instance (an engine process and its group) as seen by one API server: state, load and progress.

Load is counted in sequences. An open sequence counts 1. Prompt tokens count extra until the prompt is
computed, so an instance with one long prompt gets no second one meanwhile. Heartbeats report all sequences of
the instance; the part beyond the API server's own sequences is the load of other API servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from weft.common.errors import ErrorInfo
from weft.control.fleet.prefix_index import PrefixView
from weft.types.adapters import AdapterChanged
from weft.types.handshake import EngineIdentity
from weft.types.messages import EngineStats, Heartbeat, Role, Welcome
from weft.types.weights import WeightsChanged, prefix_name

PROMPT_TOKENS = 256
"""Uncomputed prompt tokens that weigh as much as one running sequence."""


class InstanceState(Enum):
    """
    starting ──Welcome──► up ──Draining──► draining ──Undrained──► up or half_open
       ▲                  ▲│ lost            │ lost
       │Expected  healthy ││                 ▼
      down ◄──────────────┼┴──────────────── ·        half_open: died twice in a row; gets one prompt
       │ Retired          half_open ◄─ Welcome        at a time until a sequence ends well
       ▼
     retired ──Expected, revived by an operator──► starting

    ``Left`` drains an instance in any state. The instance is forgotten after its last open sequence.
    """

    STARTING = "starting"
    UP = "up"
    HALF_OPEN = "half_open"
    DRAINING = "draining"
    DOWN = "down"
    RETIRED = "retired"


GONE = (InstanceState.DOWN, InstanceState.RETIRED)
SERVING = (InstanceState.UP, InstanceState.HALF_OPEN)
"""The states in which an instance takes sequences."""
ALIVE = (InstanceState.UP, InstanceState.HALF_OPEN, InstanceState.DRAINING)


@dataclass(slots=True)
class Instance:
    """One replica, as known to a fleet. Times are seconds of the fleet's clock."""

    name: str
    expert_group: str = ""
    """Expert-parallel group; the instances of a group work together or not at all. "" means no group."""
    order: int = 0
    """Position in the list of instances. The first of several equally loaded instances is chosen."""
    state: InstanceState = InstanceState.STARTING
    link: int = -1
    """The connection to the present process."""
    identity: EngineIdentity | None = None
    """Identity of the expected process, if the owner knows the identity."""
    welcome: Welcome | None = None
    """The answer of the present process; None before the answer."""
    role: Role | None = None
    """Role of the latest process that answered; None before the first answer."""
    stats: EngineStats = field(default_factory=EngineStats)
    open: dict[int, int] = field(default_factory=dict)
    """Open sequence of the API server -> prompt tokens still to be computed."""
    prompt_tokens: int = 0
    """The sum of the values of ``open``."""
    elsewhere: int = 0
    """Sequences of other API servers, by the last heartbeat."""
    chosen: int = 0
    """Number of sequences sent to the instance so far."""
    deaths: int = 0
    """Deaths in a row, since the instance was last healthy."""
    since: float = -math.inf
    """Time at which the instance last came up."""
    heard: float = math.inf
    """Time of the last message; inf before the first."""
    moved: float = math.inf
    """Time of the last proof of progress: a changed step counter, or an idle heartbeat."""
    deadline: float = math.inf
    """During the start: latest time for the process to listen and, afterwards, to answer."""
    located: bool = False
    """True if the address of the present process, or a connection to it, is known. An absent host stays
    False."""
    listens: bool = False
    shunned: bool = False
    """True if no sequences are sent: another instance reported the end of the process, or no connection
    works."""
    fresh: bool = False
    """True from ``Joined`` until the first answer or the first loss: the server is complete without the
    instance."""
    leaving: bool = False
    """True after ``Left``: the instance finishes the open sequences and is then forgotten."""
    watched: bool = False
    """True if the present process was asked to report cached prefixes."""
    lonely: bool = False
    """True if the missing partner of the present process was already logged."""
    prefixes: PrefixView = field(default_factory=PrefixView)
    """Cached prefixes of the present process, as reported."""
    adapters: dict[str, ErrorInfo | None] = field(default_factory=dict)
    """Digest of a LoRA adapter -> the reason why the present process did not load the adapter; None after
    success."""
    weights: int = 0
    """Version of the weights of the present process."""
    weights_name: bytes = b""
    """Name of these weights in the hashes of prefixes, see ``prefix_name``."""
    weights_answer: WeightsChanged | None = None
    """Last answer of the present process about weights."""
    pause: str = ""
    """The latest state of the pause at the present process, and who is behind: see ``Welcome``."""
    behind: tuple[str, ...] = ()
    loading: set[str] = field(default_factory=set)
    """Digests of LoRA adapters sent to the present process, without an answer yet."""

    @property
    def alive(self) -> bool:
        """True if the instance answers, so open sequences can come to an end."""
        return self.state in ALIVE

    @property
    def incarnation(self) -> int:
        """The incarnation of the present process; 0 before the process answers."""
        return 0 if self.welcome is None else self.welcome.incarnation

    def has_adapter(self, digest: str) -> bool:
        """Return True if the present process has loaded the LoRA adapter. True for "", the model alone."""
        return not digest or (digest in self.adapters and self.adapters[digest] is None)

    def adapter_changed(self, message: AdapterChanged) -> None:
        """Store the answer of the process about a LoRA adapter."""
        self.loading.discard(message.digest)
        if message.loaded or message.error is not None:
            self.adapters[message.digest] = message.error
        else:
            self.adapters.pop(message.digest, None)

    def weights_changed(self, message: WeightsChanged) -> None:
        """Store the answer of the process about new weights."""
        self.weights, self.weights_answer = message.version, message
        self.weights_name = prefix_name(message.version, message.name)

    @property
    def load(self) -> float:
        return len(self.open) + self.elsewhere + self.prompt_tokens / PROMPT_TOKENS

    def begin(self, sequence: int, prompt_tokens: int) -> None:
        """Count ``sequence`` as sent to the instance."""
        self.open[sequence] = prompt_tokens
        self.prompt_tokens += prompt_tokens
        self.chosen += 1

    def computed(self, sequence: int) -> None:
        """Count the prompt of ``sequence`` as computed. Idempotent; unknown sequences are ignored."""
        self.prompt_tokens -= self.open.get(sequence, 0)
        if sequence in self.open:
            self.open[sequence] = 0

    def end(self, sequence: int) -> None:
        """Remove ``sequence`` from the load. Idempotent."""
        self.prompt_tokens -= self.open.pop(sequence, 0)

    def heartbeat(self, message: Heartbeat, now: float) -> None:
        """Store the reported load.

        Store ``now`` as time of progress if the engine is idle or has made a step.
        """
        # Waiting without work is no lack of progress.
        if message.idle or message.stats.steps != self.stats.steps:
            self.moved = now
        self.stats = message.stats
        # The report may be older than this API server's latest sequences, so the difference may be negative.
        self.elsewhere = max(0, message.stats.running + message.stats.waiting - len(self.open))

    def start(self, link: int, deadline: float) -> None:
        """Reset everything known about the process, because a new process was started."""
        self.state = InstanceState.STARTING
        self.lonely = self.shunned = self.located = self.watched = False
        self.link = link
        self.deadline = deadline
        self.welcome = None
        self.listens = False
        self.heard = self.moved = math.inf
        self.stats = EngineStats()
        self.elsewhere = 0
        self.prefixes = PrefixView()
        self.adapters = {}
        self.loading = set()
        self.weights, self.weights_name, self.weights_answer = 0, b"", None

    def overdue(self, timeout: float, now: float) -> str | None:
        """Return the reason why a live instance counts as dead, or None."""
        # in the same form as the deadline: now - heard could round differently
        if now >= self.heard + timeout:
            return f"the engine has been silent for {timeout:g} seconds"
        if now >= self.moved + timeout:
            return f"the engine made no step in {timeout:g} seconds while work waits"
        return None

    def progressing(self, window: float, now: float) -> bool:
        """Return True if the instance sent a message and made progress (or was idle) in the last ``window``
        seconds."""
        return self.alive and now - self.heard <= window and now - self.moved <= window
