"""Transports by name: Weft's own, and those of packages with an entry point in ``weft.transports``.

An entry point names a ``TransportKind``:

    [project.entry-points."weft.transports"]
    mooncake = "weft_mooncake:KIND"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.common.errors import ConfigError
from weft.config.transfers import GROUP, NIXL, SHM, TCP, added_transports, check_transport
from weft.disagg.transport.base import Transport
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.staging_memory import Staged
from weft.disagg.transport.tcp import TcpTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlace:
    """What a rank gives to its transport."""

    rank: int
    """Number of the rank within its group."""
    incarnation: int
    """Number of this process start: a part of the endpoint."""
    host: Callable[[], str]
    """Returns the numeric address of this host for peers."""
    secret: Callable[[], bytes]
    """Returns the group secret. Raises ConfigError without a secret."""
    folder: Callable[[], str]
    """Returns a folder for sockets, private to this user."""
    sends: bool
    """True if the rank sends, False if the rank receives."""
    regions: Sequence[torch.Tensor]
    """The rank's caches, uint8 [bytes] each, numbered as in ``group_layout``. Empty for staged caches."""
    shared: Sequence[SharedMemory]
    """The same caches, if the transport wants memory that peers can map; else empty."""
    staged: Staged | None
    """Staged caches, as on a GPU; else None. The transport closes the memory."""


class TransportKind(NamedTuple):
    """A transport, as named by an entry point."""

    slot_bytes: int
    """Maximum bytes of one write of staged caches."""
    open: Callable[[TransportPlace], Transport]
    """Opens the transport of a rank, with registered memory. Raises ConfigError. The transport's ``fence``
    must be "copy"."""
    shared: bool = False
    """True if caches must be memory that peers can map. False: private memory in huge pages."""


def transport_kind(name: str) -> TransportKind:
    """Return the transport ``name``. Raises ConfigError for an unknown name, or an entry point that is no
    ``TransportKind``."""
    if name in _OWN:
        return _OWN[name]
    check_transport(name)
    point = added_transports()[name]
    try:
        kind = point.load()
    except Exception as error:
        raise ConfigError(
            f"--transfer {name}: {point.value} of the entry-point group {GROUP} cannot be loaded ({error})",
            param="--transfer",
        ) from error
    if not isinstance(kind, TransportKind):
        raise ConfigError(
            f"--transfer {name}: {point.value} of the entry-point group {GROUP} is no TransportKind",
            param="--transfer",
        )
    return kind


def open_transport(name: str, place: TransportPlace) -> Transport:
    """Open the transport ``name``. Raises ConfigError."""
    transport = transport_kind(name).open(place)
    # Engines wait for no proof of the end of one-sided writes: a receiver's own rank must be its only writer.
    if transport.fence != "copy":
        transport.close()
        raise ConfigError(
            f'--transfer {name}: the fence of the transport is "{transport.fence}"; only "copy" is supported',
            param="--transfer",
        )
    return transport


def _open_shm(place: TransportPlace) -> Transport:
    shm = ShmTransport(place.folder(), place.rank, place.incarnation)
    if place.staged is None:
        shm.share(place.shared)
    else:
        shm.stage(place.staged)
    return shm


def _open_tcp(place: TransportPlace) -> Transport:
    return _with_memory(TcpTransport(place.host(), place.rank, place.incarnation, place.secret()), place)


def _open_nixl(place: TransportPlace) -> Transport:
    nixl = NixlTransport(
        place.host(),
        place.rank,
        place.incarnation,
        place.secret(),
        sends=place.sends,
        takes=not place.sends,
    )
    return _with_memory(nixl, place)


def _with_memory(transport: TcpTransport, place: TransportPlace) -> Transport:
    """Register the caches of ``place``. An error closes the transport."""
    try:
        if place.staged is None:
            transport.register(place.regions)
        else:
            transport.stage(place.staged)
    except BaseException:
        transport.close()
        raise
    return transport


_OWN = {
    SHM: TransportKind(ShmTransport.slot_bytes, _open_shm, shared=True),
    TCP: TransportKind(TcpTransport.slot_bytes, _open_tcp, shared=True),
    NIXL: TransportKind(NixlTransport.slot_bytes, _open_nixl),
}
