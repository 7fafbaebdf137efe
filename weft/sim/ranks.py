"""Simulated processes of ranks: they say hello, load, form epochs and take steps as ``weft.engine.rank`` and
``weft.engine.worker`` do, on virtual time; and who keeps them, as ``weft.engine.rank_supervisor`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.common.errors import EngineDead
from weft.group.liveness import COLLECTIVE
from weft.sim.check import require
from weft.sim.collectives import Collectives
from weft.sim.sides import Sides, Words
from weft.sim.timeline import Timeline
from weft.types import frames as f
from weft.types.plan import StepPlan

if TYPE_CHECKING:
    from weft.sim.group import Group

SETTINGS = {"dtype": '"float64"'}
EXCUSED = 2.0
"""Rank timeouts in which whatever happens to a rank has shown."""
DOMAIN_EXCUSED = 10.0
"""The same where replicas form their epochs together: each may lose several until all have met."""
BLOCKS = (8,)
"""Of each pool, that a simulated rank has room for."""
_PLANTED = EngineDead("planted").info()


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take in a simulated group, in seconds."""

    timeout: float = 1.0
    """The rank timeout."""
    hello: float = 1.0
    """From the start of a process to its hello, at most."""
    load: float = 4.0
    """For loading, and for the heads of a domain to meet, at most."""
    watch: float = 0.2
    """Between two heartbeats."""
    delay: float = 0.004
    """Of a frame, at most."""
    slow: float = 1.0
    """By this are the times multiplied that processes take to start, load and end."""


class Work(NamedTuple):
    """A step as its head sends it to a rank."""

    epoch: int
    step: int
    seconds: float
    checksum: int
    """Of what the head's own rank samples."""
    run: Callable[[dict[int, int]], int]
    """Carries the step out on another rank's slot table. Returns the checksum of what that samples."""
    plan: StepPlan | None = None
    """Where ranks have caches with content."""


class Mishaps(Protocol):
    """What fails in a process by plan."""

    def befalls(self, kind: str, rank: int) -> bool:
        """Whether ``kind`` (``load``, ``form``, ``step`` or ``connect``) fails at ``rank`` now."""

    def seen(self, kind: str) -> None:
        """What was planned to go wrong with a rank had its effect."""


class Replica:
    """The processes of one replica's ranks, which outlive their heads, and the group of its present head."""

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        ranks: Sequence[int],
        *,
        collectives: Collectives,
        mishaps: Mishaps,
        table: Callable[[], dict[int, int]] = dict,
        remote: frozenset[int] = frozenset(),
        pace: Pace | None = None,
    ) -> None:
        """``ranks``: the head's own first. ``table``: makes an empty slot table. ``remote``: ranks of another
        host, which starts them again by itself.
        """
        self.timeline = timeline
        self.name = name
        self.ranks = ranks
        self.collectives = collectives
        self.mishaps = mishaps
        self.table = table
        self.remote = remote
        self.pace = pace or Pace()
        self.living: dict[int, RankProcess] = {}
        self.by_peer: dict[bytes, RankProcess] = {}
        """All processes that ever were, by each name that they had."""
        self.group: Group | None = None
        """Of the present head, once that listens."""
        self.size = len(ranks)
        """Of an epoch: more where replicas form a domain."""
        self.excused_until = 0.0
        """Until when something that happened to a rank may end an epoch."""
        self.domain: list[Replica] = [self]
        """Replicas that form their epochs together, this one among them."""
        self.make_sides: Callable[[RankProcess], Sides] | None = None
        """Makes a process's caches and transfers, in a group that has a part in some."""
        self.retired = False
        """Whether no head follows, and no process is started."""
        self._started = 0

    @property
    def members(self) -> Mapping[int, bool]:
        """The other ranks, and whether they are on the head's host."""
        return {rank: rank not in self.remote for rank in self.ranks[1:]}

    def excuse(self, seconds: float = 0.0) -> None:
        """Something happens to a rank, or the head, for so long: until soon after that, epochs of its domain
        may end."""
        timeouts = EXCUSED if len(self.domain) == 1 else DOMAIN_EXCUSED
        until = self.timeline.now + seconds + timeouts * self.pace.timeout
        for replica in self.domain:
            replica.excused_until = max(replica.excused_until, until)

    def start_remote(self) -> None:
        """Other hosts start what is theirs."""
        for rank in self.ranks[1:]:
            if rank in self.remote:
                self.spawn(rank)

    def spawn(self, rank: int) -> bool:
        """Starts the process of ``rank``, unless it runs; whether it did."""
        if rank in self.living:
            return True
        if not self.retired:
            process = RankProcess(self, rank)
            self.living[rank] = process
            self.timeline.count("rank processes")
            self.timeline.after(0.02 * self.pace.slow, 0.15 * self.pace.slow, process, process.say_hello)
        return False

    def name_peer(self, process: RankProcess) -> bytes:
        """A name for one connection of ``process``."""
        self._started += 1
        peer = b"%d.%d" % (process.rank, self._started)
        self.by_peer[peer] = process
        return peer

    def kill(self, rank: int) -> bool:
        """Ends the process of ``rank`` at once, stopped or not. Whether there was one."""
        process = self.living.get(rank)
        if process is not None:
            process.end()
        return process is not None

    def ended(self, process: RankProcess) -> None:
        """Takes a process that has ended off the books."""
        if self.living.get(process.rank) is process:
            del self.living[process.rank]
        if process.rank in self.remote and not self.retired:
            slow = self.pace.slow
            self.timeline.after(0.05 * slow, 0.3 * slow, None, self.spawn, process.rank)

    def head_ended(self, group: Group) -> None:
        """The head of ``group`` is gone: its ranks notice that some time, and wait for the next one."""
        if self.group is group:
            self.group = None
        self.excuse()
        self.collectives.leave(self.ranks[0])
        for process in list(self.living.values()):
            self.timeline.after(0.02, 0.7 * self.pace.timeout, process, process.orphaned, group)

    def close(self) -> None:
        """No head will follow: all processes end."""
        self.retired = True
        for process in list(self.living.values()):
            process.end()

    def reopen(self) -> None:
        """A head will follow after all."""
        self.retired = False
        self.start_remote()


