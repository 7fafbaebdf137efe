"""Replies of a media worker with pixels, and the tasks with video files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.common.errors import PixelsLost
from weft.common.shared_bytes import SharedName, write_shared
from weft.media.decode import key_of
from weft.media.media_messages import DecodeVideo, MediaDone, ReadVideo, Target, packed
from weft.media.video import groups_of, header_of


def video_reply(task: ReadVideo | DecodeVideo, data: memoryview, most_pixels: int) -> tuple[bytes, ...]:
    """Return the reply to a task with the video file ``data``, in pieces. Raises BadVideo.

    Each frame group goes to shared memory as soon as the group is decoded.
    """
    if isinstance(task, ReadVideo):
        return (packed(MediaDone(header=header_of(data, most_pixels))),)
    groups = groups_of(data, task.header, task.groups, task.target, most_pixels)
    return items_reply(groups, [task.target] * len(task.groups), task.into)


def items_reply(
    items: Iterable[bytes], targets: Sequence[Target], into: Sequence[SharedName | None]
) -> tuple[bytes, ...]:
    """Return the reply with the key and the pixels of each item, in pieces. Pixels that fit into the shared
    memory ``into`` go there as soon as the item is made, and are not part of the reply."""
    keys, flags, rest = [], [], []
    for pixels, target, name in zip(items, targets, into, strict=True):
        keys.append(key_of(pixels, target))
        flags.append(written(pixels, name))
        if not flags[-1]:
            rest.append(pixels)
    return (packed(MediaDone(keys=tuple(keys), written=tuple(flags))), *rest)


def written(pixels: bytes, into: SharedName | None) -> bool:
    """Write ``pixels`` to the shared memory ``into``. Return True on success; False without shared memory,
    or if the memory cannot be opened."""
    if into is None:
        return False
    try:
        write_shared(into, pixels)
    except PixelsLost:  # the API server is in another namespace, or has dropped the shared memory
        return False
    return True
