"""The faults of a schedule, with proof of the effects.

A fault is planned before anything runs. At its time a fault picks a victim among the present processes and
links. A fault counts only with a visible effect: a live process ends, messages under way are late or lost, or
steps in flight are lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from testing.cluster.engine_process import EngineProcess
from testing.cluster.network import Link
from testing.cluster.ranks import RankProcess
from testing.cluster.supervisor import Supervisor
from testing.cluster.transfers import transfer_faults
from weft.common.errors import EngineDead

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.front import FrontProcess


FOR_EVER = 1e6


def plan(cluster: Cluster) -> int:
    """Choose faults and times for the schedule. Return the number of planned faults."""
    rng = cluster.rng
    # Some schedules run without faults, to check that nothing is lost without a reason.
    if rng.random() < 0.1:
        return 0
    kinds = {kind: weight for kind, (weight, _) in KINDS.items() if _can_happen(cluster, kind)}
    numbers = (1, 2, 3, 4) if cluster.eager else (1, 1, 2, 3)
    planned = 0
    for kind in rng.choices(list(kinds), list(kinds.values()), k=rng.choice(numbers)):
        at = _during_a_request(cluster) if cluster.eager else 0.4 + rng.random() * 0.9
        # Repeated kills lead to half-open and retired instances.
        if kind == "head killed" and rng.random() < 0.3:
            planned += _plan_row(cluster, at)
        else:
            cluster.at(at, None, _fire, cluster, KINDS[kind][1], kind)
            planned += 1
    return planned + _plan_members(cluster)


def _plan_members(cluster: Cluster) -> int:
    """Let instances leave, leases end and names get a second process in some schedules. Return the number of
    planned changes.

    A random generator for each kind keeps the other schedules as they are without the kind."""
    planned = 0
    for kind, (label, share, numbers, order) in OF_MEMBERS.items():
        rng = random.Random(f"{label} of {cluster.seed}")
        times = [rng.uniform(0.4, 1.5) for _ in range(rng.choice(numbers))] if rng.random() < share else []
        for at in times:
            cluster.at(at, None, _fire, cluster, partial(_change_members, order=order), kind)
        planned += len(times)
    return planned


def _change_members(cluster: Cluster, order: Callable[[Supervisor, str], bool]) -> bool:
    """Call the supervisor's ``order`` for a random instance. Return the result."""
    engine_process = _engine_process(cluster)
    return engine_process is not None and order(cluster.supervisor, engine_process.instance)


def _during_a_request(cluster: Cluster) -> float:
    """Return a time soon after a random client's request, when messages and steps are under way."""
    rng = cluster.rng
    return rng.choice(cluster.clients).at + rng.random() * rng.choice((0.02, 0.1, 0.3))


def _can_happen(cluster: Cluster, kind: str) -> bool:
    if kind in OF_RANKS and cluster.tensor == 1:
        return False
    return cluster.transfers.paired or kind not in OF_TRANSFERS


def _plan_row(cluster: Cluster, at: float) -> int:
    """Plan to kill one engine again and again, soon after each start. Return the number of kills."""
    rng = cluster.rng
    instance = rng.choice(list(cluster.instances))

    def kill(cluster: Cluster) -> bool:
        return cluster.end_engine_process(cluster.supervisor.engine_processes[instance])

    times = [at + 0.5 * again + rng.random() * 0.2 for again in range(rng.choice((2, 3, 5)))]
    for time in times:
        cluster.at(time, None, _fire, cluster, kill, "head killed")
    return len(times)


def _fire(cluster: Cluster, apply: Callable[[Cluster], bool], kind: str) -> None:
    cluster.pending_faults -= 1
    cluster.note("fault", "..", "", kind)
    if apply(cluster):
        cluster.happened(kind)


# -- choice of the victim


def _engine_process(cluster: Cluster, ready: bool = True) -> EngineProcess | None:
    """Return a random live engine process, preferably with work; None if there is none."""
    alive = [
        engine_process
        for engine_process in cluster.supervisor.engine_processes.values()
        if engine_process.alive and (engine_process.ready or not ready)
    ]
    busy = [
        engine_process
        for engine_process in alive
        if engine_process.ready and engine_process.engine.has_work()
    ]
    return cluster.rng.choice(busy or alive) if alive else None


def _front(cluster: Cluster) -> FrontProcess | None:
    """Return a random live API server, preferably with requests; None if there is none."""
    alive = [front for front in cluster.fronts if front.alive and not front.closing]
    busy = [front for front in alive if front.clients]
    return cluster.rng.choice(busy or alive) if alive else None