class RankProcess:
    """One process of a rank. Frames reach it through ``Group``, in order."""

    def __init__(self, replica: Replica, rank: int) -> None:
        self.replica = replica
        self.rank = rank
        self.alive = True
        self.stalled_until = 0.0
        self.given_up_by: Group | None = None
        """The head that has replaced it."""
        self.peer = replica.name_peer(self)
        self.group: Group | None = None
        """Of the head that welcomed it."""
        self.loading = self.loaded = False
        self.epoch = -1
        """The one that runs, or ran last."""
        self.running = False
        self.formed = False
        self.frames_due = 0.0
        """When the latest frame of its head arrives."""
        self.reports_due = 0.0
        """When its latest report arrives."""
        self.connection = 0
        """A number; what was sent over an earlier one is lost."""
        self.loses_report = False
        """Whether the connection breaks under its next report of a step."""
        self.loses_word = False
        """Whether the connection breaks under the next that it says of a room."""
        self.lost_frames = False
        """Whether a connection broke since the epoch began."""
        self.sides: Sides | None = None
        """Once it is loaded, in a group that has a part in transfers."""
        self._words = Words(rank)
        self._next: int | None = None
        self._slots: dict[int, int] = {}
        self._queue: deque[Work] = deque()
        self._busy = False

    @property
    def name(self) -> str:
        return f"{self.replica.name}/{self.peer.decode()}"

    def stop(self, seconds: float) -> None:
        """Has the process stand still for so long."""
        self.stalled_until = self.replica.timeline.now + seconds
        self.replica.excuse(seconds)

    def delay_reports(self, seconds: float) -> None:
        """What it reports takes so long at least."""
        self.reports_due = max(self.reports_due, self.replica.timeline.now + seconds)
        self.replica.excuse(seconds)

    def break_connection(self) -> None:
        """What is under way is lost, in both directions; then there is another connection."""
        self.replica.excuse()
        self.connection += 1
        self.lost_frames = True

    def arrived(self, connection: int, take: Callable[..., None], group: Group, what: object) -> None:
        """A frame of ``group``'s head arrives; ``take`` reads it."""
        if connection == self.connection:
            take(group, what)

    # -- joining a group

    def say_hello(self) -> None:
        """Again and again until a head welcomes it."""
        if self.group is not None:
            return
        replica, group = self.replica, self.replica.group
        if group is not None:
            hello = f.RankHello(
                version=f.VERSION, release="", rank=self.rank, pid=1, epoch=self.epoch, settings=SETTINGS
            )
            group.receive(self, hello)
        again = 0.25 * replica.pace.slow
        replica.timeline.at(replica.timeline.now + again, self, self.say_hello)

    def take(self, group: Group, frame: f.ToRank) -> None:
        """A frame of the head of ``group``."""
        if isinstance(frame, f.Refused):
            if group is self.replica.group:
                self.end()
        elif isinstance(frame, f.RankWelcome):
            self._welcomed(group)
        elif group is not self.group:
            return
        elif isinstance(frame, f.Shutdown):
            self.end()
        elif isinstance(frame, f.Pools):
            self.loaded = True
            self._is_ready()
        elif isinstance(frame, f.Abort):
            if frame.epoch >= self.epoch:
                self.leave()
        elif isinstance(frame, f.Form):
            self._form(frame)
        elif isinstance(frame, f.RoomToRank) and self.sides is not None:  # else it has no caches yet
            self._words.take(frame, self.sides)

    def room_news(self) -> None:
        """Tells the head what the rank's transfers have reported."""
        for frame in () if self.sides is None else self._words.said(self.sides):
            self._report(frame)

    def _is_ready(self) -> None:
        if self.sides is None and self.replica.make_sides is not None:
            self.sides = self.replica.make_sides(self)
        sides = self.sides or Sides(None, None)
        embeddings = sides.endpoint("embeddings")
        self._report(f.Ready(rank=self.rank, endpoint=sides.endpoint("kv"), embeddings=embeddings))

    def _welcomed(self, group: Group) -> None:
        if self.group is not None or group is not self.replica.group:
            return
        self.group = group
        self.formed = False
        self._words.joined(self.sides)
        if self.loaded:
            self._report(f.Loaded(rank=self.rank, blocks=BLOCKS))
            self._is_ready()
        elif not self.loading:
            self.loading = True
            slow = self.replica.pace.slow
            self.replica.timeline.after(0.01 * slow, 0.2 * slow, self, self._load)

    def _load(self) -> None:
        self.loading = False
        if self.replica.mishaps.befalls("load", self.rank):
            self._report(f.Failed(rank=self.rank, epoch=-1, step=-1, error=_PLANTED))
            self.end()
        elif self.group is None:  # its head is gone while it loaded: the next one takes it as it is
            self.loaded = True
        else:
            self._report(f.Loaded(rank=self.rank, blocks=BLOCKS))

    def _form(self, frame: f.Form) -> None:
        self.leave()
        require(frame.epoch > self.epoch, f"{self.name}: epoch {frame.epoch} after epoch {self.epoch}")
        self.epoch, self.running, self.formed = frame.epoch, True, True
        self._next = None
        self.lost_frames = False
        self._slots = self.replica.table()
        if self.sides is not None:
            self.sides.reset()
        replica = self.replica
        if replica.mishaps.befalls("form", self.rank):
            self.fail(collective=False)
            return
        ended = partial(self._formed, frame.epoch)
        replica.collectives.join(frame.store, replica.size, 0.02 * replica.pace.slow, self, ended)

    def _formed(self, epoch: int, whole: bool) -> None:
        if self.epoch != epoch or not self.running or not self.alive:
            return
        if whole:
            self._report(f.Formed(rank=self.rank, epoch=epoch))
        else:
            self.fail(collective=True)

    # -- steps

    def take_step(self, group: Group, work: Work) -> None:
        """A step of the head of ``group``: nothing to a rank that has left that epoch."""
        if group is not self.group or not self.running or work.epoch != self.epoch:
            return
        if self._next not in (None, work.step):
            due = f"{self.name}: step {work.step} came where step {self._next} was due"
            require(self.lost_frames, due)
            self.fail(collective=False)
            return
        self._next = work.step + 1
        self._queue.append(work)
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        work = self._queue.popleft()
        replica = self.replica
        if replica.mishaps.befalls("step", self.rank):
            self.fail(collective=False)
            return
        checksum = work.run(self._slots)
        if self.sides is not None and work.plan is not None:
            self.sides.run(work.plan)
        self._busy = True
        ended = partial(self._step_ended, work, checksum)
        key = (replica.name, work.epoch, work.step)
        replica.collectives.join(key, len(replica.ranks), work.seconds, self, ended)

    def _step_ended(self, work: Work, checksum: int, whole: bool) -> None:
        if self.epoch != work.epoch or not self.running or not self.alive:
            return
        self._busy = False
        if not whole:
            self.fail(collective=True)
            return
        outcome = f.Outcome(rank=self.rank, epoch=work.epoch, step=work.step, checksum=checksum)
        self._report(outcome)
        if self._queue:
            self._begin()

    # -- ends

    def fail(self, collective: bool) -> None:
        """Something raised here: it leaves the epoch, and says so."""
        if self.epoch < 0 or not self.running:
            return
        if not collective:
            self.replica.excuse()
        failed = f.Failed(rank=self.rank, epoch=self.epoch, step=0, error=_PLANTED, comm=collective)
        self.leave()
        self._report(failed)

    def leave(self) -> None:
        """Leaves the epoch: its communicators are closed, its steps forgotten."""
        self.running = self._busy = False
        self._queue.clear()
        self.replica.collectives.leave(self.rank)

    def orphaned(self, group: Group) -> None:
        """Notices that the head of ``group`` is gone: it keeps its weights for the next one."""
        if self.given_up_by is not None:  # it was told so
            self.end()
        elif self.group is group:
            self.leave()
            self.group = None
            self.peer = self.replica.name_peer(self)
            self.connection += 1
            self.say_hello()

    def end(self) -> None:
        """Ends its process now."""
        if self.alive:
            self.alive = False
            self.replica.excuse()
            self.leave()
            if self.sides is not None:
                self.sides.close()
            self.replica.timeline.note(self.name, "..", "", "its process ends")
            self.replica.ended(self)

    def _report(self, frame: f.ToHead) -> None:
        if self.group is not None:
            self.group.receive(self, frame)


def patience_of(pace: Pace) -> float:
    """Seconds that a rank waits in a collective."""
    return COLLECTIVE * pace.timeout
