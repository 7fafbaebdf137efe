"""Simulated rank processes: join a group, load, form epochs and take steps, on virtual time.

``RankProcess`` works like ``weft.engine.rank`` and ``weft.engine.ranks.worker``. ``Replica`` keeps the
processes like ``weft.engine.ranks.rank_supervisor``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from testing.cluster.check import require
from testing.cluster.collectives import Collectives
from testing.cluster.transfers.sides import Sides, Words
from weft.common.errors import EngineDead
from weft.group.liveness import COLLECTIVE
from weft.sim.timeline import Timeline
from weft.types import frames as f
from weft.types.plan import StepPlan

if TYPE_CHECKING:
    from testing.cluster.group import Group

SETTINGS = {"dtype": '"float64"'}
EXCUSED = 2.0
"""Time after which every incident of a rank has had an effect, in rank timeouts."""
EXPERT_GROUP_EXCUSED = 10.0
"""The same for an expert-parallel group: each replica may lose several epochs until all have met."""
BLOCKS = (8,)
"""Blocks of each pool for which a simulated rank has room."""
_PLANTED = EngineDead("planted").info()


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations in a simulated group, in seconds."""

    timeout: float = 1.0
    """The rank timeout."""
    hello: float = 1.0
    """Maximum from the start of a process to the hello."""
    load: float = 4.0
    """Maximum for loading, and for the meeting of an expert-parallel group's engines."""
    watch: float = 0.2
    """Interval of heartbeats."""
    delay: float = 0.004
    """Maximum delay of a frame."""
    slow: float = 1.0
    """Factor on the durations of starts, loads and ends of processes."""


class Work(NamedTuple):
    """A step in the form for a rank."""

    epoch: int
    step: int
    seconds: float
    checksum: int
    """Checksum of the tokens sampled by the engine's own rank."""
    run: Callable[[dict[int, int]], int]
    """Runs the step on another rank's slot table, and returns the checksum of the rank's tokens."""
    plan: StepPlan | None = None
    """The whole plan, for ranks with content in the caches."""


class Mishaps(Protocol):
    """Planned failures of ranks."""

    def befalls(self, kind: str, rank: int) -> bool:
        """Use up one planned failure of ``kind`` (``load``, ``form``, ``step`` or ``connect``) at ``rank``.

        Return True if there was one, so the operation fails now.
        """

    def seen(self, kind: str) -> None:
        """Note the effect of a planned failure of a rank."""


class Replica:
    """The rank processes of one replica, which outlive engines, and the group of the present engine."""

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
        """Create the replica without processes.

        ``ranks`` begins with the engine's own rank. ``table`` makes an empty slot table. ``remote`` ranks run
        on another host, which restarts them without the engine.
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
        """Every process of the schedule, by each peer name of the process."""
        self.group: Group | None = None
        """Group of the present engine, once the engine listens."""
        self.size = len(ranks)
        """Ranks of an epoch: all ranks of an expert-parallel group."""
        self.excused_until = 0.0
        """Time until which an incident of a rank excuses the loss of an epoch."""
        self.expert_group: list[Replica] = [self]
        """The replicas with common epochs, including this replica."""
        self.make_sides: Callable[[RankProcess], Sides] | None = None
        """Makes the caches and transfers of a process, in a group with transfers."""
        self.retired = False
        """True if no engine follows, and no process is started."""
        self._started = 0

    @property
    def members(self) -> Mapping[int, bool]:
        """Other ranks -> True if the rank is on the engine's host."""
        return {rank: rank not in self.remote for rank in self.ranks[1:]}

    def excuse(self, seconds: float = 0.0) -> None:
        """Note an incident of ``seconds``. Until soon afterwards, epochs of the expert-parallel group may
        end."""
        # Losses spread through an expert-parallel group, so the excuse holds for all replicas.
        timeouts = EXCUSED if len(self.expert_group) == 1 else EXPERT_GROUP_EXCUSED
        until = self.timeline.now + seconds + timeouts * self.pace.timeout
        for replica in self.expert_group:
            replica.excused_until = max(replica.excused_until, until)

    def start_remote(self) -> None:
        """Start the processes of other hosts."""
        for rank in self.ranks[1:]:
            if rank in self.remote:
                self.spawn(rank)

    def spawn(self, rank: int) -> bool:
        """Start the process of ``rank`` unless running.

        Return True if already running. A retired replica starts nothing.
        """
        if rank in self.living:
            return True
        if not self.retired:
            process = RankProcess(self, rank)
            self.living[rank] = process
            self.timeline.count("rank processes")
            self.timeline.after(0.02 * self.pace.slow, 0.15 * self.pace.slow, process, process.say_hello)
        return False

    def name_peer(self, process: RankProcess) -> bytes:
        """Return a new peer name for one connection of ``process``."""
        self._started += 1
        peer = b"%d.%d" % (process.rank, self._started)
        self.by_peer[peer] = process
        return peer

    def kill(self, rank: int) -> bool:
        """End the process of ``rank`` at once, even a stopped one. Return True if there was a process."""
        process = self.living.get(rank)
        if process is not None:
            process.end()
        return process is not None

    def ended(self, process: RankProcess) -> None:
        """Remove an ended process. Another host restarts a remote rank."""
        if self.living.get(process.rank) is process:
            del self.living[process.rank]
        if process.rank in self.remote and not self.retired:
            slow = self.pace.slow
            self.timeline.after(0.05 * slow, 0.3 * slow, None, self.spawn, process.rank)

    def engine_process_ended(self, group: Group) -> None:
        """Handle the end of the engine of ``group``. The ranks notice later, and wait for the next engine."""
        if self.group is group:
            self.group = None
        self.excuse()
        self.collectives.leave(self.ranks[0])
        for process in list(self.living.values()):
            self.timeline.after(0.02, 0.7 * self.pace.timeout, process, process.orphaned, group)

    def close(self) -> None:
        """End all processes, because no engine will follow."""
        self.retired = True
        for process in list(self.living.values()):
            process.end()

    def reopen(self) -> None:
        """Allow processes again, because an engine will follow after all."""
        self.retired = False
        self.start_remote()