def _link(cluster: Cluster) -> Link | None:
    """Return a random connected link, preferably to an engine with work; None if there is none."""
    front = _front(cluster)
    links = [] if front is None else [one for one in front.links.values() if one.up]
    busy = [one for one in links if one.engine_process.engine.has_work()]
    return cluster.rng.choice(busy or links) if links else None


def _rank(cluster: Cluster) -> RankProcess | None:
    """Return a random rank process, preferably one that takes steps; None if there is none."""
    engine_process = _engine_process(cluster)
    if engine_process is None:
        return None
    living = list(engine_process.replica.living.values())
    running = [process for process in living if process.running and process.stalled_until <= cluster.now]
    return cluster.rng.choice(running or living) if living else None


# -- the faults: each returns True if the effect was visible at once


def _kill_engine_process(cluster: Cluster) -> bool:
    engine_process = _engine_process(cluster, ready=False)
    return engine_process is not None and cluster.end_engine_process(engine_process)


def _fail_engine_process(cluster: Cluster) -> bool:
    """Let an engine fail with EngineDead. Return False without a running engine."""
    engine_process = _engine_process(cluster)
    if engine_process is None or engine_process.stalled_until > cluster.now:
        return False
    engine_process.fail(EngineDead("the engine failed; see the server's log"))
    return True


def _stall(cluster: Cluster, process: EngineProcess | FrontProcess, seconds: float) -> bool:
    """Let a process stand still for ``seconds``. Return False if the process stands still already."""
    if process.stalled_until > cluster.now:
        return False
    process.stalled_until = cluster.now + seconds
    cluster.note(process.name, "..", "", f"stands still for {seconds:.3f} s")
    return True


def _stall_engine_process(cluster: Cluster) -> bool:
    """Let an engine stand still: shortly, or so long that the API servers give the engine up.

    Return True if it does.
    """
    engine_process = _engine_process(cluster)
    seconds = cluster.rng.uniform(0.05, 1.0) if cluster.rng.random() < 0.6 else cluster.rng.uniform(5.0, 9.0)
    if engine_process is None or not _stall(cluster, engine_process, seconds):
        return False
    engine_process.replica.excuse(seconds)
    for front in cluster.fronts:
        for link in front.links.values():
            if link.engine_process is engine_process:
                link.silence += seconds
    return True


def _stall_front(cluster: Cluster) -> bool:
    """Let an API server stand still.

    Return True if it does. Even a long stall is no reason to give an engine up.
    """
    front = _front(cluster)
    seconds = cluster.rng.uniform(0.05, 1.0) if cluster.rng.random() < 0.5 else cluster.rng.uniform(3.0, 9.0)
    if front is None or not _stall(cluster, front, seconds):
        return False
    cluster.at(front.stalled_until, front, front.woke, seconds)
    return True


def _poison(cluster: Cluster) -> bool:
    """Poison a request: engines die at one of the positions. Return False: counted at the first death."""
    client = cluster.rng.choice(cluster.clients)
    key = cluster.rng.choice(cluster.keys_of(client))
    cluster.poison[key] = len(client.prompt) + cluster.rng.randrange(3)
    cluster.poison_left = cluster.rng.choice((1, 2, 3, 9))
    return False


def _row_error(cluster: Cluster) -> bool:
    """Make logits of one sequence non-finite.

    Return False: counted when the sequence fails for this reason.
    """
    client = cluster.rng.choice(cluster.clients)
    key = cluster.rng.choice(cluster.keys_of(client))
    cluster.row_errors[key] = len(client.prompt) + cluster.rng.randrange(3)
    return False


def _slow_start(cluster: Cluster) -> bool:
    """Kill an engine, and delay the next starts beyond the limit.

    Return False: counted when such a process starts.
    """
    cluster.slow_starts = cluster.rng.choice((1, 2))
    _kill_engine_process(cluster)
    return False


def _kill_front(cluster: Cluster) -> bool:
    front = _front(cluster)
    return front is not None and cluster.end_front(front)


def _close_front(cluster: Cluster) -> bool:
    """End an API server in order; a moment later all connections are closed.

    Return False without a running API server.
    """
    front = _front(cluster)
    if front is None or front.stalled_until > cluster.now:
        return False
    front.close()
    cluster.at(cluster.now + 0.05, None, cluster.end_front, front)
    return True


def _break_link(cluster: Cluster) -> bool:
    link = _link(cluster)
    if link is None:
        return False
    return cluster.network.reset(link) if cluster.network.remakes else cluster.break_link(link)


