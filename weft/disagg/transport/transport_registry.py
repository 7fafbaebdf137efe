"""Transports by name: Weft's own, and those of packages with an entry point in ``weft.transports``.

An entry point names a ``TransportKind``:

    [project.entry-points."weft.transports"]
    mooncake = "weft_mooncake:KIND"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.transfers import GROUP, NIXL, SHM, TCP, added_transports, check_transport
from weft.disagg.transport.base import Transport
from weft.disagg.transport.device_memory import DeviceWork
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.private_memory import huge_memory
from weft.disagg.transport.read_writes import SLOT_BYTES
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.sockets import SocketTransport
from weft.disagg.transport.staging_memory import Staged
from weft.disagg.transport.tcp import TcpTransport
from weft.disagg.transport.transport_set import TransportSet

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlace:
    """Arguments of a rank for its transport."""

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
    """The rank's caches, uint8 [bytes] each, numbered as in ``group_layout``. Empty for staged caches. On a
    GPU only for a transport with ``TransportKind.device``."""
    shared: Sequence[SharedMemory]
    """The same caches, if the transport wants memory that peers can map; else empty."""
    staged: Staged | None
    """Staged caches, as on a GPU; else None. The transport closes the memory."""
    ring: Callable[[], Staged] | None = None
    """For ``regions`` on a GPU: makes staged caches in their place."""


class TransportKind(NamedTuple):
    """A transport, as named by an entry point."""

    slot_bytes: int
    """Maximum bytes of one write of staged caches."""
    open: Callable[[TransportPlace], Transport]
    """Opens the transport of a rank, with registered memory. Raises ConfigError. The transport's ``fence``
    must be "copy"."""
    shared: bool = False
    """True if caches must be memory that peers can map. False: private memory in huge pages."""
    device: bool = False
    """True if the transport takes caches on a GPU as regions. False: such caches are staged."""


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


def open_set(names: Sequence[str], places: Sequence[TransportPlace]) -> Transport:
    """Open the transports ``names`` of one rank, each with its place, as one transport. A single name opens
    the transport alone. Raises ConfigError."""
    if len(names) == 1:
        return open_transport(names[0], places[0])
    members = list[SocketTransport]()
    try:
        for name, place in zip(names, places, strict=True):
            member = open_transport(name, place)
            assert isinstance(member, SocketTransport), "lists have Weft's own transports alone"
            members.append(member)
    except BaseException:
        for member in members:
            member.close()
        raise
    return TransportSet(members)


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
    """Open NIXL over the caches of ``place``. Caches on a GPU that NIXL refuses go through the ring."""
    if not place.regions or place.regions[0].device.type == "cpu":
        return _with_memory(_nixl(place), place)
    device = place.regions[0].device
    try:
        nixl = _nixl(place, partial(torch.empty, dtype=torch.uint8, device=device))
        try:
            nixl.place(place.regions, DeviceWork(device, SLOT_BYTES))
        except BaseException:
            nixl.close()
            raise
        return nixl
    except ConfigError as error:
        if place.ring is None:
            raise
        log.warning("caches on the GPU go through host memory: %s", error.message)
        return _with_memory(_nixl(place), dataclasses.replace(place, regions=(), staged=place.ring()))


def _nixl(place: TransportPlace, landing: Callable[[int], torch.Tensor] = huge_memory) -> NixlTransport:
    sends = place.sends
    return NixlTransport(
        place.host(),
        place.rank,
        place.incarnation,
        place.secret(),
        sends=sends,
        takes=not sends,
        landing=landing,
    )


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
    NIXL: TransportKind(NixlTransport.slot_bytes, _open_nixl, device=True),
}
