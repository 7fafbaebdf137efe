"""Chooses the transport between two engines when the engines meet. Pure.

    receiver  ── Bound: each rank with all its transports ──►  sender
    sender's engine: tries the shared memory of the receiver's ranks, and chooses one transport for all ranks
    sender's ranks   connect over the chosen transport

Two engines share memory if the sender can connect to the sockets of the receiver's ranks: a fact, found by
connecting. Host names, boot ids and addresses are no proof. Containers of one host may share no file, and two
hosts may have equal names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from weft.common.errors import ErrorInfo, NoCommonTransport, TransportFailed
from weft.types.transfer import Bound, Endpoint, Peer

SHM = "shm"
AGAIN_S = 60.0
"""Seconds for which a transport that failed with a peer is the last choice for the peer, and for which an
unreachable socket is not tried again."""
MOST_PEERS = 4096
"""Maximum remembered facts of each type. The oldest facts are forgotten."""
_K = TypeVar("_K")
_V = TypeVar("_V")


class _Reached(NamedTuple):
    """Result of the latest try to connect to the sockets of a peer's ranks."""

    addresses: tuple[str, ...]
    reached: bool
    until: float
    """Time of the next try; infinity after a success."""


def candidates(wanted: Sequence[str], endpoints: Sequence[Endpoint]) -> list[str]:
    """Return the transports that the sender and all ranks of the receiver have, in the sender's order."""
    offered = [endpoint.ways for endpoint in endpoints]
    return [name for name in wanted if all(name in one for one in offered)]


def narrowed(endpoints: Sequence[Endpoint], transport: str) -> tuple[Endpoint, ...]:
    """Return ``endpoints`` with ``transport`` as the only way."""
    return tuple(Endpoint(transport, one.ways[transport], one.incarnation) for one in endpoints)


class Pairing:
    """The choices of one sending engine, with the facts about its peers."""

    def __init__(self, wanted: Sequence[str], reach: Callable[[str], bool]) -> None:
        """``wanted``: transports of this engine in order of preference. ``reach(address)``: returns True if a
        process of this host, with shared memory for this process, listens at the address."""
        self._wanted, self._reach = tuple(wanted), reach
        self._reached: dict[Peer, _Reached] = {}
        self._failed: dict[tuple[Peer, str], float] = {}
        """(peer, transport) -> time until which the transport is the last choice."""

    def choose(self, peer: Peer, bound: Bound, now: float) -> Bound:
        """Return ``bound`` with one way to each rank: the first common transport that is usable and has not
        failed with the peer lately, else the first usable one. Raises NoCommonTransport."""
        common = candidates(self._wanted, bound.endpoints)
        usable = [name for name in common if name != SHM or self._shared(peer, bound.endpoints, now)]
        if not usable:
            raise NoCommonTransport(_why(self._wanted, common, bound.endpoints))
        # `False` sorts before `True`, and the sort keeps the sender's order.
        best = min(usable, key=lambda name: self._failed.get((peer, name), now) > now)
        return msgspec.structs.replace(bound, endpoints=narrowed(bound.endpoints, best))

    def failed(self, peer: Peer, transport: str, error: ErrorInfo | None, now: float) -> None:
        """Note a failed transfer. Only ``TransportFailed`` speaks against the transport."""
        if error is not None and error.code == TransportFailed.code:
            _remember(self._failed, (peer, transport), now + AGAIN_S)
            # The socket's file may be gone while the ranks live, so try again after the pause.
            if transport == SHM and (known := self._reached.get(peer)) is not None:
                self._reached[peer] = known._replace(until=min(known.until, now + AGAIN_S))

    def _shared(self, peer: Peer, endpoints: Sequence[Endpoint], now: float) -> bool:
        """Return True if this engine can connect to the sockets of all ranks. A failed try is repeated after
        ``AGAIN_S``. Ranks that start again have new addresses, so old facts do not apply to them."""
        addresses = tuple(endpoint.ways[SHM] for endpoint in endpoints)
        known = self._reached.get(peer)
        if known is None or known.addresses != addresses or known.until <= now:
            reached = all(map(self._reach, addresses))
            known = _Reached(addresses, reached, float("inf") if reached else now + AGAIN_S)
            _remember(self._reached, peer, known)
        return known.reached


def _remember(facts: dict[_K, _V], key: _K, fact: _V) -> None:
    """Set a fact as the newest one, and forget the oldest fact over the limit."""
    facts.pop(key, None)
    facts[key] = fact
    if len(facts) > MOST_PEERS:
        del facts[next(iter(facts))]


def _why(wanted: Sequence[str], common: Sequence[str], endpoints: Sequence[Endpoint]) -> str:
    """Return the reason for ``NoCommonTransport``."""
    if common:
        return "--transfer shm: two engines share no memory, since one cannot connect to the other's sockets"
    theirs = ", ".join(endpoints[0].ways) if endpoints else "nothing"
    return f"two engines have no transport in common: {', '.join(wanted)} here, {theirs} at the receiver"
