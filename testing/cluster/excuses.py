"""Rules for API servers in a simulated cluster: allowed reasons of failures, and knowledge of prefix
caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testing.cluster.check import Stream, Violation, require
from weft.common.restarts import MOST_LOSSES
from weft.control.fleet import fleet_events as e
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.instances import ALIVE, SERVING, Instance
from weft.control.fleet.open_sequences import LATE, MOST_REFUSALS, NO_ROLE, UNFIT
from weft.control.fleet.pairs import serve
from weft.front import lifecycle
from weft.types import messages as m

if TYPE_CHECKING:
    from testing.cluster.front import FrontProcess

PATIENCE = Patience(engine=4.0, recovery=6.0, listen=2.0, load=4.0, role=1.0, transfer=3.0)


def explain(front: FrontProcess, stream: Stream, code: str, message: str) -> None:
    """Raise Violation if the schedule knows no reason for the failure of ``stream``. Counts the failure."""
    cluster = front.cluster
    fleet = front.fleet
    why = f"{front.name}: sequence {stream.sequence} failed ({code}: {message})"
    cluster.count(f"failed: {message if code == 'unavailable' else code}")
    if fleet.failure is not None:
        return  # see front_failed
    # Each error message must match a fact of the schedule, for example enough losses or refusals.
    if code == "overloaded":
        takers = [i for i in fleet.table.takers() if stream.pinned in (None, i.name)]
        left = [i for i in takers if i.name not in stream.given_back]
        able = serve(left, fleet._lateness.local)
        names = [i.name for i in left]
        require(stream.pinned is not None or not able, f"{why}, and {names} had not refused it")
    elif _is_late(message):
        check_wait(front, message, why, images=stream.images)
    elif "evicted the request too often" in message:
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
    else:  # a pinned sequence ends with the instance
        require(stream.pinned is not None and code in ("engine_dead", "unavailable"), why)


def check_prefixes(front: FrontProcess, instance: Instance) -> None:
    """Raise Violation if the API server's view of the instance's prefix cache is wrong in a quiet cluster."""
    engine_process = front.cluster.supervisor.engine_processes.get(instance.name)
    if engine_process is None or not engine_process.alive or not instance.alive:
        return
    followed = engine_process.engine.follow_prefixes()
    if followed is None or len(front.fleet.table.instances) == 1:
        return
    keys, view = followed[0].keys, instance.prefixes
    known = len(view) == len(keys) and all(key in view for key in keys)
    known = (
        known or view.number < engine_process.protocol.prefixes.number
    )  # the last change is still under way
    require(known, f"{front.name} has a wrong view of what {engine_process.name} has cached")
    front.cluster.counts["prefix caches compared"] += bool(keys)


def _is_late(message: str) -> bool:
    """Return True if the error message means too long a wait."""
    return message in (LATE, UNFIT) or message.startswith(NO_ROLE)


def check_wait(front: FrontProcess, message: str, why: str, *, images: bool = False) -> None:
    """Raise Violation if a request stopped waiting too early, according to the error ``message``.

    Too early means: a suitable process was present until a moment ago, or an instance of the missing role
    will be started again. ``images`` is True for a prompt with images.
    """
    if not _is_late(message) or front.fleet.failure is not None:
        return
    cluster, fleet = front.cluster, front.fleet
    present = [one.role for one in _up(front, draining=False)]
    words = message.split() if message.startswith(NO_ROLE) else []
    named = [role for role in ("prefill", "decode", "unified", "encode") if role in words]
    require(not set(named) & set(present), f"{why}, and {present} are up")
    roles, removed = cluster.transfers.roles, cluster.supervisor.removed
    given_up = [role for role in named if all(n in removed for n, one in roles.items() if one == role)]
    by_order = given_up and "unified" not in roles.values()
    require(not by_order, f"{why}, and an operator's order took the last {given_up} group")
    waited = cluster.now - front.there_at[0 if message == LATE else 2 if "encode" in named else 1]
    if message != LATE and "encode" not in named and "decode" in present:
        require(
            images or not cluster.transfers.local_prefill, f"{why}, and one that decodes can prefill, too"
        )
    left = [one for one in fleet.table.wanted if one.name not in front.retired_instances]
    awaited = any(one.state not in SERVING or one.shunned for one in left)
    # An expected instance justifies the longer wait of `recovery`.
    patience = PATIENCE.recovery if awaited or message == LATE else PATIENCE.role
    require(waited >= patience - 1e-6, f"{why} after {waited:.3f} of {patience:g} seconds")


def there(front: FrontProcess) -> tuple[bool, bool, bool]:
    """Return three flags for the live instances, including draining ones.

    The flags: the instances produce tokens; serve a request; serve a request with images. To serve means to
    do all work: a unified instance, or a prefill and a decode instance.
    """
    up = _up(front, draining=True)
    # An expert-parallel group with a dead instance takes no sequences.
    expert_groups = {
        one.expert_group for one in front.fleet.table.instances.values() if one.expert_group and not one.alive
    }
    roles = {one.role for one in up}
    serves = "unified" in roles or {"prefill", "decode"} <= roles
    encoded = front.cluster.transfers.images.towers or "encode" in roles
    takes = any(one.role != "encode" and one.expert_group not in expert_groups for one in up)
    return takes, serves, serves and encoded


def _up(front: FrontProcess, draining: bool) -> list[Instance]:
    states = ALIVE if draining else SERVING
    return [one for one in front.fleet.table.instances.values() if one.state in states and not one.shunned]


def goes_on(event: e.Event, actions: list[e.Action]) -> bool:
    """Return True if ``event`` brings only tokens and no end: no sequence or instance changes place."""
    if not isinstance(event, e.Received) or not isinstance(event.message, m.Tokens):
        return False
    if any(told.finish is not None for told in event.message.events):
        return False
    if len(actions) != 1 or not isinstance(actions[0], e.Deliver):
        return not actions
    return all(told.finish is None for told in actions[0].events)


def check_books(front: FrontProcess) -> None:
    """Raise Violation unless the fleet's records agree with each other and with the streams."""
    fleet = front.fleet
    name = front.name
    placed = 0
    for sequence, entry in fleet.entries.items():
        stream = front.streams[sequence]
        # A sequence is in exactly one state: at instances, parked, or paused.
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
    # The loads of all instances together count exactly the placed sequences.
    for place, one in fleet.table.instances.items():
        placed -= len(one.open)
        if one.prompt_tokens != sum(one.open.values()):
            raise Violation(f"{name}: the load of {place} is off")
    if placed:
        raise Violation(f"{name}: instances have {-placed} sequences that are not open")
    _check_room(front)


def _check_room(front: FrontProcess) -> None:
    """Raise Violation if the limit on requests counts an instance that takes none any more, or leaves out one
    that serves."""
    instances = front.fleet.table.instances
    gone = front.left_instances | front.retired_instances
    members = [name for name in instances if name not in gone]
    room = lifecycle.places(instances.values())
    if room > len(members):
        raise Violation(f"{front.name}: room for requests of {room} instances, and only {members} take any")
    serving = [name for name in members if instances[name].state in SERVING]
    if room < len(serving):
        raise Violation(f"{front.name}: room for requests of {room} instances, and {serving} serve")