def _partition(cluster: Cluster) -> bool:
    """Silence the link of one API server to an engine, or all links of the engine, for a while.

    Return False without a link.

    Afterwards all messages arrive late, or the links break.
    """
    rng = cluster.rng
    link = _link(cluster)
    if link is None:
        return False
    seconds = rng.uniform(0.1, 1.0) if rng.random() < 0.6 else rng.uniform(4.0, 8.0)
    # In some schedules the engine is cut off from all API servers.
    links = [link]
    if rng.random() < 0.4:
        links = [
            one
            for front in cluster.fronts
            for one in front.links.values()
            if one.engine_process is link.engine_process and one.up
        ]
    breaks = rng.random() < 0.3
    for one in links:
        cluster.network.hold(one, seconds)
        if breaks:
            cluster.at(cluster.now + seconds * 0.9, None, cluster.break_link, one)
    return True


def _delay(cluster: Cluster) -> bool:
    """Delay all messages under way on a link. Return False without a link."""
    link = _link(cluster)
    if link is None:
        return False
    cluster.network.hold(link, cluster.rng.uniform(0.02, 0.4))
    return True


def _duplicate(cluster: Cluster) -> bool:
    """Duplicate the next Submit of a link. Return False: counted when the Submit is sent twice."""
    link = _link(cluster)
    if link is not None:
        link.duplicate = True
    return False


def _evict(cluster: Cluster) -> bool:
    """Let an engine return a sequence, which any engine may continue. Return True if one was returned."""
    engine_process = _engine_process(cluster)
    if (
        engine_process is None
        or engine_process.stalled_until > cluster.now
        or engine_process.engine.recovering
    ):
        return False
    return engine_process.evict() is not None


def _drain(cluster: Cluster) -> bool:
    """Upgrade an engine: drain the process, then start another one. Return True if the drain begins."""
    engine_process = _engine_process(cluster)
    return engine_process is not None and cluster.supervisor.drain(engine_process.instance)


def _slow_upgrade(cluster: Cluster) -> bool:
    """Upgrade an engine, and delay the next starts beyond the limit.

    Return False: counted when such a process starts.
    """
    engine_process = _engine_process(cluster)
    if engine_process is not None and cluster.supervisor.drain(engine_process.instance):
        cluster.slow_starts = cluster.rng.choice((1, 2))
    return False


def _end_rank(cluster: Cluster, process: RankProcess | None) -> bool:
    """End the process of a rank now. Return True if the process was alive."""
    if process is None or not process.alive:
        return False
    process.end()
    cluster.happened("rank killed")
    return True


def _kill_rank(cluster: Cluster) -> bool:
    _end_rank(cluster, _rank(cluster))
    return False  # already counted


def _stop_rank(cluster: Cluster) -> bool:
    """Stop a rank.

    Return False without a rank to stop. The rank wakes soon, or after the group gave the rank up, or never.
    """
    process = _rank(cluster)
    if process is None or process.stalled_until > cluster.now:
        return False
    rng = cluster.rng
    seconds = rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.6, 1.5), rng.uniform(1.5, 3.0), FOR_EVER))
    process.stop(seconds)
    cluster.note(process.name, "..", "", f"is stopped for {seconds:.3f} s")
    if seconds == FOR_EVER and process.rank in process.replica.remote:  # the rank's own host ends the process
        cluster.at(cluster.now + process.replica.pace.timeout, None, process.end)
    return True


def _rank_raises(cluster: Cluster) -> bool:
    """Let the next step raise at a rank, or at the engine's own rank.

    Return False: counted at the exception.
    """
    process = _rank(cluster)
    if process is not None:
        own = cluster.rng.random() < 0.25
        cluster.plan_mishap("step", process.replica.ranks[0] if own else process.rank, 1)
    return False


def _late_report(cluster: Cluster) -> bool:
    """Delay the reports of a rank. Return False: counted when the report of a step is late."""
    process = _rank(cluster)
    if process is not None:
        rng = cluster.rng
        seconds = rng.uniform(0.05, 0.5) if rng.random() < 0.6 else rng.uniform(0.9, 1.6)
        process.delay_reports(seconds)
    return False


def _lost_report(cluster: Cluster) -> bool:
    """Lose the next report of a step, with the rank's connection.

    Return False: counted when a report is lost.
    """
    process = _rank(cluster)
    if process is not None:
        process.loses_report = True
    return False


def _cannot_load(cluster: Cluster) -> bool:
    """Kill a rank, and let the next processes fail to load. Return False: counted when one fails."""
    process = _rank(cluster)
    if process is not None:
        cluster.plan_mishap("load", process.rank, cluster.rng.choice((1, 1, 2, 5)))
        _end_rank(cluster, process)
    return False


