"""Choose the instances that encode the images of a prompt, and divide a Submit between the instances. Pure.

An instance of the role "encode" serves no request alone. The instance receives images of sequences, encodes
the images, and sends each embedding in a separate transfer to the instance with the prompt. Both instances
must publish an address for such transfers, and must encode alike (``Welcome.tower_fingerprint``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from weft.control.fleet.instances import PROMPT_TOKENS, Instance
from weft.types.media_item import MediaItem, without_pixels
from weft.types.messages import Submit
from weft.types.sampling import TokenParams
from weft.types.transfer import Peer, TransferKey, TransferParameters

MARGIN = 8.0
"""Extra load over the least loaded encode instance up to which an instance keeps the images that belong to
it.

The load equals some small images, or less than one full HD image. With a larger margin, new images wait
although other instances could encode at once. With a smaller margin, known images are encoded twice
(docs/encode.md).
"""


def encodes_for(encoder: Instance, compute: Instance) -> bool:
    """Return True if ``encoder`` can encode for prompts at ``compute``: roles, addresses and tower
    fingerprints of the present processes fit.
    """
    if encoder.role != "encode" or compute.role not in ("unified", "prefill"):
        return False
    one, other = encoder.welcome, compute.welcome
    if one is None or other is None or not (one.embeddings and other.embeddings):
        return False
    return bool(one.tower_fingerprint) and one.tower_fingerprint == other.tower_fingerprint


def has_tower(compute: Instance) -> bool:
    """Return True if ``compute`` can encode images without help."""
    return compute.welcome is not None and compute.welcome.tower


def sees(compute: Instance, encoders: Iterable[Instance]) -> bool:
    """Return True if ``compute`` can compute prompts with images, alone or with the help of ``encoders``."""
    return has_tower(compute) or any(encodes_for(one, compute) for one in encoders)


def divided(instances: Iterable[Instance]) -> bool:
    """Return True if any instance takes part, or took part, in encoding for others.

    If not, the compute instance receives the images and refuses unsuitable requests.
    """
    return any(
        one.role == "encode" or (one.welcome is not None and one.welcome.embeddings) for one in instances
    )


def without_compute(instances: Iterable[Instance]) -> list[Instance]:
    """Return the encode instances unable to encode for any of the other ``instances``."""
    given = list(instances)
    return [one for one in given if one.role == "encode" and not any(encodes_for(one, o) for o in given)]


def choose(encoders: Sequence[Instance], items: Sequence[MediaItem]) -> tuple[Instance, ...]:
    """Return one encode instance for each of ``items``; () if ``encoders`` is empty.

    Each image belongs to the instance with the highest hash of image and instance name. So all API servers
    send an image to the same instance, and the loss of an instance moves only the images of this instance. An
    instance with much more load than the least loaded instance gets no images for now.
    """
    if not encoders:
        return ()
    loads = {one.name: one.load for one in encoders}
    chosen = []
    for item in items:
        # The images chosen so far count as load for the next image.
        most = min(loads.values()) + MARGIN
        free = [one for one in encoders if loads[one.name] <= most]
        best = max(free, key=lambda one: _weight(item.key, one.name))
        loads[best.name] += item.count / PROMPT_TOKENS
        chosen.append(best)
    return tuple(chosen)


def _weight(key: bytes, name: str) -> bytes:
    """Return the rank of an instance for an image. Instance names outlive processes.

    Source: rendezvous hashing (Thaler and Ravishankar, 1998).
    """
    return hashlib.blake2b(key + name.encode(), digest_size=8).digest()


def transfer_of(sequence: int, number: int) -> int:
    """Return the transfer id for image ``number`` of ``sequence``: a hash of both, so no counter is needed.

    The attempt and the sender's incarnation tell the transfers of one image apart. KV transfers belong to
    other processes, so the ids cannot clash.
    """
    data = sequence.to_bytes(8, "little") + number.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"weft image").digest(), "little")


def divided_submit(
    compute: Instance, encoders: Sequence[Instance], submit: Submit, seconds: float
) -> tuple[Submit, list[tuple[Instance, Submit]]]:
    """Return the Submit for ``compute``, and one (instance, Submit) for each encode instance.

    ``encoders`` names one instance for each image of ``submit``. The compute instance gets no pixels, and an
    encode instance gets no prompt.
    """
    assert compute.welcome is not None
    received: list[MediaItem] = []
    sent: dict[str, list[MediaItem]] = {}
    bare = without_pixels(submit.media)
    for number, (item, encoder) in enumerate(zip(submit.media, encoders, strict=True)):
        assert encoder.welcome is not None
        key = TransferKey(transfer_of(submit.sequence, number), submit.attempt, encoder.incarnation)
        there = Peer(compute.welcome.embeddings, compute.incarnation)
        here = Peer(encoder.welcome.embeddings, encoder.incarnation)
        parameters = TransferParameters(key, True, there, seconds)
        sent.setdefault(encoder.name, []).append(msgspec.structs.replace(item, transfer=parameters))
        parameters = TransferParameters(key, False, here, seconds)
        received.append(msgspec.structs.replace(bare[number], transfer=parameters))
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
