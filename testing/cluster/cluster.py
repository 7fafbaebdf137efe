"""A whole cluster on virtual time: API servers, engines, a supervisor, clients, a network, and faults.

The fleets and schedulers are the product's code. All randomness comes from one seed, so the seed determines
the whole schedule.

Nothing happens between two events. The loop takes the earliest event, and its receiver runs the product's
code. A simulated group of ranks plugs in behind ``testing.cluster.cluster_engine.Engine``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from testing.cluster import faults
from testing.cluster.check import ANSWERED, HORIZON, Violation, require, token_key
from testing.cluster.clients import MOST_TRIES, Client, random_client
from testing.cluster.collectives import Collectives
from testing.cluster.directory import check_end
from testing.cluster.engine_process import EngineProcess
from testing.cluster.excuses import check_prefixes
from testing.cluster.front import FrontProcess
from testing.cluster.idle import check_idle
from testing.cluster.network import Link, Network
from testing.cluster.ranks import Pace, Replica, patience_of
from testing.cluster.sim_tier import SimDisk
from testing.cluster.supervisor import Supervisor
from testing.cluster.tiny import tiny_engine
from testing.cluster.transfer_world import TransferWorld
from weft.control.fleet.instances import InstanceState
from weft.group.types import Lease
from weft.sim.timeline import Timeline
from weft.types.messages import ids_to_bytes

EAGER = (2, 4, 5, 8, 9)
"""Last digits of the seeds of eager schedules: more faults, and most faults meet requests under way.

