"""Detects the end of engine processes of other groups, with proof. Silence alone proves nothing.

Deadlines fail a transfer with a silent peer, but do not release the memory. The rules for the memory:

* A *receiver's* memory is written by the receiver's own ranks alone (every transport here has ``fence``
  "copy"). So the receiver waits for its own ranks and for no peer.
* A *sender's* memory is read
    - over ``tcp`` by the sender's own ranks alone: once the ranks have stopped, no peer can reach the memory;
    - over ``shm`` by the receiver's ranks, which map the memory read-only, and over ``nixl`` by the
      receiver's ranks through the network. Transports of other packages count as such. A late read can harm
      only the receiver, and only if the receiver decodes the sequence with the late bytes. The receiver's
      *engine process* alone decides that a transfer was received, and keeps the decision in memory. So once
      the engine process has ended, the transfer can never complete, and the sender may reuse the blocks.
      Ranks of the engine may survive and still read, but a rank that joins the next engine process first
      stops all transfers.
* A stopped engine process (SIGSTOP) has not ended. Such an engine process may continue and complete the
  transfer before reading
  the fence. The sender's blocks wait until the process continues or is killed by its owner.

The kernel proves the end of a process: the pidfd becomes readable. A process is named by pid and start time,
which are valid within one boot and one pid namespace. The end of other processes, such as on another host,
cannot be observed. Over ``tcp`` no proof is needed. Over ``nixl`` the report of an API server that lost an
engine process ends the engine's transfers at the other engines.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.common.log import get_logger
from weft.types.transfer import Peer

log = get_logger(__name__)


class PeerProcess(NamedTuple):
    """The identity of a process, as sent to peers."""

    host: str
    """Boot id and pid namespace within which ``pid`` is valid."""
    pid: int
    started: int
    """Start time in ticks since boot. A pid can be reused, but never with the same start time."""


def own_process() -> PeerProcess:
    """Return the identity of the calling process."""
    return PeerProcess(_host(), os.getpid(), _started(os.getpid()) or 0)


class Peers(Protocol):
    """The processes of peers, and the peers that have ended."""

    @property
    def sockets(self) -> Sequence[Any]: ...

    def knows(self, peer: Peer) -> bool: ...

    def register(self, peer: Peer, process: PeerProcess) -> None: ...

    def look(self) -> None: ...

    def take(self) -> list[Peer]: ...

    def close(self) -> None: ...


class PeerWatch:
    """Watches the processes of peers on the local host. Implements ``Peers``. Used from one thread."""

    def __init__(self) -> None:
        self._host = _host()
        self._poller: select.epoll | None = None
        self._known: dict[Peer, PeerProcess] = {}
        self._pidfds: dict[int, Peer] = {}
        self._unwatched: dict[Peer, PeerProcess] = {}
        """Peers on systems without pidfds, with their processes. ``look`` checks such processes."""
        self._ended: list[Peer] = []

    @property
    def sockets(self) -> Sequence[Any]:
        """Descriptor, readable once a peer has ended."""
        if self._poller is None:
            self._poller = select.epoll()
        return (self._poller.fileno(),)

    def knows(self, peer: Peer) -> bool:
        """Return True if the process of the peer is known."""
        return peer in self._known

    def here(self, peer: Peer) -> bool:
        """Return True if the end of the peer can be observed."""
        process = self._known.get(peer)
        return process is not None and process.host == self._host

    def register(self, peer: Peer, process: PeerProcess) -> None:
        """Register the process of a peer and watch for the end, which ``take`` reports.

        Known peers are ignored.

        A process on another host is registered and logged, not watched.
        """
        if peer in self._known:
            return
        self._known[peer] = process
        if process.host != self._host:
            log.info("engine %s is on another host: API servers will report its end", peer.name)
            return
        # Open the pidfd before comparing start times: from then on a reuse of the pid cannot go unnoticed.
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._ended.append(peer)
            return
        except (OSError, AttributeError):
            self._unwatched[peer] = process
            return
        if _started(process.pid) != process.started:  # the peer has ended and the pid was reused
            os.close(descriptor)
            self._ended.append(peer)
            return
        assert self.sockets  # the property creates the poller
        assert self._poller is not None
        self._poller.register(descriptor, select.EPOLLIN)
        self._pidfds[descriptor] = peer

    def look(self) -> None:
        """Check the processes without a pidfd. Call ``look`` from time to time."""
        for peer, process in list(self._unwatched.items()):
            if _started(process.pid) != process.started:
                del self._unwatched[peer]
                self._ended.append(peer)

    def take(self) -> list[Peer]:
        """Return the peers that ended since the last call, each peer once. Does not block."""
        if self._pidfds and self._poller is not None:
            for descriptor, _ in self._poller.poll(0):
                self._ended.append(self._pidfds.pop(descriptor))
                self._poller.unregister(descriptor)
                os.close(descriptor)
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds.clear()
        if self._poller is not None:
            self._poller.close()
            self._poller = None


def _host() -> str:
    """Return "boot id/inode of the pid namespace" of this system. Unreadable parts are empty."""
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot}/{space}"


def _started(pid: int) -> int | None:
    """Return the start time of a process, or None if there is no process or only an unreaped (zombie)
    process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    # Fields after the command name: the first is the state, the 20th the start time.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
