"""What goes wrong in a schedule, and the proof that it did.

A fault is planned before anything runs. When its time comes it picks its victim among what there is, and
counts as having happened only when its effect was seen: a process that lived and ends, messages that were
under way and are late or lost, steps that were in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.common.errors import EngineDead
from weft.sim import room_faults
from weft.sim.head import HeadProcess
from weft.sim.network import Link
from weft.sim.ranks import RankProcess

if TYPE_CHECKING:
    from weft.sim.cluster import Cluster
    from weft.sim.front import FrontProcess


FOR_EVER = 1e6


def plan(cluster: Cluster) -> int:
    """Chooses faults and their times. Returns how many are to come."""
    rng = cluster.rng
    if rng.random() < 0.1:
        return 0
    kinds = {kind: weight for kind, (weight, _) in KINDS.items() if _can_happen(cluster, kind)}
    planned = 0
    for kind in rng.choices(list(kinds), list(kinds.values()), k=rng.choice((1, 1, 2, 3))):
        at = 0.4 + rng.random() * 0.9
        if kind == "head killed" and rng.random() < 0.3:
            planned += _plan_row(cluster, at)
        else:
            cluster.at(at, None, _fire, cluster, KINDS[kind][1], kind)
            planned += 1
    return planned


def _can_happen(cluster: Cluster, kind: str) -> bool:
    if kind in OF_RANKS and cluster.tensor == 1:
        return False
    return cluster.rooms.paired or kind not in OF_ROOMS


def _plan_row(cluster: Cluster, at: float) -> int:
    """One head is killed, and again as soon as it is back."""
    rng = cluster.rng
    instance = rng.choice(list(cluster.instances))

    def kill(cluster: Cluster) -> bool:
        return cluster.end_head(cluster.supervisor.heads[instance])

    times = [at + 0.5 * again + rng.random() * 0.2 for again in range(rng.choice((2, 3, 5)))]
    for time in times:
        cluster.at(time, None, _fire, cluster, kill, "head killed")
    return len(times)


def _fire(cluster: Cluster, apply: Callable[[Cluster], bool], kind: str) -> None:
    cluster.pending_faults -= 1
    cluster.note("fault", "..", "", kind)
    if apply(cluster):
        cluster.happened(kind)


# -- whom it hits


def _head(cluster: Cluster, ready: bool = True) -> HeadProcess | None:
    """A head that lives; rather one that works."""
    alive = [head for head in cluster.supervisor.heads.values() if head.alive and (head.ready or not ready)]
    busy = [head for head in alive if head.ready and head.engine.has_work()]
    return cluster.rng.choice(busy or alive) if alive else None


def _front(cluster: Cluster) -> FrontProcess | None:
    """A front that lives; rather one that has requests."""
    alive = [front for front in cluster.fronts if front.alive and not front.closing]
    busy = [front for front in alive if front.clients]
    return cluster.rng.choice(busy or alive) if alive else None


def _link(cluster: Cluster, version: int = 1) -> Link | None:
    """A link that is up; rather one of a front that has requests."""
    front = _front(cluster)
    links = (
        [] if front is None else [one for one in front.links.values() if one.up and one.version >= version]
    )
    busy = [one for one in links if one.head.engine.has_work()]
    return cluster.rng.choice(busy or links) if links else None


def _rank(cluster: Cluster) -> RankProcess | None:
    """A process of a rank; rather one whose group takes steps."""
    head = _head(cluster)
    if head is None:
        return None
    living = list(head.replica.living.values())
    running = [process for process in living if process.running and process.stalled_until <= cluster.now]
    return cluster.rng.choice(running or living) if living else None


# -- what it does; whether that was possible


def _kill_head(cluster: Cluster) -> bool:
    head = _head(cluster, ready=False)
    return head is not None and cluster.end_head(head)


def _fail_head(cluster: Cluster) -> bool:
    head = _head(cluster)
    if head is None or head.stalled_until > cluster.now:
        return False
    head.fail(EngineDead("the engine failed; see the server's log"))
    return True


def _stall(cluster: Cluster, process: HeadProcess | FrontProcess, seconds: float) -> bool:
    if process.stalled_until > cluster.now:
        return False
    process.stalled_until = cluster.now + seconds
    cluster.note(process.name, "..", "", f"stands still for {seconds:.3f} s")
    return True


def _stall_head(cluster: Cluster) -> bool:
    """Shortly, or until its fronts give it up."""
    head = _head(cluster)
    seconds = cluster.rng.uniform(0.05, 1.0) if cluster.rng.random() < 0.6 else cluster.rng.uniform(5.0, 9.0)
    if head is None or not _stall(cluster, head, seconds):
        return False
    head.replica.excuse(seconds)
    for front in cluster.fronts:
        for link in front.links.values():
            if link.head is head:
                link.silence += seconds
    return True


def _stall_front(cluster: Cluster) -> bool:
    """However long it is, that gives no head a reason to be given up."""
    front = _front(cluster)
    seconds = cluster.rng.uniform(0.05, 1.0) if cluster.rng.random() < 0.5 else cluster.rng.uniform(3.0, 9.0)
    if front is None or not _stall(cluster, front, seconds):
        return False
    cluster.at(front.stalled_until, front, front.woke, seconds)
    return True


def _poison(cluster: Cluster) -> bool:
    """A request of which heads die: proved where one does."""
    client = cluster.rng.choice(cluster.clients)
    key = cluster.rng.choice(cluster.keys_of(client))
    cluster.poison[key] = len(client.prompt) + cluster.rng.randrange(3)
    cluster.poison_left = cluster.rng.choice((1, 2, 3, 9))
    return False


def _row_error(cluster: Cluster) -> bool:
    """Logits of a sequence are not finite: proved where it fails of that."""
    client = cluster.rng.choice(cluster.clients)
    key = cluster.rng.choice(cluster.keys_of(client))
    cluster.row_errors[key] = len(client.prompt) + cluster.rng.randrange(3)
    return False


def _slow_start(cluster: Cluster) -> bool:
    """A head dies, and the next processes do not start in time: proved where one is started."""
    cluster.slow_starts = cluster.rng.choice((1, 2))
    _kill_head(cluster)
    return False


def _kill_front(cluster: Cluster) -> bool:
    front = _front(cluster)
    return front is not None and cluster.end_front(front)


def _close_front(cluster: Cluster) -> bool:
    """It ends in order; a moment later its connections are closed."""
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
    """Silence between a front and a head, or a head and all fronts; then all comes late, or a break."""
    rng = cluster.rng
    link = _link(cluster)
    if link is None:
        return False
    seconds = rng.uniform(0.1, 1.0) if rng.random() < 0.6 else rng.uniform(4.0, 8.0)
    links = [link]
    if rng.random() < 0.4:
        links = [
            one
            for front in cluster.fronts
            for one in front.links.values()
            if one.head is link.head and one.up
        ]
    breaks = rng.random() < 0.3
    for one in links:
        cluster.network.hold(one, seconds)
        if breaks:
            cluster.at(cluster.now + seconds * 0.9, None, cluster.break_link, one)
    return True


def _delay(cluster: Cluster) -> bool:
    """What is under way over a link takes long."""
    link = _link(cluster)
    if link is None:
        return False
    cluster.network.hold(link, cluster.rng.uniform(0.02, 0.4))
    return True


def _duplicate(cluster: Cluster) -> bool:
    """The next Submit over a link is sent twice: proved where it is."""
    link = _link(cluster, version=2)
    if link is not None:
        link.duplicate = True
    return False


def _evict(cluster: Cluster) -> bool:
    """A head gives a sequence back: any other may go on with it."""
    head = _head(cluster)
    if head is None or head.stalled_until > cluster.now or head.engine.recovering:
        return False
    return head.evict() is not None


def _drain(cluster: Cluster) -> bool:
    """A head is upgraded."""
    head = _head(cluster)
    return head is not None and cluster.supervisor.drain(head.instance)


def _slow_upgrade(cluster: Cluster) -> bool:
    """A head is upgraded, and the next processes do not start in time: proved where one is started."""
    head = _head(cluster)
    if head is not None and cluster.supervisor.drain(head.instance):
        cluster.slow_starts = cluster.rng.choice((1, 2))
    return False


def _end_rank(cluster: Cluster, process: RankProcess | None) -> bool:
    """Its process ends now. Whether it lived."""
    if process is None or not process.alive:
        return False
    process.end()
    cluster.happened("rank killed")
    return True


def _kill_rank(cluster: Cluster) -> bool:
    _end_rank(cluster, _rank(cluster))
    return False  # it was counted


def _stop_rank(cluster: Cluster) -> bool:
    """It is stopped, and wakes shortly after, or when its group has given it up, or not by itself."""
    process = _rank(cluster)
    if process is None or process.stalled_until > cluster.now:
        return False
    rng = cluster.rng
    seconds = rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.6, 1.5), rng.uniform(1.5, 3.0), FOR_EVER))
    process.stop(seconds)
    cluster.note(process.name, "..", "", f"is stopped for {seconds:.3f} s")
    if seconds == FOR_EVER and process.rank in process.replica.remote:  # its own host ends it
        cluster.at(cluster.now + process.replica.pace.timeout, None, process.end)
    return True


def _rank_raises(cluster: Cluster) -> bool:
    """The next step raises at a rank, or at the head's own: proved where it does."""
    process = _rank(cluster)
    if process is not None:
        own = cluster.rng.random() < 0.25
        cluster.plan_mishap("step", process.replica.ranks[0] if own else process.rank, 1)
    return False


