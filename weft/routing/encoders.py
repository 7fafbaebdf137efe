"""Where images are encoded at instances of their own: which of them can do it for whom, which one gets an
image, and what it is sent. Pure.

An instance of the role "encode" serves no request by itself. It takes images of sequences whose prompt
another instance computes, and sends that one their embeddings, each in a room of its own. Both must say where
they take messages of such rooms, and encode alike (``Welcome.tower_fingerprint``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from weft.routing.instances import PROMPT_TOKENS, Instance
from weft.types.media import MediaItem, without_pixels
from weft.types.messages import Submit
from weft.types.rooms import Peer, RoomKey, RoomTicket
from weft.types.sampling import TokenParams

ENCODE_SINCE = 6
"""The version of messages in which heads encode for others, and say whether they encode at all."""
MARGIN = 8.0
"""Load by which an instance that encodes may be above the least loaded one and still get the images that
belong to it: of some small images, or less than one of full HD. Above it new images wait where others would
encode them at once; below it images that came before are encoded twice (docs/encode.md)."""


def encodes_for(encoder: Instance, compute: Instance) -> bool:
    """Whether ``encoder`` can encode what ``compute`` reads, by their present processes."""
    if encoder.role != "encode" or compute.role not in ("unified", "prefill"):
        return False
    one, other = encoder.welcome, compute.welcome
    if one is None or other is None or min(encoder.version, compute.version) < ENCODE_SINCE:
        return False
    if not (one.embeddings and other.embeddings):
        return False
    return bool(one.tower_fingerprint) and one.tower_fingerprint == other.tower_fingerprint


def has_tower(compute: Instance) -> bool:
    """Whether it encodes what it reads."""
    return compute.version < ENCODE_SINCE or (compute.welcome is not None and compute.welcome.tower)


def sees(compute: Instance, encoders: Iterable[Instance]) -> bool:
    """Whether it can compute prompts with images, with the help of ``encoders`` or without."""
    return has_tower(compute) or any(encodes_for(one, compute) for one in encoders)


def divided(instances: Iterable[Instance]) -> bool:
    """Whether images are, or were, encoded at instances of their own. If not, who computes a prompt is sent
    its images, and says by itself what it cannot do."""
    return any(
        one.role == "encode" or (one.welcome is not None and one.welcome.embeddings) for one in instances
    )


def without_compute(instances: Iterable[Instance]) -> list[Instance]:
    """The ``instances`` that encode, and for none of the others."""
    given = list(instances)
    return [one for one in given if one.role == "encode" and not any(encodes_for(one, o) for o in given)]


def choose(encoders: Sequence[Instance], items: Sequence[MediaItem]) -> tuple[Instance, ...]:
    """Who encodes each of ``items``; () where there is none.

    An image belongs to the instance for which a hash of both is highest, so every front sends it where it was
    encoded before, and only the images of an instance that is lost move. One that has much more to do than
    another gets none for now.
    """
    if not encoders:
        return ()
    loads = {one.name: one.load for one in encoders}
    chosen = []
    for item in items:
        most = min(loads.values()) + MARGIN
        free = [one for one in encoders if loads[one.name] <= most]
        best = max(free, key=lambda one: _weight(item.key, one.name))
        loads[best.name] += item.count / PROMPT_TOKENS
        chosen.append(best)
    return tuple(chosen)


def _weight(key: bytes, name: str) -> bytes:
    """Source: rendezvous hashing (Thaler and Ravishankar, 1998). Names of instances outlive processes."""
    return hashlib.blake2b(key + name.encode(), digest_size=8).digest()


def room_of(sequence: int, number: int) -> int:
    """The room of the image ``number`` of ``sequence``: a hash of both, so the fleet needs no mint. Attempts
    and the process that sends tell the rooms of one image apart; rooms of caches are of other processes."""
    data = sequence.to_bytes(8, "little") + number.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"weft image").digest(), "little")


def divided_submit(
    compute: Instance, encoders: Sequence[Instance], submit: Submit, seconds: float
) -> tuple[Submit, list[tuple[Instance, Submit]]]:
    """(what ``compute`` is sent, what each of ``encoders`` is sent). ``encoders``: of each image of
    ``submit``. Whoever computes gets no pixels, whoever encodes no prompt."""
    assert compute.welcome is not None
    received: list[MediaItem] = []
    sent: dict[str, list[MediaItem]] = {}
    bare = without_pixels(submit.media)
    for number, (item, encoder) in enumerate(zip(submit.media, encoders, strict=True)):
        assert encoder.welcome is not None
        key = RoomKey(room_of(submit.sequence, number), submit.attempt, encoder.incarnation)
        there = Peer(compute.welcome.embeddings, compute.incarnation)
        here = Peer(encoder.welcome.embeddings, encoder.incarnation)
        ticket = RoomTicket(key, True, there, seconds)
        sent.setdefault(encoder.name, []).append(msgspec.structs.replace(item, room=ticket))
        ticket = RoomTicket(key, False, here, seconds)
        received.append(msgspec.structs.replace(bare[number], room=ticket))
    by_name = {one.name: one for one in encoders}
    alone = msgspec.structs.replace(
        submit,
        prompt_ids=b"",
        emitted_ids=b"",
        params=TokenParams(),
        grammar=None,
        pooling="",
        explain=False,
        session="",
    )
    parts = [
        (by_name[name], msgspec.structs.replace(alone, media=tuple(items))) for name, items in sent.items()
    ]
    return msgspec.structs.replace(submit, media=tuple(received)), parts
