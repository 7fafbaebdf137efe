"""The owner of the instances' processes, as the links of a front see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weft.common.errors import WeftError
from weft.links.link import Address


class Owner(Protocol):
    """The owner of the instances' processes. See ``weft.cluster``. Never waits."""

    def present(self) -> Mapping[str, Address | WeftError]:
        """For each instance the address of its present process, or why none will be started again. Polled."""

    def replace(self, instance: str, incarnation: int, error: WeftError) -> None:
        """This front has lost the process. The owner's reaction shows in ``present``."""

    def drain(self) -> None:
        """This front finishes its requests, and ends."""

    def revive(self, name: str) -> list[str]:
        """Has retired processes started again, with a new budget of restarts: those of the group ``name``, or
        of one head. Returns the names of their instances. Raises NotFound, InvalidRequest or Unavailable.
        """