def _late_report(cluster: Cluster) -> bool:
    """What a rank reports takes long: proved by a report of a step that does."""
    process = _rank(cluster)
    if process is not None:
        rng = cluster.rng
        seconds = rng.uniform(0.05, 0.5) if rng.random() < 0.6 else rng.uniform(0.9, 1.6)
        process.delay_reports(seconds)
    return False


def _lost_report(cluster: Cluster) -> bool:
    """The next report of a step is lost with its connection: proved where one is."""
    process = _rank(cluster)
    if process is not None:
        process.loses_report = True
    return False


def _cannot_load(cluster: Cluster) -> bool:
    """A rank dies, and the next processes cannot load: proved where one cannot."""
    process = _rank(cluster)
    if process is not None:
        cluster.plan_mishap("load", process.rank, cluster.rng.choice((1, 1, 2, 5)))
        _end_rank(cluster, process)
    return False


def _cannot_form(cluster: Cluster) -> bool:
    """A rank dies, and it or the head cannot form the next epochs: proved where one cannot."""
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
    """Somebody outside may write to blocks of a sequence, and the group may be lost meanwhile."""
    head = _head(cluster)
    if head is None or head.stalled_until > cluster.now or head.engine.recovering:
        return False
    held = head.hold(cluster.rng.uniform(0.1, 1.5))
    living = list(head.replica.living.values())
    if held and living and cluster.rng.random() < 0.7:
        cluster.after(0.0, 0.1, None, _end_rank, cluster, cluster.rng.choice(living))
    return held