def _cannot_form(cluster: Cluster) -> bool:
    """Kill a rank, and let the rank or the engine fail to form epochs.

    Return False: counted when one fails.
    """
    process = _rank(cluster)
    if process is not None:
        times = cluster.rng.choice((1, 1, 2, 5))
        if cluster.rng.random() < 0.3:
            cluster.plan_mishap("connect", process.replica.ranks[0], times)
        else:
            cluster.plan_mishap("form", process.rank, times)
        _end_rank(cluster, process)
    return False


def _hold(cluster: Cluster) -> bool:
    """Pin blocks of a sequence as if an outside process wrote to the blocks.

    Return True if blocks are pinned. Often a rank is killed meanwhile.
    """
    engine_process = _engine_process(cluster)
    if (
        engine_process is None
        or engine_process.stalled_until > cluster.now
        or engine_process.engine.recovering
    ):
        return False
    held = engine_process.pin(cluster.rng.uniform(0.1, 1.5))
    living = list(engine_process.replica.living.values())
    if held and living and cluster.rng.random() < 0.7:
        cluster.after(0.0, 0.1, None, _end_rank, cluster, cluster.rng.choice(living))
    return held


def _kill_rank_again(cluster: Cluster) -> bool:
    """Kill a rank whenever its group runs again, until the engine has lost too many epochs.

    Return False: counted then.
    """
    process = _rank(cluster)
    if process is not None:
        instance = process.replica.name
        _end_rank(cluster, process)
        for again in range(1, 6):
            cluster.at(cluster.now + again * cluster.rng.uniform(0.5, 0.9), None, _kill_of, cluster, instance)
    return False


def _kill_of(cluster: Cluster, instance: str) -> None:
    _end_rank(cluster, next(iter(cluster.replicas[instance].living.values()), None))


def _lost_word(cluster: Cluster) -> bool:
    """Lose the next report of a rank about a transfer, with the connection.

    Return False: counted when it is lost.
    """
    process = _rank(cluster)
    if process is not None:
        process.loses_word = True
    return False


OF_TRANSFERS = {*transfer_faults.KINDS, "room report lost"}
"""Kinds of faults that need transfers between groups."""
MISHAPS = {
    "load": "rank cannot load",
    "form": "rank cannot form",
    "connect": "rank cannot form",
    "step": "rank raised",
}
"""Planned failure of a rank -> kind of fault in the report."""
OF_RANKS = {
    *MISHAPS.values(),
    "rank killed",
    "rank stopped",
    "report late",
    "report lost",
    "room report lost",
    "group given up",
}
"""Kinds of faults that need a group of several ranks."""
KINDS: dict[str, tuple[int, Callable[[Cluster], bool]]] = {
    "head killed": (8, _kill_engine_process),
    "engine failed": (3, _fail_engine_process),
    "head stalled": (4, _stall_engine_process),
    "front stalled": (4, _stall_front),
    "poison": (3, _poison),
    "row error": (4, _row_error),
    "slow start": (2, _slow_start),
    "front killed": (4, _kill_front),
    "front closed": (4, _close_front),
    "link broken": (5, _break_link),
    "partition": (5, _partition),
    "delay": (4, _delay),
    "submit sent twice": (6, _duplicate),
    "evicted": (7, _evict),
    "head upgraded": (4, _drain),
    "slow upgrade": (3, _slow_upgrade),
    "block on hold": (8, _hold),
    "rank killed": (8, _kill_rank),
    "rank stopped": (8, _stop_rank),
    "rank raised": (5, _rank_raises),
    "report late": (5, _late_report),
    "report lost": (5, _lost_report),
    "rank cannot load": (4, _cannot_load),
    "rank cannot form": (4, _cannot_form),
    "group given up": (4, _kill_rank_again),
    **transfer_faults.KINDS,
    "room report lost": (10, _lost_word),
}
"""Kind -> (weight in the choice, function that applies the fault and returns True for a visible effect).

For a later effect, the observer of the effect calls ``Cluster.happened``.
"""
OF_MEMBERS: dict[str, tuple[str, float, tuple[int, ...], Callable[[Supervisor, str], bool]]] = {
    "instance left": ("members", 0.2, (1, 1, 2), Supervisor.remove),
    "lease lapsed": ("leases", 0.15, (1, 2, 3), Supervisor.lapse),
    "scaled down": ("scales 12", 0.15, (1, 1, 2), Supervisor.scale_down),
    "started twice": ("twins 4", 0.1, (1,), Supervisor.twin),
    "left while apart": ("apart 840", 0.15, (1, 1, 2), Supervisor.remove_apart),
}
"""Kind -> (label of the generator, share of the schedules, possible numbers, method of the supervisor that
returns True for a visible effect). The numbers in labels keep the seeds recorded in tests as they were."""
