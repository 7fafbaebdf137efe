"""The owner of the instances' processes, as an interface for the links of an API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weft.common.errors import WeftError
from weft.control.links.link import Address


class Owner(Protocol):
    """The owner of the instances' processes. See ``weft.control.processes``. No method blocks."""

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError]:
        """Return for each instance the address of the current process, or an error if no process will be
        started again. Polled. ``kept``: number of begun sequences of the API server that are at no instance.
        """

    def replace(self, instance: str, incarnation: int, error: WeftError) -> None:
        """Report the loss of a process. ``present`` shows the owner's reaction."""

    def drain(self) -> None:
        """Report that the API server finishes all requests and then ends."""

    def revive(self, name: str) -> list[str]:
        """Start retired processes again, with a new restart budget. ``name``: a group, or one engine process.
        Return the names of the instances. Raises NotFound, InvalidRequest or Unavailable.
        """
