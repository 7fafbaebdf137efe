"""A simulated engine process: the product's ``EngineProtocol`` and ``Scheduler``, on virtual time.

The group (``testing.cluster.group``) has one rank or several. ``GroupRunner.forward`` sends a step to all
ranks. The result is committed once the group's ``Membership`` counts the step. The loss of an epoch and the
beginning of the next epoch are in ``testing.cluster.cluster_engine``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from testing.cluster.check import TokenModel, Violation
from testing.cluster.cluster_engine import Engine, Poisoned
from testing.cluster.group import Group
from testing.cluster.idle import check_reservations
from testing.cluster.network import Link
from testing.cluster.ranks import Replica
from testing.cluster.sim_tier import open_tier
from testing.cluster.transfers.sides import Sides
from testing.cluster.transfers.transfer_network import SimChannel, SimPeers
from weft.common.errors import EngineDead, WeftError
from weft.common.restarts import RestartBudget
from weft.config.sections.all import TransferSection
from weft.control.fleet.engine_protocol import EngineProtocol, Outgoing
from weft.disagg.protocol.transfer_table import TransferPatience
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.engine.disagg.group_transfers import GroupTransfers
from weft.engine.disagg.transfer_channel import Arrived
from weft.group.meeting import Meeting
from weft.types import messages as m
from weft.types.frames import Cache
from weft.types.transfer import Endpoint, Peer

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster

HEARTBEAT_S = 1.0
TRANSFERS = TransferPatience(retry=0.15, bind=2.0, fence=0.5, stop=0.4, longest=0.6, remember=60.0)
"""Shorter than the product's patience, so every transfer ends soon."""


