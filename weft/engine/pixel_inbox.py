"""Pixels that fronts of this host show by name: found here when a sequence comes, before it is taken in.

What was mapped lasts as long as its sequence, or a step, has it, even when the front that showed it is
killed. A head with ranks in other processes keeps a descriptor for as long, so that these can open it, too.
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
    """Mappings of the pixels that fronts show to one head. ``close`` when no front can be welcomed any
    more.
    """

    def __init__(self, shows: bool) -> None:
        """``shows``: whether other processes of its group are to open what it has."""
        self._shows = shows
        self._kept = 0
        self._probe: SharedBytes | None = None
        self.probe: SharedName | None = None
        """For fronts; None where there is no shared memory."""
        try:
            self._probe = SharedBytes(0)
            self._probe.seal()
            self.probe = self._probe.name
        except OSError:
            self.close()

    def take(self, submit: Submit) -> Submit:
        """With the pixels that it names. Raises PixelsLost, of one that cannot be had."""
        if all(item.shared is None for item in submit.media):
            return submit
        media = tuple(
            item if item.shared is None else self._taken(item, item.shared) for item in submit.media
        )
        return msgspec.structs.replace(submit, media=media)

    def close(self) -> None:
        """Idempotent."""
        if self._probe is not None:
            self._probe.close()

    def _taken(self, item: MediaItem, name: SharedName) -> MediaItem:
        fd, view = open_shared(name)
        here = None
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