Seeds that once showed bugs have other last digits, so the schedules of these seeds stay as before.
"""
QUIET = 6
"""Consecutive quiet checks that end a schedule with roles. Blocked sequences there are no work of the engine,
so API servers learn of the end of a sequence only with the next heartbeat."""
SETTLE = 0.25
"""Virtual seconds between two checks for quiet."""
REAPED_S = 0.02
"""Virtual seconds within which ranks end after the order to end."""


class Cluster(Timeline):
    """One schedule. ``run`` raises Violation if an invariant does not hold."""

    def __init__(self, seed: int, log: Callable[[float, str], None] | None = None) -> None:
        """Build the schedule of ``seed``. ``log`` receives (virtual seconds, text) for every event."""
        super().__init__(seed, log)
        self.seed = seed
        self.disk = SimDisk(seed)
        """The disk of the KV tier."""
        self.eager = seed % 10 in EAGER
        """True for an eager schedule: see ``EAGER``."""
        rng = self.rng
        self.faults: Counter[str] = Counter()
        """Faults with a visible effect, by kind."""
        self.groups_lost = 0
        """Number of epochs lost while running."""
        self._mishaps: Counter[tuple[str, int]] = Counter()
        """(kind, rank) -> number of failures still planned."""
        self._links = 0
        self._sequence = 1
        self.section, self.kv = tiny_engine(rng)
        self.network = Network(self)
        self.row_errors: dict[int, int] = {}
        """Key of a sequence -> position with non-finite logits."""
        self.poison: dict[int, int] = {}
        """Key of a sequence -> position at which the computing process dies."""
        self.poison_left = 0
        self.slow_starts = 0
        """Number of future processes that will not listen, or not load, in time."""
        engine_processes = rng.choice((1, 2, 2, 3, 4))
        fronts = rng.choice((1, 1, 2, 3))
        expert_group = "d" if engine_processes > 1 and rng.random() < 0.15 else ""
        self.transfers = TransferWorld(self, engine_processes)
        """The roles of instances, and the transfers between instances of different roles."""
        paired = self.transfers.paired
        expert_group = "" if paired else expert_group
        self.counts["clusters of two roles"] += paired
        """Number of schedules with separate roles."""
        self.instances = dict.fromkeys(self.transfers.roles, expert_group)
        self.tensor = rng.choice((1, 1, 1, 1, 1, 2, 2, 3))
        """Ranks per group."""
        self.counts["groups of several ranks"] += self.tensor > 1
        """Number of schedules with groups of several ranks."""
        self.lag = rng.choice((0, 1, 1))
        """Lag of ``Membership.counts``; the product uses 1."""
        self.rank_budget = rng.choice((1, 2, 4, 4))
        """Maximum number of epochs lost by one engine process."""
        self.leases: list[Lease | None] = [None] * len(self.instances)
        self.replicas = self._make_replicas(expert_group)
        self.fronts: list[FrontProcess] = []
        self.supervisor = Supervisor(self, self.instances, rng.choice((1, 3, 5, 8)))
        self.network.remakes = rng.random() < 0.7
        rng.random()  # unused: keeps the schedules of the seeds recorded in tests/testing
        self._start(fronts)
        self.clients = [random_client(rng, number) for number in range(rng.choice((1, 2, 3, 3, 4, 6)))]
        self.disk.share_prompts(self.clients)
        self.counts["clusters that encode images apart"] += self.transfers.images.there
        """Number of schedules with encode groups."""
        for client in self.clients:
            self.transfers.images.show(client)
            self.at(client.at, None, self.ask, client)
        self.pending_faults = faults.plan(self)

    def _start(self, fronts: int) -> None:
        """Start API servers and engines."""
        rng = self.rng
        # The first API server always waits for all instances; later ones may join a running cluster.
        for number in range(fronts):
            joins = number > 0 and rng.random() < 0.1
            front = FrontProcess(self, f"front{number}", self.instances, joins)
            if joins:
                self.at(rng.uniform(0.3, 1.0), None, self._join, front)
            else:
                self.fronts.append(front)
        for name in self.instances:
            self.supervisor.start(name)

    # -- time

    def run(self) -> None:
        """Run until the cluster is quiet, and check the final state. Raise Violation."""
        settled = 0.0
        quiet = 0
        enough = QUIET if self.transfers.paired else 2
        advance = self.advance
        while self._heap:
            advance()
            if self.now >= settled:
                settled = self.now + SETTLE
                quiet = quiet + 1 if self._quiet() else 0
                if quiet >= enough:  # messages to API servers have arrived by now
                    break
                limit = HORIZON if all(client.outcome is not None for client in self.clients) else ANSWERED
                if self.now > limit:
                    raise Violation(f"not at an end after {limit:g} s: {self._unfinished()}")
        self._finish()

    def happened(self, kind: str) -> None:
        """Count a fault with an observed effect."""
        self.faults[kind] += 1

    # -- the end

    def _quiet(self) -> bool:
        """Return True if no fault is planned, every client has an outcome, and no process has work or a
        message to read.
        """
        # Quiet means: no fault or request is left, no process stands still or works, no transfer is open, and
        # no message to an engine is under way.
        if self.pending_faults or any(client.outcome is None for client in self.clients):
            return False
        engine_processes = [
            engine_process
            for engine_process in self.supervisor.engine_processes.values()
            if engine_process.alive
        ]
        if any(front.alive and front.stalled_until > self.now for front in self.fronts):
            return False
        if any(
            engine_process.stalled_until > self.now or engine_process.engine.has_work()
            for engine_process in engine_processes
        ):
            return False
        if any(engine_process.engine.runner.pins for engine_process in engine_processes):
            return False
        tiers = [engine_process.engine.tier for engine_process in engine_processes]
        if any(tier is not None and tier.busy for tier in tiers):
            return False
        if any(
            engine_process.ready and not engine_process.group.running for engine_process in engine_processes
        ):
            return False
        if any(
            transfers.stats(None).open
            for engine_process in engine_processes
            for transfers in engine_process.engine.all_transfers
        ):
            return False
        links = [link for front in self.fronts for link in front.links.values()]
        # Heartbeats to API servers are always under way, so only the other direction counts.
        return all(not (link.up and link.to_engine_process) and link.held_until <= self.now for link in links)

    def _unfinished(self) -> str:
        waiting = [client.number for client in self.clients if client.outcome is None]
        entries = {front.name: list(front.fleet.entries) for front in self.fronts if front.alive}
        return f"clients {waiting}, open sequences {entries}, faults to come {self.pending_faults}"

    def _finish(self) -> None:
        """Check the final state of a quiet cluster, add all counts, and end every engine. Raise Violation."""
        for client in self.clients:
            self.counts[f"requests {client.outcome}"] += 1
        for front in self.fronts:
            fleet = front.fleet
            self.counts["fail-overs"] += fleet.failovers
            self.counts["pauses"] += fleet.pauses
            self.counts["late events"] += fleet.late_events
            losses = sum(stream.losses for stream in front.streams.values())
            processes = len({link.engine_process for link in front.links.values()})
            counted = f"{front.name}: {fleet.table.restarts} restarts, and it saw {processes} processes"
            seen = len({link.engine_process.instance for link in front.links.values()})
            require(fleet.table.restarts <= processes - seen, counted)
            require(fleet.failovers <= losses, f"{front.name}: {fleet.failovers} fail-overs, {losses} losses")
            if not front.alive:
                continue
            require(not fleet.entries, f"{front.name}: sequences {list(fleet.entries)} are open at the end")
            for knew, number in fleet.router.decisions.items():
                self.counts[f"decisions: {knew}"] += number
            for name, one in fleet.table.instances.items():
                check_prefixes(front, one)
                told = "was retired" if name in front.retired_instances else "was started, or revived"
                retired = one.state is InstanceState.RETIRED
                known = retired == (name in front.retired_instances)
                require(known, f"{front.name}: {name} is {one.state.value}, and {told}")
                load = one.load if one.alive else len(one.open)
                require(not load, f"{front.name}: {name} has a load of {load:g} at the end")
        # A schedule without faults and without impatient clients must run without any recovery.
        disturbed = any(self.counts[why] for why in ("paused", "abandoned", "ended by the text side"))
        if not self.faults and not disturbed:
            for name in ("fail-overs", "retired", *(() if self.transfers.paired else ("late events",))):
                require(not self.counts[name], f"{name} without a fault")
            require(not self.supervisor.restarts, "restarts without a fault")
            require(not self.counts["epochs lost"], "an epoch was lost without a fault")
            late = sum(
                engine_process.engine.late_images
                for engine_process in self.supervisor.engine_processes.values()
            )
            require(not late, "images were late without a fault")
        check_end(self)
        for engine_process in self.supervisor.engine_processes.values():
            if engine_process.alive and engine_process.ready:
                self._check_idle(engine_process)
        self._reap()

    def _reap(self) -> None:
        """End all engines in order, together with all ranks. Raise Violation if a process is left."""
        ended = [
            engine_process
            for engine_process in self.supervisor.engine_processes.values()
            if engine_process.alive and engine_process.ready
        ]
        for engine_process in ended:
            engine_process.group.end(dismiss=True)
        end = self.now + REAPED_S
        while self._heap and self._heap[0][0] <= end:
            self.advance()
        for engine_process in ended:
            for process in engine_process.replica.living.values():
                # A stopped process cannot read the order to end, and the host of a remote rank restarts the
                # rank.
                excused = process.stalled_until > self.now or process.rank in engine_process.replica.remote
                require(excused, f"{process.name} runs, and its engine process has ended in order")
        for replica in self.replicas.values():
            replica.close()
            left = sorted(one.name for one in replica.by_peer.values() if one.alive)
            require(not left, f"processes {left} of {replica.name} are not reaped")

    def _check_idle(self, engine_process: EngineProcess) -> None:
        self.transfers.tally(engine_process)
        check_idle(engine_process)

    # -- processes and links

    def befalls(self, kind: str, rank: int) -> bool:
        """Use up one planned failure of ``kind`` at ``rank``. Return True if there was one. See
        ``Mishaps``."""
        if not self._mishaps or not self._mishaps[kind, rank]:
            return False
        self._mishaps[kind, rank] -= 1
        self.happened(faults.MISHAPS[kind])
        return True

    def plan_mishap(self, kind: str, rank: int, times: int) -> None:
        """Let ``kind`` fail ``times`` times at ``rank``: see ``Mishaps``."""
        self._mishaps[kind, rank] += times

    def seen(self, kind: str) -> None:
        """Count an effect reported by a rank. See ``Mishaps``."""
        self.happened(kind)

    def _make_replicas(self, expert_group: str) -> dict[str, Replica]:
        """Return the ranks of every instance. Instances of an expert-parallel group share epochs."""
        rng, pace, tensor = self.rng, Pace(), self.tensor
        shared = Collectives(self, patience_of(pace), 0.05)
        replicas: dict[str, Replica] = {}
        for number, name in enumerate(self.instances):
            ranks = range(number * tensor, (number + 1) * tensor)
            remote = frozenset(rank for rank in ranks[1:] if rng.random() < 0.15)
            collectives = shared if expert_group else Collectives(self, patience_of(pace), 0.05)
            replica = Replica(
                self, name, ranks, collectives=collectives, mishaps=self, table=dict, remote=remote, pace=pace
            )
            if self.transfers.moves(name):
                replica.make_sides = partial(self.transfers.make_sides, replica)
            if expert_group:
                replica.size = tensor * len(self.instances)
            replicas[name] = replica
        for replica in replicas.values():
            if expert_group:
                replica.expert_group = list(replicas.values())
            replica.start_remote()
        return replicas

    def start_times(self, engine_process: EngineProcess, listen: float, load: float) -> tuple[float, float]:
        """Return (seconds until a process listens, seconds from then until the process serves).

        Uses up one planned slow start.
        """
        if self.slow_starts and self.supervisor.restarts:
            self.slow_starts -= 1
            self.happened("slow upgrade" if self.supervisor.drains else "slow start")
            engine_process.slow = True
            return (listen, 30.0) if self.rng.random() < 0.5 else (30.0, load)
        return listen, load

    def new_link(self, front: FrontProcess, engine_process: EngineProcess) -> Link:
        """Return an unconnected link of ``front`` to ``engine_process``, with a new number.

        Earlier stalls of the process count as silence of the link.
        """
        self._links += 1
        link = Link(self._links, front, engine_process, self.rng.uniform(0.0002, 0.004))
        link.excused = engine_process.excused
        link.silence = max(0.0, engine_process.stalled_until - self.now)
        return link

    def connect(self, link: Link) -> None:
        """Connect the link, or put the link in the process's list until the process listens.

        Ignored for a dead process or a link given up.
        """
        engine_process = link.engine_process
        if not engine_process.alive or link.unlinked:
            return
        if not engine_process.listens:
            engine_process.connecting.append(link)
            return
        link.up = True
        engine_process.links[link.connection] = link
        self.at(self.now + link.latency, link.front, link.front.linked, link)

    def disconnect(self, link: Link) -> None:
        """Close the link on behalf of the API server."""
        self.network.cut(link, lingers=self.rng.random() < 0.3)
        self.at(self.now + self.rng.random() * 0.05, link.engine_process, link.engine_process.forget, link)

    def end_engine_process(
        self, engine_process: EngineProcess, lingers: bool | None = None, dismiss: bool | None = None
    ) -> bool:
        """End the engine process now, with its group.

        Return False if the process was dead. For ``dismiss`` see ``Group.end``.

        Peers, API servers, the supervisor and the rest of an expert-parallel group notice the end later.
        ``lingers``: see ``_break``.
        """
        if not engine_process.alive:
            return False
        epoch = -1
        if engine_process.engine.runner.group is not None:
            epoch = engine_process.group.membership.epoch
            engine_process.group.end(dismiss)
        engine_process.alive = False
        # The rest of the expert-parallel group fails in its next collective.
        for other in self.supervisor.others(engine_process):
            other.expert_group_gone = True
            if other.engine.runner.group is not None:
                self.after(0.01, 0.2, other, other.group.peer_replica_gone, epoch)
        self.note(engine_process.name, "..", "", "its process ends")
        self.transfers.tally(engine_process)
        if engine_process.engine.runner.sides is not None:
            engine_process.engine.runner.sides.close()
        for peers, peer in engine_process.watched_by:
            peers.end(peer)
        for front in self.fronts:
            for link in front.links.values():
                if link.engine_process is engine_process:
                    self._break(link, self.rng.random() < 0.5 if lingers is None else lingers)
        # The supervisor and each API server notice the end at different times.
        self.at(self.now + self.rng.random() * 0.03, None, self.supervisor.ended, engine_process)
        return True

    def _break(self, link: Link, lingers: bool) -> int:
        """Break a link and let both ends notice later.

        Return the number of lost messages. ``lingers``: messages to the API server still arrive.
        """
        link.excused = True
        if not link.up:
            return 0
        gone = self.network.cut(link, lingers)
        rng = self.rng
        self.at(self.now + rng.random() * 0.05, link.front, link.front.lost, link, "the connection broke")
        late = 3.0 if rng.random() < 0.1 else 0.05
        self.at(self.now + rng.random() * late, link.engine_process, link.engine_process.forget, link)
        return gone

    def break_link(self, link: Link) -> bool:
        """Break the connection. Both ends notice later. Return True if the connection was up."""
        was_up = link.up
        self._break(link, self.rng.random() < 0.3)
        return was_up

    def end_front(self, front: FrontProcess) -> bool:
        """End the API server's process now; the clients ask another one. Return True if the process was
        alive."""
        if not front.alive:
            return False
        front.alive = False
        self.note(front.name, "..", "", "its process ends")
        for link in front.links.values():
            if link.up:
                self._break(link, False)
        for client in (*front.clients.values(), *front.asked.values()):
            self.at(self.now + self.rng.random() * 0.1, None, self.ask, client)
        front.clients.clear()
        front.asked.clear()
        return True

    def front_failed(self, front: FrontProcess) -> None:
        """End an API server whose fleet has failed, and count it.

        Raise Violation if instances able to serve are left.
        """
        gone = not self.transfers.can_serve(self.supervisor.retired | self.supervisor.removed)
        states = [one.state for one in front.fleet.table.instances.values()]
        require(
            gone or not front.fleet.table.complete, f"{front.name} failed, and instances are left: {states}"
        )
        up = InstanceState.UP in states and not self.transfers.paired
        require(not up or not gone, f"{front.name} failed while an instance is up")
        self.count("fronts failed")
        self.at(self.now, None, self.end_front, front)

    def stopped(self, engine_process: EngineProcess) -> None:
        """End an engine that received the order to shut down. Raise Violation if an API server still uses the
        engine."""
        others = [front.name for front in self.fronts if front.alive and not front.closing]
        require(not others, f"{engine_process.name} was shut down while {others} use it")
        engine_process.close_transfers()
        self.end_engine_process(engine_process, dismiss=True)

    def poisoned(self, engine_process: EngineProcess) -> None:
        """End an engine process killed by a poisoned position.

        The poison loses its effect after the planned number of deaths.
        """
        self.poison_left -= 1
        if not self.poison_left:
            self.poison.clear()
        self.happened("poison")
        self.end_engine_process(engine_process)

    def _join(self, front: FrontProcess) -> None:
        """Begin an API server while others already serve."""
        self.count("fronts that joined later")
        self.fronts.append(front)
        self.supervisor.introduce(front)

    # -- clients

    def ask(self, client: Client) -> None:
        """Send the client's request to a random live API server.

        Without any, or after ``MOST_TRIES`` tries, the outcome is "refused".
        """
        alive = [front for front in self.fronts if front.alive and not front.closing]
        client.tries += 1
        if not alive or client.tries > MOST_TRIES:
            client.outcome = "refused"
            return
        front = self.rng.choice(alive)
        first = self._sequence
        self._sequence += client.choices
        self.note(
            "client", "=>", front.name, f"request {client.number}: {client.choices} choices from {first}"
        )
        front.asked[client.number] = client
        self.at(self.now, front, self._open, client, front, first)
        if front.stalled_until > self.now:
            self.count("asked a stalled front")

    def _open(self, client: Client, front: FrontProcess, first: int) -> None:
        """Open a client's request at ``front``, and plan the client's pauses and leave."""
        front.open(client, first)
        for after, seconds in client.pauses:
            self.at(self.now + after, front, front.pause, first, True)
            self.at(self.now + after + seconds, front, front.pause, first, False)
        if client.leaves is not None:
            self.at(self.now + client.leaves, front, front.abandon, first)

    def client_ended(self, client: Client, front: FrontProcess, outcome: str) -> None:
        """Record the end of a request at ``front``.

        A refused request is sent again later, at most ``MOST_TRIES`` times.
        """
        self.note(front.name, "=>", "client", f"request {client.number} {outcome}")
        if outcome == "refused" and client.tries <= MOST_TRIES:
            self.at(self.now + 0.3, None, self.ask, client)
        else:
            client.outcome = outcome

    def keys_of(self, client: Client) -> list[int]:
        """Return the keys of all sequences of the request."""
        prompt = ids_to_bytes(client.prompt)
        return [token_key(prompt, client.seed, choice) for choice in range(client.choices)]

    def pin(self) -> str:
        """Return an instance to which a request may be pinned."""
        return self.rng.choice([name for name, role in self.transfers.roles.items() if role != "encode"])


def simulate_cluster(seed: int, log: Callable[[float, str], None] | None = None) -> Cluster:
    """Run the schedule of ``seed`` and return the cluster. Raise Violation if an invariant does not hold."""
    cluster = Cluster(seed, log)
    try:
        cluster.run()
    except Violation:
        raise
    except Exception as error:  # any exception of the product's code is a violation
        raise Violation(f"{type(error).__name__}: {error}") from error
    return cluster
