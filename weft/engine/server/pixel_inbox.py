"""Pixels in shared memory of API servers on the same host, mapped before a sequence is submitted.

A mapping lasts until neither the sequence nor a step refers to the mapping, even if the API server is killed.
An engine process with ranks in other processes also keeps a descriptor meanwhile, so ranks can open the
memory.
"""

from __future__ import annotations

import os
import weakref
from typing import cast

import msgspec

from weft.common.shared_bytes import SharedBytes, SharedName, most_descriptors, open_shared
from weft.types.media import MediaItem
from weft.types.messages import Submit


class PixelInbox:
    """Mappings of the pixels published for one engine process. Call ``close`` when no API server can be
    welcomed any more.
    """

    def __init__(self, shows: bool) -> None:
        """Create the probe memory. Without shared memory, ``probe`` is None.

        ``shows``: True if other processes of the group must be able to open the memory.
        """
        self._shows = shows
        self._kept = 0
        self._probe: SharedBytes | None = None
        self.probe: SharedName | None = None
        """Name of a probe memory: an API server that can open the probe can use shared memory. None without
        shared memory.
        """
        try:
            self._probe = SharedBytes(0)
            self._probe.seal()
            self.probe = self._probe.name
        except OSError:
            self.close()

    def take(self, submit: Submit) -> Submit:
        """Return ``submit`` with the pixels of all shared names mapped.

        Without shared names, return ``submit`` unchanged. Raises PixelsLost if a memory cannot be opened.
        """
        if all(item.shared is None for item in submit.media):
            return submit
        media = tuple(
            item if item.shared is None else self._taken(item, item.shared) for item in submit.media
        )
        return msgspec.structs.replace(submit, media=media)

    def close(self) -> None:
        """Close the probe. Idempotent."""
        if self._probe is not None:
            self._probe.close()

    def _taken(self, item: MediaItem, name: SharedName) -> MediaItem:
        """Return ``item`` with mapped pixels.

        ``shared`` names this process's descriptor, or is None unless other processes must open the memory and
        a descriptor is free.
        """
        fd, view = open_shared(name)
        here = None
        # Ranks open the memory through the descriptor, which closes with the last view of the mapping.
        if self._shows and self._kept < most_descriptors():
            here = msgspec.structs.replace(name, pid=os.getpid(), fd=fd)
            self._kept += 1
            ended = weakref.finalize(view.obj, self._let_go, fd)
            ended.atexit = False
        else:
            os.close(fd)
        return msgspec.structs.replace(item, pixels=cast(bytes, view), shared=here)

    def _let_go(self, fd: int) -> None:
        self._kept -= 1
        os.close(fd)
