"""The owner of the instances' processes, as an interface for the links of an API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from weft.common.errors import WeftError
from weft.control.links.link import Address


class Scaled(NamedTuple):
    """Answer to an operator's command."""

    starting: tuple[str, ...] = ()
    """Names of the instances that start, or start again."""
    leaving: tuple[str, ...] = ()
    """Names of the instances that drain and end."""
    returning: tuple[str, ...] = ()
    """Names of the instances that drained for an earlier removal, and stay."""


class EngineInfo(NamedTuple):
    """One member of the server, as its owner knows the member."""

    name: str
    group: str
    base: str
    """Name of the group without its number; "" for a group without a name."""
    role: str
    state: Literal["running", "draining", "leaving", "waiting", "retired", "ended"]
    """``waiting``: a restart is due later. ``leaving``: drains, and is then removed."""
    starts: int = 0
    """Number of processes that were started under the name so far."""
    failure: str = ""
    """How the last process was lost that nobody had ordered to end; "" if there was none."""


class Owner(Protocol):
    """The owner of the instances' processes. See ``weft.control.processes``.

    No method blocks. The four commands of operators are coroutines, because the owner may be another process.
    A command returns after the owner has acted.
    """

    shared: bool
    """True if the instances live on when the API server ends, because others use or start them."""
    elastic: bool
    """True if instances that the owner does not know yet may join at any time."""

    def present(self, kept: int = 0) -> Mapping[str, Address | WeftError | None]:
        """Return for each member of the server the address of the current process, an error if no process
        will be started again, or None while there is no process yet. A name that is absent has left.

        Polled. ``kept``: number of begun sequences of the API server that are at no instance.
        """

    def replace(self, instance: str, incarnation: int, error: WeftError) -> None:
        """Report the loss of a process. ``present`` shows the owner's reaction."""

    def drain(self) -> None:
        """Report that the API server finishes all requests and then ends."""

    def describe(self) -> list[EngineInfo]:
        """Return all members of the server, in start order."""

    async def scale(self, base: str, groups: int) -> Scaled:
        """Start or end groups until ``groups`` groups have the name ``base`` and a number.

        Return the changes.

        Groups to end drain first. Groups that drain already return before a new group starts. Raises
        NotFound, InvalidRequest or Unavailable.
        """

    async def remove(self, name: str) -> list[str]:
        """Drain and end ``name``, a group or one engine process. Return the names of the instances.

        Raises NotFound, InvalidRequest or Unavailable.
        """

    async def restart(self, name: str = "", topology: str = "") -> list[str]:
        """Replace the processes of group or engine ``name`` in turn, without loss of a request; "" for all.

        ``topology``: text of a topology file with new settings, which each group gets when its turn comes; ""
        keeps the settings. A group that does not come up gets its former settings again, and the restart
        ends. Return the names of the instances. Raises NotFound, Unavailable, or InvalidRequest for
        settings that a restart cannot change.
        """

    async def revive(self, name: str) -> list[str]:
        """Start retired processes again, with a new restart budget. ``name``: a group, or one engine process.
        Return the names of the instances. Raises NotFound, InvalidRequest or Unavailable.
        """
