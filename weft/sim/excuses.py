"""What a front may do and know, as the schedule tells: why a sequence may fail, and what heads have
cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.common.restarts import MOST_LOSSES
from weft.routing import events as e
from weft.routing.instance_table import Patience
from weft.routing.instances import Instance, InstanceState
from weft.routing.lateness import LATE, NO_ENCODER, NO_PAIR
from weft.routing.pairs import PREFIXES_SINCE, serve
from weft.routing.parked import MOST_REFUSALS
from weft.sim.check import Stream, Violation, require
from weft.types import messages as m

if TYPE_CHECKING:
    from weft.sim.front import FrontProcess

PATIENCE = Patience(engine=4.0, recovery=6.0, listen=2.0, load=4.0, role=1.0, transfer=3.0)


def explain(front: FrontProcess, stream: Stream, code: str, message: str) -> None:
    """Raises Violation where ``stream`` failed for no reason that the schedule knows."""
    cluster = front.cluster
    fleet = front.fleet
    why = f"{front.name}: sequence {stream.sequence} failed ({code}: {message})"
    cluster.count(f"failed: {message if code == 'unavailable' else code}")
    if fleet.failure is not None:
        return  # see front_failed
    if code == "overloaded":
        takers = [i for i in fleet.table.takers() if stream.pinned in (None, i.name)]
        left = [i for i in takers if i.name not in stream.given_back]
        able = serve(left, fleet._lateness.local)
        names = [i.name for i in left]
        require(stream.pinned is not None or not able, f"{why}, and {names} had not refused it")
    elif message == LATE:
        waited = cluster.now - front.unready_since
        require(waited >= PATIENCE.recovery - 1e-6, f"{why} after {waited:.3f} seconds")
    elif message == NO_PAIR:
        waited = cluster.now - front.unpaired_since
        decode = any(one.role == "decode" for one in fleet.table.takers())
        require(not (cluster.rooms.local_prefill and decode), f"{why}, and one that decodes can prefill, too")
        require(waited >= PATIENCE.role - 1e-6, f"{why} after {waited:.3f} seconds")
    elif message == NO_ENCODER:
        waited = cluster.now - front.unseeing_since
        require(waited >= PATIENCE.role - 1e-6, f"{why} after {waited:.3f} seconds")
    elif "takes the request no more" in message:
        require(stream.times_given_back > MOST_REFUSALS, why)
    elif "shutting down" in message:
        require(front.closing or cluster.supervisor.drains > 0, why)
    elif code == "non_finite_logits":
        require(stream.key in cluster.row_errors, why)
        cluster.happened("row error")
    elif "3 times while it worked" in message:
        require(cluster.groups_lost >= MOST_LOSSES, why)
    elif "times while it worked" in message:
        require(stream.losses > MOST_LOSSES, f"{why}, and lost {stream.losses}")
    else:  # it ends with its only instance
        require(stream.pinned is not None and code in ("engine_dead", "unavailable"), why)


def check_prefixes(front: FrontProcess, instance: Instance) -> None:
    """What it knows of a head's prefix cache, when all is quiet, is what is in it."""
    head = front.cluster.supervisor.heads.get(instance.name)
    if head is None or not head.alive or not instance.alive or instance.version < PREFIXES_SINCE:
        return
    followed = head.engine.follow_prefixes()
    if followed is None or len(front.fleet.table.instances) == 1:
        return
    keys, view = followed[0].keys, instance.prefixes
    known = len(view) == len(keys) and all(key in view for key in keys)
    known = known or view.number < head.protocol.prefixes.number  # what changed last is on its way
    require(known, f"{front.name} has a wrong view of what {head.name} has cached")
    front.cluster.counts["prefix caches compared"] += bool(keys)


def takes(front: FrontProcess) -> bool:
    """Whether an instance takes sequences, now or after one that it has."""
    instances = front.fleet.table.instances.values()
    broken = {one.domain for one in instances if one.domain and not one.alive}
    return any(one.role != "encode" and one.domain not in broken for one in _up(front))


def serves(front: FrontProcess) -> bool:
    """Whether instances that are up can do all of a request without images."""
    roles = {one.role for one in _up(front)}
    return "unified" in roles or {"prefill", "decode"} <= roles


def sees(front: FrontProcess) -> bool:
    """Whether they can do all of one with images."""
    encoded = front.cluster.rooms.images.towers or any(one.role == "encode" for one in _up(front))
    return serves(front) and encoded


def _up(front: FrontProcess) -> list[Instance]:
    up = (InstanceState.UP, InstanceState.HALF_OPEN)
    return [one for one in front.fleet.table.instances.values() if one.state in up and not one.shunned]


def goes_on(event: e.Event, actions: list[e.Action]) -> bool:
    """Whether ``event`` tells tokens alone, and no end: then no sequence has changed its place, and no
    instance.
    """
    if not isinstance(event, e.Received) or not isinstance(event.message, m.Tokens):
        return False
    if any(told.finish is not None for told in event.message.events):
        return False
    if len(actions) != 1 or not isinstance(actions[0], e.Deliver):
        return not actions
    return all(told.finish is None for told in actions[0].events)


def check_books(front: FrontProcess) -> None:
    """Raises Violation unless the fleet's books agree with each other and with the streams."""
    fleet = front.fleet
    name = front.name
    placed = 0
    for sequence, entry in fleet.entries.items():
        stream = front.streams[sequence]
        states = bool(entry.places) + (sequence in fleet._parked) + (sequence in fleet.open.paused)
        if states != 1:
            raise Violation(f"{name}: sequence {sequence} is in {states} states at once")
        placed += len(entry.places)
        for place in entry.places:
            if sequence not in fleet.table.instances[place].open:
                raise Violation(f"{name}: the load of {place} lacks sequence {sequence}")
        if entry.losses != stream.losses:
            counts = f"{stream.losses} instances, {entry.losses} counted"
            raise Violation(f"{name}: sequence {sequence} lost {counts}")
        if not stream.open:
            raise Violation(f"{name}: sequence {sequence} ended and is open in the fleet")
    for place, one in fleet.table.instances.items():
        placed -= len(one.open)
        if one.prompt_tokens != sum(one.open.values()):
            raise Violation(f"{name}: the load of {place} is off")
    if placed:
        raise Violation(f"{name}: instances have {-placed} sequences that are not open")
