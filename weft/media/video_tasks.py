"""The work of a media worker on video files."""

from __future__ import annotations

from weft.common.errors import PixelsLost
from weft.common.shared_bytes import SharedName, write_shared
from weft.media.decode import key_of
from weft.media.media_messages import DecodeVideo, MediaDone, ReadVideo, packed
from weft.media.video import groups_of, header_of


def video_reply(task: ReadVideo | DecodeVideo, data: memoryview, most_pixels: int) -> tuple[bytes, ...]:
    """Return the reply to a task with the video file ``data``, in pieces. Raises BadVideo.

    Each frame group goes to shared memory as soon as the group is decoded.
    """
    if isinstance(task, ReadVideo):
        return (packed(MediaDone(header=header_of(data, most_pixels))),)
    keys, flags, rest = [], [], []
    groups = groups_of(data, task.header, task.groups, task.target, most_pixels)
    for pixels, into in zip(groups, task.into, strict=True):
        keys.append(key_of(pixels, task.target))
        flags.append(written(pixels, into))
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
