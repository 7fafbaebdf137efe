"""An instance (a head, and the group behind it) as one front knows it: its state, its load, its progress.

Load is counted in sequences. An open sequence counts 1, and its prompt's tokens count extra
until the prompt has been computed, so that an instance with a long prompt gets no other long one meanwhile.
Sequences that heartbeats report beyond this front's own are the load of other fronts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from weft.routing.prefix_index import PrefixView
from weft.types.messages import HeadStats, Heartbeat, Role, Welcome

PROMPT_TOKENS = 256
"""Tokens of a prompt still to be computed that weigh as much as a running sequence."""


class InstanceState(Enum):
    """
    starting ──Welcome──► up ──Draining──► draining
       ▲                  ▲│ lost            │ lost
       │Expected  healthy ││                 ▼
      down ◄──────────────┼┴──────────────── ·        half_open: it died twice in a row, and gets one prompt
       │ Retired          half_open ◄─ Welcome        at a time until a sequence ends well
       ▼
     retired ──Expected, as an operator revived it──► starting
    """

    STARTING = "starting"
    UP = "up"
    HALF_OPEN = "half_open"
    DRAINING = "draining"
    DOWN = "down"
    RETIRED = "retired"


GONE = (InstanceState.DOWN, InstanceState.RETIRED)
SERVING = (InstanceState.UP, InstanceState.HALF_OPEN)
"""They take sequences."""
ALIVE = (InstanceState.UP, InstanceState.HALF_OPEN, InstanceState.DRAINING)


@dataclass(slots=True)
class Instance:
    """One replica, as a fleet knows it. Times are seconds of the fleet's clock."""

    name: str
    domain: str = ""
    """Instances of one domain work together or not at all; "" is none."""
    order: int = 0
    """Position in the list of instances; of equal loads the first is chosen."""
    state: InstanceState = InstanceState.STARTING
    link: int = -1
    """The connection to its present process."""
    welcome: Welcome | None = None
    """What that process said of itself."""
    role: Role | None = None
    """Of its latest process that answered; None before the first."""
    version: int = 0
    """Version of the messages that both ends speak."""
    stats: HeadStats = field(default_factory=HeadStats)
    open: dict[int, int] = field(default_factory=dict)
    """This front's open sequences -> prompt tokens that are still to be computed."""
    prompt_tokens: int = 0
    """The sum of ``open``."""
    elsewhere: int = 0
    """Sequences of other fronts, by the last heartbeat."""
    chosen: int = 0
    """How often a sequence was sent there."""
    unanswered: set[int] = field(default_factory=set)
    """Sequences that were taken from an instance that knows no attempts, and whose end is still to come."""
    deaths: int = 0
    """Deaths in a row, since the instance was healthy last."""
    since: float = -math.inf
    """When the instance came up last."""
    heard: float = math.inf
    """When the last message came."""
    moved: float = math.inf
    """When it proved progress last: its step counter moved, or it had nothing to do."""
    deadline: float = math.inf
    """While it starts: when it must listen at the latest or, once it listens, answer."""
    located: bool = False
    """Whether its present process was heard of; that of a host that is not there was not."""
    listens: bool = False
    shunned: bool = False
    """Whether its present process has ended, as another one says that saw it: nothing is sent there."""
    lonely: bool = False
    """Whether it was said that its present process has no partner."""
    prefixes: PrefixView = field(default_factory=PrefixView)
    """What its present process has cached, as it tells."""

    @property
    def alive(self) -> bool:
        """Whether it answers, so that its sequences come to their end."""
        return self.state in ALIVE

    @property
    def incarnation(self) -> int:
        """The incarnation of its present process; 0 while that has not answered."""
        return 0 if self.welcome is None else self.welcome.incarnation

    @property
    def load(self) -> float:
        return len(self.open) + self.elsewhere + self.prompt_tokens / PROMPT_TOKENS

    def begin(self, sequence: int, prompt_tokens: int) -> None:
        """``sequence`` is sent there."""
        self.open[sequence] = prompt_tokens
        self.prompt_tokens += prompt_tokens
        self.chosen += 1

    def computed(self, sequence: int) -> None:
        """The prompt of ``sequence`` was computed. Idempotent; unknown sequences are fine."""
        self.prompt_tokens -= self.open.get(sequence, 0)
        if sequence in self.open:
            self.open[sequence] = 0

    def end(self, sequence: int) -> None:
        """``sequence`` is there no longer. Idempotent."""
        self.prompt_tokens -= self.open.pop(sequence, 0)

    def heartbeat(self, message: Heartbeat, now: float) -> None:
        """Takes in the load and progress that the instance reports."""
        if message.idle or message.stats.steps != self.stats.steps:
            self.moved = now
        self.stats = message.stats
        self.elsewhere = max(0, message.stats.running + message.stats.waiting - len(self.open))

    def start(self, link: int, deadline: float) -> None:
        """Takes note of a new process."""
        self.state = InstanceState.STARTING
        self.lonely = self.shunned = self.located = False
        self.link = link
        self.deadline = deadline
        self.welcome = None
        self.listens = False
        self.heard = self.moved = math.inf
        self.stats = HeadStats()
        self.elsewhere = 0
        self.unanswered.clear()
        self.prefixes = PrefixView()

    def overdue(self, timeout: float, now: float) -> str | None:
        """Why one that is alive counts as dead after all, or None."""
        if now >= self.heard + timeout:  # as a deadline is computed: now - heard may be rounded otherwise
            return f"the engine has been silent for {timeout:g} seconds"
        if now >= self.moved + timeout:
            return f"the engine made no step in {timeout:g} seconds while work waits"
        return None

    def progressing(self, window: float, now: float) -> bool:
        """Whether it both spoke and, having work, stepped in the last ``window`` seconds."""
        return self.alive and now - self.heard <= window and now - self.moved <= window
