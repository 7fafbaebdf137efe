"""Where prefill and decode are at different instances: which of them are partners, which ones a prompt gets,
and what each of them is sent. Pure but for the memory of policies.

A *pair* is a prefill instance and a decode instance whose heads have equal fingerprints. All sequences of a
prompt go to one pair, each with a room of its own. An instance of neither role does both. Where images are
encoded at instances of their own, those get a part, too: see ``weft.routing.encoders``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from weft.routing.encoders import choose, divided_submit, encodes_for, sees
from weft.routing.instances import Instance
from weft.routing.ledger import LedgerEntry
from weft.routing.policy import Hashes, Policies, hashes_of
from weft.types.media import without_pixels
from weft.types.messages import Heartbeat, PrefixIndex, Submit
from weft.types.rooms import Peer, RoomKey, RoomTicket

ROLES_SINCE = 3
"""The version of messages in which heads have roles."""
PREFIXES_SINCE = 4
"""The version in which they tell what they have cached."""


class Route(NamedTuple):
    """Where the sequences of a prompt go."""

    compute: Instance
    """Computes the prompt."""
    decode: Instance | None = None
    """Goes on from the first token; None where ``compute`` does."""
    encoders: tuple[Instance, ...] = ()
    """The instance that encodes each image of the prompt; () if there are none, or ``compute`` does."""


def are_partners(prefill: Instance, decode: Instance) -> bool:
    """Whether what ``prefill`` computes can go on at ``decode``, by their present processes."""
    if prefill.role != "prefill" or decode.role != "decode":
        return False
    one, other = prefill.welcome, decode.welcome
    if one is None or other is None or not one.rooms or not other.rooms:
        return False
    return bool(one.fingerprint) and one.fingerprint == other.fingerprint


def serve(instances: Iterable[Instance], local: bool) -> bool:
    """Whether ``instances`` can serve requests. ``local``: those that decode may compute prompts, too."""
    given = list(instances)
    if any(one.role == "unified" or (local and one.role == "decode") for one in given):
        return True
    return any(are_partners(one, other) for one in given for other in given)


def without_partner(instances: Iterable[Instance]) -> list[Instance]:
    """The ``instances`` that have a role, and none among the others to work with."""
    given = list(instances)
    paired = {id(one) for a in given for b in given if are_partners(a, b) for one in (a, b)}
    return [one for one in given if one.role in ("prefill", "decode") and id(one) not in paired]


def why_lonely(instance: Instance, others: Iterable[Instance]) -> str | None:
    """Why none of ``others`` works with ``instance``; None where one may, or none has the other role yet."""
    role = {"prefill": "decode", "decode": "prefill"}.get(instance.role or "")
    opposite = [one for one in others if one.role == role and one.welcome is not None]
    if instance.welcome is None or not opposite:
        return None
    if any(are_partners(instance, one) or are_partners(one, instance) for one in opposite):
        return None
    for one in (instance, *opposite):
        if one.welcome is not None and not (one.welcome.rooms and one.welcome.fingerprint):
            return f"{one.name} does not say how caches are moved; start it with --role"
    names = ", ".join(one.name for one in opposite)
    return (
        f"it differs from {names} in model, weights, dtype or cache layout; start both with the same "
        "--model, --revision, --dtype, --quantization and --kv-cache-dtype"
    )


class Router:
    """Chooses instances for prompts."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    @property
    def decisions(self) -> dict[str, int]:
        """``Policies.decisions``."""
        return self._policies.decisions

    def asks(self, instance: Instance) -> bool:
        """Whether ``instance``, which is up, is to tell what it has cached."""
        knows = self._policies.knows_prefixes and instance.version >= PREFIXES_SINCE
        return knows and instance.role != "encode"

    def hear(self, instance: Instance, message: Heartbeat | PrefixIndex, now: float) -> bool:
        """Takes in the load of ``instance``, or what it has cached. False: that has to be told again,
        whole.
        """
        if isinstance(message, Heartbeat):
            instance.heartbeat(message, now)
        elif not instance.prefixes.take(message):
            return False
        for policy in self._policies:
            policy.told(instance, isinstance(message, Heartbeat) and message.idle)
        return True

    def route(
        self,
        takers: Sequence[Instance],
        entry: LedgerEntry,
        group: Sequence[int],
        near: Collection[str] = (),
        local: bool = False,
        encoders: Sequence[Instance] | None = None,
    ) -> Route | None:
        """Where the sequences ``group`` of one prompt go, ``entry`` among them; None when they have to wait.

        ``takers``: instances that take sequences. ``near``: those that have others of the same prompt.
        ``local``: those that decode may compute the prompt, too, where there is no other way. ``encoders``:
        instances that encode images for them now; None where the instance that computes a prompt has to.
        """
        takers = [one for one in takers if not one.unanswered or one.unanswered.isdisjoint(group)]
        if entry.pinned is not None:
            return next((Route(one) for one in takers if one.name == entry.pinned), None)
        session = entry.submit.session
        hashes = hashes_of(entry.submit.prompt_ids, entry.submit.salt, entry.hashes, entry.submit.media)
        helped = encoders is not None and bool(entry.submit.media)
        computing = [one for one in takers if not helped or sees(one, encoders or ())]
        willing = [one for one in computing if one.name not in entry.refused]
        others = [one for one in takers if one.name not in entry.refused]
        for able, decoding in ((willing, others), (computing, takers)):
            route = None
            if not entry.submit.pooling:
                route = self._pair(able, decoding, hashes, near, session)
            elif prefill := [one for one in able if one.role == "prefill"]:  # nothing goes on from there
                route = Route(self._policies.compute.choose(_among(prefill, near), hashes, session))
            route = route or self._alone(able, hashes, near, local, session)
            if route is not None:
                return _with_encoders(route, entry, encoders or ()) if helped else route
        return None

    def _alone(
        self, able: Sequence[Instance], hashes: Hashes, near: Collection[str], local: bool, session: str
    ) -> Route | None:
        alone = [one for one in able if one.role == "unified"]
        alone = alone or [one for one in able if local and one.role == "decode"]
        return Route(self._policies.compute.choose(_among(alone, near), hashes, session)) if alone else None

    def _pair(
        self,
        able: Sequence[Instance],
        decoding: Sequence[Instance],
        hashes: Hashes,
        near: Collection[str],
        session: str,
    ) -> Route | None:
        """``able``: instances that may compute the prompt; ``decoding``: those that may go on with it."""
        prefill = [one for one in able if one.role == "prefill"]
        if not prefill:
            return None
        decode = [one for one in decoding if any(are_partners(each, one) for each in prefill)]
        if not decode:
            return None
        decodes = self._policies.decode.choose(_among(decode, near), hashes, session)
        partners = [one for one in prefill if are_partners(one, decodes)]
        return Route(self._policies.compute.choose(_among(partners, near), hashes, session), decodes)


