"""Which heads of other groups have ended: proof that their rooms need, not a guess from silence.

A room whose peer is silent fails by deadlines; its memory does not come back by them. What must be known:

* A *receiver's* memory is written by its own ranks alone (every transport here has ``fence`` "copy"), so it
  waits for those and for no peer.
* A *sender's* memory is read
    - over ``tcp`` by its own ranks alone: once they have stopped, no peer can reach it, alive or not;
    - over ``shm`` by the receiver's ranks, which have it mapped, read-only. What they read late does no harm
      here; it would there, if the sequence were decoded with it. A room lands by the word of the receiver's
      *head*, in its memory and nowhere else. So when that process has ended the room can never land, and the
      sender's blocks may be used again, though ranks of that head may live on, and read: one that joins the
      next head begins with stopping all rooms.
* A head that stands still (SIGSTOP) has not ended: it may go on and let the room land before it reads the
  fence. The sender's blocks of rooms with it wait until it goes on, or its owner kills it.

The end of a process is proven by the kernel: a pidfd of it becomes readable. Processes are named by pid and
start time, which mean something within one boot and one pid namespace. Of others, as on another host, nothing
is known: caches go there over ``tcp``, where no end need be proven, and a front that lost a head ends its
rooms at the other ones.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.common.log import get_logger
from weft.types.rooms import Peer

log = get_logger(__name__)


class Process(NamedTuple):
    """A process, as it tells others."""

    host: str
    """Where ``pid`` means something: boot and pid namespace."""
    pid: int
    started: int
    """Ticks since boot. A pid is given again, never with the same start."""


def own_process() -> Process:
    """This one."""
    return Process(_host(), os.getpid(), _started(os.getpid()) or 0)


class Peers(Protocol):
    """The processes of peers, and which of them have ended."""

    @property
    def sockets(self) -> Sequence[Any]: ...

    def knows(self, peer: Peer) -> bool: ...

    def heard(self, peer: Peer, process: Process) -> None: ...

    def look(self) -> None: ...

    def take(self) -> list[Peer]: ...

    def close(self) -> None: ...


class PeerWatch:
    """Watches the processes of peers on this host: an implementation of ``Peers``. Used from one thread."""

    def __init__(self) -> None:
        self._host = _host()
        self._poller: select.epoll | None = None
        self._known: dict[Peer, Process] = {}
        self._pidfds: dict[int, Peer] = {}
        self._unwatched: dict[Peer, Process] = {}
        """Where the system has no pidfds: looked at by ``look``."""
        self._ended: list[Peer] = []

    @property
    def sockets(self) -> Sequence[Any]:
        """Readable once a peer has ended."""
        if self._poller is None:
            self._poller = select.epoll()
        return (self._poller.fileno(),)

    def knows(self, peer: Peer) -> bool:
        """Whether its process has been told."""
        return peer in self._known

    def here(self, peer: Peer) -> bool:
        """Whether the end of the peer would be seen."""
        process = self._known.get(peer)
        return process is not None and process.host == self._host

    def heard(self, peer: Peer, process: Process) -> None:
        """The peer says which process it is."""
        if peer in self._known:
            return
        self._known[peer] = process
        if process.host != self._host:
            log.info("the end of a head on another host is told by fronts, not seen: %s", peer.name)
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._ended.append(peer)
            return
        except (OSError, AttributeError):
            self._unwatched[peer] = process
            return
        if _started(process.pid) != process.started:  # it ended, and another has its number
            os.close(descriptor)
            self._ended.append(peer)
            return
        assert self.sockets
        assert self._poller is not None
        self._poller.register(descriptor, select.EPOLLIN)
        self._pidfds[descriptor] = peer

    def look(self) -> None:
        """From time to time: finds what no descriptor tells."""
        for peer, process in list(self._unwatched.items()):
            if _started(process.pid) != process.started:
                del self._unwatched[peer]
                self._ended.append(peer)

    def take(self) -> list[Peer]:
        """Peers that have ended since the last call. Does not wait."""
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
        """Forgets all of them."""
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds.clear()
        if self._poller is not None:
            self._poller.close()
            self._poller = None


def _host() -> str:
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot}/{space}"


def _started(pid: int) -> int | None:
    """When a process started; None when there is none, or it has ended and nobody has asked how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