class EngineProcess:
    """An engine process: listens, loads, serves, and ends.

    The loop is that of ``weft.engine.server.engine_server``: the process reads messages between steps, and
    reads nothing while waiting for a step.
    """

    def __init__(self, cluster: Cluster, instance: str, number: int) -> None:
        """Create a process of ``instance``, not started. ``number``: start number, over all processes."""
        self.cluster, self.instance = cluster, instance
        self.name = f"{instance}#{number}"
        self.alive = True
        self.stalled_until = 0.0
        self.listens = self.ready = self.replaced = False
        """``replaced``: the supervisor has decided on the successor, or on none."""
        self.slow = False
        """True if the process will not start in time, or if the name has a second process."""
        self.incarnation = cluster.rng.getrandbits(32)
        cluster.transfers.engine_processes[self.incarnation] = self
        self.replica: Replica = cluster.replicas[instance]
        self.expert_group_gone = False
        """True if another engine of the expert-parallel group ended during the life of this process."""
        self._load_s = 0.0
        self.number: int = number
        """Start number, over all engine processes of the schedule."""
        self.watched_by: list[tuple[SimPeers, Peer]] = []
        """(watcher, peer under which the watcher knows this process): engines of other groups that notice the
        end."""
        self._news = False
        """True if the process is about to read news of transfers."""
        self._due: float | None = None
        """Time of the next planned check of transfer deadlines."""
        model = TokenModel(cluster.row_errors, cluster.poison)
        transfers = cluster.transfers
        transfer = TransferSection(
            role=transfers.roles[instance], decode_watermark=transfers.watermark, transfer_mode=transfers.mode
        )
        caches = cluster.transfers.caches(instance)
        section = cluster.transfers.images.section(cluster.section, transfer.role)
        self.engine = Engine(caches, section, model, cluster.clock, transfer)
        self.protocol = EngineProtocol(self.engine, self.incarnation)
        self.links: dict[bytes, Link] = {}
        """Connection -> link."""
        self.connecting: list[Link] = []
        """Links waiting for the process to listen."""
        self._inbox: deque[tuple[bytes, m.ToEngine]] = deque()
        self._waits = 0
        """Number of the current wait for a step; each wait gets a new number."""
        self._busy = self._heartbeat_due = False

    # -- start and end

    def start(self, listen: float, load: float) -> None:
        """Start the process: to listen after ``listen`` seconds, and to serve ``load`` seconds later."""
        self._load_s = load
        self.cluster.at(self.cluster.now + listen, self, self._listen)

    @property
    def group(self) -> Group:
        """The group, once the process listens."""
        assert self.engine.runner.group is not None
        return self.engine.runner.group

    @property
    def excused(self) -> bool:
        """True if an API server may give the process up: something has happened to the process or to a
        rank."""
        group = self.engine.runner.group
        troubled = group is not None and group.troubled
        return self.slow or not self.alive or (not self.ready and (troubled or self.expert_group_gone))

    def _listen(self) -> None:
        """Connect all waiting links and start the group."""
        cluster = self.cluster
        self.listens = True
        for link in self.connecting:
            cluster.connect(link)
        self.connecting.clear()
        expert_group = cluster.instances[self.instance]
        meeting = None
        if expert_group:
            number = list(cluster.instances).index(self.instance)
            meeting = Meeting(number, f"store{self.name}", "", self.name)
        group = self.engine.runner.group = Group(
            self,
            self.replica,
            self.name,
            load=self._load_s,
            meeting=meeting,
            leases=cluster.leases,
            budget=RestartBudget(cluster.rank_budget, 600.0),
            lag=cluster.lag,
        )
        group.start()

    def _serve(self) -> None:
        self.ready = True
        self._open_transfers()
        open_tier(self)
        self.cluster.at(self.cluster.now + HEARTBEAT_S, self, self._timer)
        self._turn()

    def fail(self, error: EngineDead) -> None:
        """Report an engine error to every API server, then end the process."""
        self._send(self.protocol.failed(error))
        self.close_transfers()
        self.cluster.end_engine_process(self, lingers=True)

    # -- transfers

    def _open_transfers(self) -> None:
        """Open the transfers of each cache. See ``weft.engine.transfer_start`` and ``rank_transfers``."""
        transfers = self.cluster.transfers
        if transfers.moves(self.instance):
            sides = self.engine.runner.sides = transfers.make_sides(self.replica, self)
            self.engine.open_transfers(self._open(sides, "kv"), self._open(sides, "embeddings"))

    def _open(self, sides: Sides, cache: Cache) -> EngineTransfers | None:
        cluster, role, group = self.cluster, self.engine.transfer.role, self.group
        side = sides.of(cache)
        if side is None:
            return None
        own, members = side.endpoint, group.membership.members
        # The engine's own rank has number 0.
        numbers = {rank: number for number, rank in enumerate(sorted(members), 1)}

        def endpoints() -> list[Endpoint | None]:
            others = (members[rank] for rank in numbers)
            return [own, *(one.endpoint if cache == "kv" else one.embeddings for one in others)]

        group.transfers[cache] = GroupTransfers(
            side, side, endpoints, numbers, group.send_transfer, cache=cache
        )
        return EngineTransfers(
            role == ("prefill" if cache == "kv" else "encode"),
            group.transfers[cache],
            SimChannel(cluster.transfers.network, self, cache),
            incarnation=self.incarnation,
            clock=cluster.clock,
            patience=TRANSFERS,
            peers=SimPeers(cluster.transfers.network, self),
        )

    def transfer_message(self, channel: SimChannel, arrived: Arrived) -> None:
        """Receive a transfer message from an engine of another group."""
        channel.came.append(arrived)
        self.transfer_news()

    def transfer_news(self) -> None:
        """Schedule a check for news of transfers. A waiting loop checks after the awaited step."""
        if not self._news:
            self._news = True
            self.cluster.at(self.cluster.now, self, self._look)

    def _look(self) -> None:
        self._news = False
        if self.ready and not self._busy:
            self._turn()

    def _watch_transfers(self) -> None:
        """Schedule a check at the next deadline of a transfer."""
        each = [transfers.next_due for transfers in self.engine.all_transfers]
        each += [] if self.engine.tier is None else [self.engine.tier.loads.next_due]
        due = min((one for one in each if one is not None), default=None)
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            self.cluster.at(max(due, self.cluster.now), self, self._transfers_due, due)

    def _transfers_due(self, due: float) -> None:
        if due == self._due:
            self._due = None
            self.transfer_news()

    def close_transfers(self) -> None:
        """Close all transfers in an orderly end: peers are notified."""
        for transfers in self.engine.all_transfers:
            transfers.close()

    # -- messages

    def receive(self, link: Link, message: m.ToEngine) -> None:
        """Receive a message of an API server."""
        self._inbox.append((link.connection, message))
        if self.ready and not self._busy:
            self._turn()

    def forget(self, link: Link) -> None:
        """Notice the end of a connection: the sequences of the API server end."""
        self.links.pop(link.connection, None)
        self.protocol.forget(link.connection)
        self.check()
        if self.ready and not self._busy:
            self._turn()

    # -- the loop

    def _turn(self, worked: bool = False) -> None:
        """Run the loop until the engine waits for a step or has no work.

        Raise Violation if the engine fails or stops with work at hand.

        ``worked`` is True if the process was busy until now. API servers then get a heartbeat at once.
        """
        cluster = self.cluster
        worked = worked or self.engine.has_work()
        # Order as in the product: messages, news of transfers, end conditions, then one step.
        while self.alive:
            while self._inbox:
                self._send(self.protocol.on(*self._inbox.popleft()))
            self._tell(self.engine.poll())
            self.check()
            self._watch_transfers()
            if self.protocol.stopped:
                cluster.stopped(self)
                return
            if self.engine.recovering or not self.group.running:
                return
            if not self.engine.has_work():
                if self.protocol.draining and not self.protocol.live and not self.engine.transferring:
                    cluster.supervisor.drained(self)
                break
            events: list[m.TokenEvent] = []
            try:
                launched = self.engine.launch(events)
            except EngineDead as error:
                raise Violation(f"{self.name}: the engine failed by itself: {error.message}") from error
            self._tell(events)  # the end of a sequence during planning may unblock others
            if self.engine.due(launched):
                self._busy = True
                self._waits += 1
                step = self.engine._in_flight[0].handle
                if self.group.others:
                    self.group.wait_for(step.plan.step)
                else:
                    cluster.at(max(step.complete, cluster.now), self, self._complete, self._waits)
                return
        if worked or self._heartbeat_due:
            self._heartbeat()

    def _complete(self, number: int) -> None:
        """Commit the awaited step, and continue the loop.

        A stale ``number`` is ignored. A poisoned step ends the process. Raise Violation if the engine fails.
        """
        if number != self._waits or not self._busy:
            return
        self._busy = False
        events: list[m.TokenEvent] = []
        try:
            self.engine.commit(events)
        except EngineDead as error:
            raise Violation(f"{self.name}: the engine failed by itself: {error.message}") from error
        except Poisoned:
            self.cluster.poisoned(self)
            return
        self._send(self.protocol.events(events, self.engine.scheduler.steps))
        if self._heartbeat_due:
            self._heartbeat()
        self._turn(worked=True)

    def _tell(self, events: list[m.TokenEvent]) -> None:
        if events:
            self._send(self.protocol.events(events, self.engine.scheduler.steps))

    def _timer(self) -> None:
        """Send a heartbeat every ``HEARTBEAT_S`` seconds, or after the running step."""
        self.cluster.at(self.cluster.now + HEARTBEAT_S, self, self._timer)
        if self._busy:
            self._heartbeat_due = True
        else:
            self._heartbeat()

    def _heartbeat(self) -> None:
        self._heartbeat_due = False
        self._send(self.protocol.heartbeats())

    def _send(self, outgoing: Outgoing) -> None:
        for connection, message in outgoing:
            link = self.links.get(connection)
            if link is not None:
                self.cluster.network.to_front(link, message)

    # -- faults and orders

    def group_lost(self) -> None:
        """Drop the epoch with all steps, count both and continue the loop. See ``Owner``."""
        cluster = self.cluster
        self._busy = False
        lost = len(self.engine._in_flight)
        self.engine.check()
        cluster.groups_lost += 1
        cluster.counts["steps lost with their ranks"] += lost
        cluster.note(self.name, "..", "", f"its epoch is lost, with {lost} steps")
        if self._heartbeat_due:
            self._heartbeat()
        self._turn()

    def group_runs(self) -> None:
        """Begin to serve, or continue after the loss of an epoch. See ``Owner``."""
        if not self.ready:
            self._serve()
        elif self.engine.recovering:
            self._send(self.protocol.events(self.engine.step()))
            if self.engine.runner.held_over:
                self.cluster.count("blocks pinned over a loss", len(self.engine.runner.held_over))
            self._turn(worked=True)

    def group_failed(self, error: WeftError) -> None:
        """End the process, because the group cannot run again. See ``Owner``."""
        self.cluster.happened("group given up")
        if self.ready:
            self.fail(EngineDead(error.message))
        else:
            self.cluster.end_engine_process(self)

    def step_counts(self) -> None:
        """Handle the completion of the awaited step. See ``Owner``."""
        self.cluster.at(self.cluster.now, self, self._complete, self._waits)

    def pin(self, seconds: float) -> bool:
        """Pin the blocks of a running sequence for ``seconds``. Return True if there were blocks to pin."""
        blocks = self.engine.pin(seconds, self.cluster.now)
        if blocks:
            self.cluster.note(self.name, "..", "", f"blocks {blocks} are pinned for {seconds:.3f} s")
            self.cluster.at(self.cluster.now + seconds, self, self._unpin, blocks)
        return bool(blocks)

    def _unpin(self, blocks: list[int]) -> None:
        self.engine.unpin(blocks)
        if self.ready and not self._busy:
            self._turn()

    def drain(self) -> None:
        """Take no new sequences from now on, and end once nothing is left."""
        self.protocol.draining = True
        if self.ready and not self._busy:
            self._turn()

    def evict(self, moving: bool = False) -> int | None:
        """Return a sequence to the API server. Return the sequence's id; None if no sequence qualifies.

        With ``moving``, the sequence must have an unfinished transfer.
        """
        there = self.engine.live()
        for sequence, owner in self.protocol._owners.items():
            if sequence not in there or (moving and not self.engine.moves(sequence)):
                continue
            if owner.front in self.links:
                event = m.TokenEvent(sequence=sequence, finish="evicted")
                ended = [one for one in self.engine.finish(sequence) if one.sequence != sequence]
                self._send(self.protocol.events([event, *ended]))
                return sequence
        return None

    def check(self) -> None:
        """Raise Violation unless the live sequences are exactly the sequences owned by API servers."""
        live = self.engine.live() | self.engine.given_back()
        owned = self.protocol._owners.keys()
        if live != owned:
            raise Violation(f"{self.name}: live {sorted(live)}, owned by fronts {sorted(owned)}")
        check_reservations(self)