def _among(instances: Sequence[Instance], names: Collection[str]) -> Sequence[Instance]:
    """Those of ``names``, or all where there is none of them."""
    return [one for one in instances if one.name in names] or instances


def _with_encoders(route: Route, entry: LedgerEntry, encoders: Iterable[Instance]) -> Route:
    """``route`` with an instance for each image: of those that encode for the one that computes the prompt,
    those that gave the sequence back least often. Without any that one encodes them itself."""
    able = [(entry.refused.get(one.name, 0), one) for one in encoders if encodes_for(one, route.compute)]
    least = min((refused for refused, _ in able), default=0)
    willing = [one for refused, one in able if refused == least]
    return route._replace(encoders=choose(willing, entry.submit.media))


def ticketed(
    route: Route, submit: Submit, seconds: float, first: bool = True
) -> list[tuple[Instance, Submit]]:
    """What each instance of ``route`` is sent; ``seconds``: that a transfer may take. ``first``: whether it
    is the first of its prompt's sequences there; others share what came for it.

    Receivers come before senders: a receiver should know of the room when it is offered. An instance that
    decodes needs no pixels: a sequence that it cannot go on with it gives back.
    """
    compute, decode, encoders = route
    parts: list[tuple[Instance, Submit]] = []
    if encoders and first:
        submit, parts = divided_submit(compute, encoders, submit, seconds)
    elif encoders:
        submit = msgspec.structs.replace(submit, media=without_pixels(submit.media))
    if decode is None:
        return [(compute, submit), *parts]
    assert compute.welcome is not None
    assert decode.welcome is not None
    key = RoomKey(submit.sequence, submit.attempt, compute.incarnation)
    sends = RoomTicket(key, True, Peer(decode.welcome.rooms, decode.incarnation), seconds)
    receives = RoomTicket(key, False, Peer(compute.welcome.rooms, compute.incarnation), seconds)
    bare = tuple(msgspec.structs.replace(item, room=None) for item in without_pixels(submit.media))
    return [
        (decode, msgspec.structs.replace(submit, room=receives, media=bare)),
        (compute, msgspec.structs.replace(submit, room=sends)),
        *parts,
    ]