class RankProcess:
    """One process of a rank. Frames arrive through ``Group``, in order."""

    def __init__(self, replica: Replica, rank: int) -> None:
        """Create a live process of ``rank`` with a new peer name.

        The process says hello when ``spawn`` schedules it.
        """
        self.replica = replica
        self.rank = rank
        self.alive = True
        self.stalled_until = 0.0
        self.given_up_by: Group | None = None
        """The group of the engine that has replaced this process; None before."""
        self.peer = replica.name_peer(self)
        self.group: Group | None = None
        """Group of the engine that welcomed this process; None without one."""
        self.loading = self.loaded = False
        self.epoch = -1
        """The present epoch, or the last one."""
        self.running = False
        self.formed = False
        self.frames_due = 0.0
        """Arrival time of the engine's latest frame."""
        self.reports_due = 0.0
        """Arrival time of the latest report."""
        self.connection = 0
        """Connection number. Frames of an earlier connection are lost."""
        self.loses_report = False
        """True if the connection will break under the next report of a step."""
        self.loses_word = False
        """True if the connection will break under the next report about a transfer."""
        self.lost_frames = False
        """True if a connection broke since the epoch began."""
        self.sides: Sides | None = None
        """Caches and transfers, once loaded, in a group with transfers."""
        self._words = Words(rank)
        self._next: int | None = None
        self._slots: dict[int, int] = {}
        self._queue: deque[Work] = deque()
        self._busy = False

    @property
    def name(self) -> str:
        return f"{self.replica.name}/{self.peer.decode()}"

    def stop(self, seconds: float) -> None:
        """Let the process stand still for ``seconds``."""
        self.stalled_until = self.replica.timeline.now + seconds
        self.replica.excuse(seconds)

    def delay_reports(self, seconds: float) -> None:
        """Delay all reports by at least ``seconds``."""
        self.reports_due = max(self.reports_due, self.replica.timeline.now + seconds)
        self.replica.excuse(seconds)

    def break_connection(self) -> None:
        """Lose all frames under way in both directions, and reconnect."""
        self.replica.excuse()
        self.connection += 1
        self.lost_frames = True

    def arrived(self, connection: int, take: Callable[..., None], group: Group, what: object) -> None:
        """Receive a frame of ``group``'s engine with ``take``; frames of an earlier connection are
        dropped."""
        if connection == self.connection:
            take(group, what)

    # -- joining a group

    def say_hello(self) -> None:
        """Send hello again and again until an engine welcomes this process."""
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
        """Handle a frame of the engine of ``group``.

        Frames of another engine are ignored, except a welcome and a refusal.
        """
        if isinstance(frame, f.RankRefused):
            if group is self.replica.group:
                self.end()
        elif isinstance(frame, f.RankWelcome):
            self._welcomed(group)
        elif group is not self.group:
            return
        elif isinstance(frame, f.RankShutdown):
            self.end()
        elif isinstance(frame, f.Pools):
            self.loaded = True
            self._is_ready()
        elif isinstance(frame, f.Abort):
            # An abort of an earlier epoch is late: the rank is in a newer epoch already.
            if frame.epoch >= self.epoch:
                self.leave()
        elif isinstance(frame, f.Form):
            self._form(frame)
        # without sides there are no caches yet
        elif isinstance(frame, f.TransferToRank) and self.sides is not None:
            self._words.take(frame, self.sides)

    def transfer_news(self) -> None:
        """Send the reports of the rank's transfers to the engine."""
        for frame in () if self.sides is None else self._words.frames_of(self.sides):
            self._report(frame)

    def _is_ready(self) -> None:
        """Open the transfers once, and report Ready."""
        if self.sides is None and self.replica.make_sides is not None:
            self.sides = self.replica.make_sides(self)
        sides = self.sides or Sides(None, None)
        embeddings = sides.endpoint("embeddings")
        self._report(f.Ready(rank=self.rank, endpoint=sides.endpoint("kv"), embeddings=embeddings))

    def _welcomed(self, group: Group) -> None:
        """Join the engine of ``group``: stop old transfers and report Loaded, or begin to load.

        Ignored if already joined.
        """
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
        """Report Loaded, or fail as planned and end. Without an engine, keep the weights for the next."""
        self.loading = False
        if self.replica.mishaps.befalls("load", self.rank):
            self._report(f.RankFailed(rank=self.rank, epoch=-1, step=-1, error=_PLANTED))
            self.end()
        elif self.group is None:  # the engine is gone meanwhile: the next engine gets the loaded rank
            self.loaded = True
        else:
            self._report(f.Loaded(rank=self.rank, blocks=BLOCKS))

    def _form(self, frame: f.Form) -> None:
        """Leave the present epoch and join the collective that forms the new epoch, with empty slots.

        Raise Violation if the epoch's number does not grow.
        """
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
        """Report Formed, or a failure unless ``whole``. Ignored in another epoch."""
        if self.epoch != epoch or not self.running or not self.alive:
            return
        if whole:
            self._report(f.Formed(rank=self.rank, epoch=epoch))
        else:
            self.fail(collective=True)

    # -- steps

    def take_step(self, group: Group, work: Work) -> None:
        """Receive a step, to run after the queued steps.

        Ignored if this rank has left the step's epoch. Raise Violation for a gap without a broken connection.
        """
        if group is not self.group or not self.running or work.epoch != self.epoch:
            return
        # A gap in the steps is allowed only after a broken connection.
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
        """Run the oldest queued step and join its collective, or fail as planned."""
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
        """Report the outcome of a step and begin the next.

        Unless ``whole``, fail. Ignored in another epoch.
        """
        if self.epoch != work.epoch or not self.running or not self.alive:
            return
        self._busy = False
        if not whole:
            self.fail(collective=True)
            return
        outcome = f.StepOutcome(rank=self.rank, epoch=work.epoch, step=work.step, checksum=checksum)
        self._report(outcome)
        if self._queue:
            self._begin()

    # -- ends

    def fail(self, collective: bool) -> None:
        """Leave the epoch after an error, and report the error.

        ``collective``: a collective failed. Ignored outside an epoch.
        """
        if self.epoch < 0 or not self.running:
            return
        if not collective:
            self.replica.excuse()
        failed = f.RankFailed(rank=self.rank, epoch=self.epoch, step=0, error=_PLANTED, comm=collective)
        self.leave()
        self._report(failed)

    def leave(self) -> None:
        """Leave the epoch: close the communicators, and forget the steps."""
        self.running = self._busy = False
        self._queue.clear()
        self.replica.collectives.leave(self.rank)

    def orphaned(self, group: Group) -> None:
        """Notice that the engine of ``group`` is gone: leave the epoch and say hello to the next.

        The weights stay loaded. End the process if the engine had given it up.
        """
        if self.given_up_by is not None:  # the refusal was received
            self.end()
        elif self.group is group:
            self.leave()
            self.group = None
            self.peer = self.replica.name_peer(self)
            self.connection += 1
            self.say_hello()

    def end(self) -> None:
        """End the process now, with its transfers. Idempotent."""
        if self.alive:
            self.alive = False
            self.replica.excuse()
            self.leave()
            if self.sides is not None:
                self.sides.close()
            self.replica.timeline.note(self.name, "..", "", "its process ends")
            self.replica.ended(self)

    def _report(self, frame: f.ToEngine) -> None:
        if self.group is not None:
            self.group.receive(self, frame)


def patience_of(pace: Pace) -> float:
    """Return the maximum seconds of a rank's wait in a collective."""
    return COLLECTIVE * pace.timeout