def _kill_rank_again(cluster: Cluster) -> bool:
    """A rank dies whenever its group runs again, until the head has lost too many epochs: proved there."""
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
    """The next that a rank says of a room is lost with its connection: proved where it is."""
    process = _rank(cluster)
    if process is not None:
        process.loses_word = True
    return False


OF_ROOMS = {*room_faults.KINDS, "room report lost"}
"""Kinds that need prefill and decode in groups of their own."""
MISHAPS = {
    "load": "rank cannot load",
    "form": "rank cannot form",
    "connect": "rank cannot form",
    "step": "rank raised",
}
"""Kinds of faults whose effect ranks report."""
OF_RANKS = {
    *MISHAPS.values(),
    "rank killed",
    "rank stopped",
    "report late",
    "report lost",
    "room report lost",
    "group given up",
}
"""Kinds that need a group of several ranks."""
KINDS: dict[str, tuple[int, Callable[[Cluster], bool]]] = {
    "head killed": (8, _kill_head),
    "engine failed": (3, _fail_head),
    "head stalled": (4, _stall_head),
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
    **room_faults.KINDS,
    "room report lost": (10, _lost_word),
}
"""Kind -> how often it is planned, what it does and whether that was seen. Where the effect comes later,
whoever sees it calls ``Cluster.happened``."""
