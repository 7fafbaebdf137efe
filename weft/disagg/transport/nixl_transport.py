"""Ranks with NIXL: the receiver reads the sender's memory, over RDMA, shared memory or TCP as UCX chooses.

    sender                                          receiver
      Hello and proofs of tcp ◄──────────────────►
      MemoryOffer(metadata, regions) ─────────────►  adds the sender's engine
      WriteFrame(spans, digests) ─────────────────►  reads into landing memory, copies with digests
      ◄──────────────────────────────── AnswerFrame

Connections, proofs, windows and answers are those of ``tcp``, without a payload. The metadata go to NIXL only
after the proof of the secret. NIXL's own connections prove nothing: see docs/transfer.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from weft.common.errors import ConfigError, EngineDead, ErrorInfo
from weft.common.log import get_logger
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.protocol.pushes import Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport import wire as f
from weft.disagg.transport.base import TakePending
from weft.disagg.transport.device_memory import DeviceMemory, DeviceWork
from weft.disagg.transport.peer_connection import Got
from weft.disagg.transport.peer_links import ByteSource, PeerLink, check_inside, connection_broke
from weft.disagg.transport.private_memory import huge_memory
from weft.disagg.transport.read_engine import Kind, NixlEngine, ReadEngine, segment_of
from weft.disagg.transport.read_writes import SLOT_BYTES, ReadPeer, ReadWrites
from weft.disagg.transport.staging_memory import Memory
from weft.disagg.transport.taking import take_in
from weft.disagg.transport.tcp import TcpTransport
from weft.types.transfer import U64, TransferKey

log = get_logger(__name__)

_CLOSE_S = 2.0
"""Maximum seconds that ``close`` waits for reads under way."""
_ABANDONED: list[object] = []
"""Engines and landing memory of closed transports with a read that has not ended. They live as long as the
process, because the read may still write."""


class _Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    address: Annotated[int, Meta(ge=0, lt=1 << 62)]
    nbytes: Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Content of a ``MemoryOffer``."""

    engine: Annotated[str, Meta(max_length=128)]
    metadata: bytes
    kind: Kind
    device: U64
    regions: Annotated[tuple[_Region, ...], Meta(max_length=4096)]


class _Peer(msgspec.Struct):
    """An engine of a peer, over one or more connections."""

    metadata: bytes
    links: set[str]
    broken: bool = False
    """True after a failed read, until the engine is removed."""


class NixlTransport(TcpTransport):
    """NIXL transport. Listens on ``host``, at a port chosen by the system. See ``base.Transport``."""

    name = "nixl"
    write_bytes = SLOT_BYTES
    window_bytes = 64 << 20
    slot_bytes = SLOT_BYTES

    def __init__(
        self,
        host: str,
        rank: int,
        incarnation: int,
        secret: bytes,
        *,
        sends: bool = True,
        takes: bool = True,
        engine: Callable[[str], ReadEngine] = NixlEngine,
        landing: Callable[[int], torch.Tensor] = huge_memory,
    ) -> None:
        """``sends``: offer the registered memory to receivers. ``takes``: have landing memory. ``engine``:
        makes the engine of a name. ``landing``: makes landing memory, on the host or on a GPU. Raises
        ConfigError without NIXL, for a short secret, for an address without permission to listen, or if NIXL
        refuses the landing memory."""
        self._sends, self._closed = sends, False
        self._offer, self._on_gpu = b"", False
        self._offers: dict[str, _Offer] = {}
        """Connection -> memory of the writer."""
        self._engines: dict[str, _Peer] = {}
        """Added engines of peers, by name."""
        super().__init__(host, rank, incarnation, secret)
        try:
            self._engine = engine(f"weft-{incarnation:x}-{rank}-{secrets.token_hex(4)}")
            self._reads = (
                ReadWrites(self._engine, self._take_piece, self._broke, memory=landing) if takes else None
            )
        except BaseException:
            super().close()
            raise

    def place(self, regions: Sequence[torch.Tensor], work: DeviceWork) -> None:
        """Register caches on a GPU, in place of ``register``. Peers read the caches directly. ``close`` also
        closes ``work``. Raises ConfigError if NIXL refuses the memory."""
        self._use(DeviceMemory(regions, work))

    # ---- Transport

    def _use(self, memory: Memory) -> None:
        """Register the memory that peers will read, and prepare the offer. Raises ConfigError if NIXL refuses
        the memory, or for an offer over its limit."""
        super()._use(memory)
        if not self._sends:
            return
        segments = [segment_of(region) for region in memory.shown]
        if len({(segment.kind, segment.device) for segment in segments}) > 1:
            raise ConfigError("--transfer nixl: the caches of a rank lie on several devices")
        self._engine.register(segments)
        kind, device = (segments[0].kind, segments[0].device) if segments else ("DRAM", 0)
        self._on_gpu = kind == "VRAM" and not memory.staged
        regions = tuple(_Region(segment.address, segment.nbytes) for segment in segments)
        offer = _Offer(self._engine.name, self._engine.metadata(), kind, device, regions)
        self._offer = msgspec.msgpack.encode(offer)
        if len(self._offer) > f.MOST_OFFER:
            raise ConfigError(
                f"--transfer nixl: the offer of {len(regions)} regions of caches has "
                f"{len(self._offer)} bytes; the limit is {f.MOST_OFFER}. Use --transfer tcp",
                param="--transfer",
            )

    def digest(self, key: TransferKey, peer: str, parts: Sequence[SpanPart]) -> np.ndarray:
        if self._on_gpu:
            raise EngineDead("caches on a GPU must be placed, not registered: the host cannot read the bytes")
        return super().digest(key, peer, parts)

    def write(self, write: Write) -> None:
        if not self._sends:
            raise EngineDead("a rank that only receives cannot send")
        super().write(write)

    def poll(self, seconds: float) -> list[Incoming | Written | Copied]:
        if self._reads is not None:
            self._events += self._reads.progress()
        return super().poll(seconds)

    def take(self, incoming: Incoming) -> ErrorInfo | TakePending | None:
        offer = self._offers.get(incoming.source)
        if offer is None or self._reads is None:
            return connection_broke()
        return self._reads.begin(incoming, ReadPeer(offer.engine, offer.kind, offer.device))

    def cancel(self, key: TransferKey) -> None:
        super().cancel(key)
        if self._reads is not None:
            self._reads.cancel(key)

    def quiet(self, key: TransferKey) -> bool:
        return super().quiet(key) and (self._reads is None or self._reads.quiet(key))

    def close(self) -> None:
        """Free all resources. Idempotent.

        A read that does not end keeps the engine and its landing memory, the slots of ``ReadWrites``. Raises
        EngineDead if a GPU does not finish a copy of staged caches in time.
        """
        if self._closed:
            return
        self._closed = True
        if self._reads is not None and not self._reads.close(_CLOSE_S):
            log.warning("a read of a peer's memory has not ended: its memory is kept until the process ends")
            _ABANDONED.append((self._engine, self._reads, self._memory))
        else:
            self._engine.close()
        super().close()

    # ---- connections

    def _open(self, link: PeerLink) -> None:
        if link.writer:
            link.connection.send(f.MemoryOffer(self._offer))
        super()._open(link)

    def _got(self, link: PeerLink, got: Got) -> None:
        match got.frame:
            case f.MemoryOffer(data) if (
                not link.writer and link.until is None and link.name not in self._offers
            ):
                self._offers[link.name] = self._added(link, data)
            case _:
                super()._got(link, got)

    def _added(self, link: PeerLink, data: bytes) -> _Offer:
        """Add the engine of an offer and return the offer. Raises BadFrame for a bad offer."""
        try:
            offer = msgspec.msgpack.decode(data, type=_Offer)
        except (msgspec.DecodeError, ValueError) as error:
            raise f.BadFrame(f"a peer sent a bad offer of its memory: {error}") from None
        known = self._engines.get(offer.engine)
        if self._reads is None or offer.engine == self._engine.name:
            raise f.BadFrame("a peer offers memory to a rank that does not read")
        if known is None:
            if self._engine.add(offer.metadata) != offer.engine:
                raise f.BadFrame("a peer offers the memory of another engine")
            known = self._engines[offer.engine] = _Peer(offer.metadata, set())
        elif known.broken or known.metadata != offer.metadata:
            raise f.BadFrame("a peer offers memory again before the end of all reads from its earlier offer")
        known.links.add(link.name)
        return offer

    def _lost(self, link: PeerLink | None, error: Exception) -> None:
        if link is not None and self._lives(link) and (offer := self._offers.pop(link.name, None)):
            assert self._reads is not None
            self._reads.lost(link.name)
            self._engines[offer.engine].links.discard(link.name)
        super()._lost(link, error)

    def _expire(self) -> None:
        super()._expire()
        self._forget()

    def _forget(self) -> None:
        """Remove the engines of closed connections, once no read from the engine is under way."""
        for name, peer in list(self._engines.items()):
            if not peer.links and self._reads is not None and not self._reads.reads(name):
                del self._engines[name]
                self._engine.remove(name)

    def _broke(self, engine: str) -> None:
        """Close all connections to an engine after a broken read. The next offer connects again."""
        if (peer := self._engines.get(engine)) is None:
            return
        peer.broken = True
        for name in list(peer.links):
            self._lost(self._links[name], ConnectionResetError("a read of the peer's memory broke"))

    def patience(self) -> float:
        due = None if self._reads is None else self._reads.patience()
        return super().patience() if due is None else min(due, super().patience())

    # ---- writes

    def _payload(self, write: Write) -> list[memoryview]:
        return []

    def _sources(
        self, link: PeerLink, parts: Sequence[tuple[f.SpansFrame, np.ndarray]], got: Got
    ) -> ByteSource:
        """Return the source of a write: no memory yet, and source offsets as addresses at the writer. Raises
        BadFrame for an unknown region, a span outside the region, or a span longer than landing memory."""
        offer = self._offers.get(link.name)
        if offer is None or got.payload is not None:
            raise f.BadFrame("a write came without an offer of memory, or with a payload")
        moved = list[tuple[int, np.ndarray]]()
        for part, spans in parts:
            if part.source >= len(offer.regions):
                raise f.BadFrame("a write names a region that its sender has not offered")
            region = offer.regions[part.source]
            check_inside(spans[:, 0], spans[:, 2], region.nbytes)
            if len(spans) and int(spans[:, 2].max()) > SLOT_BYTES:
                raise f.BadFrame(f"a span is longer than {SLOT_BYTES} bytes")
            here = spans.copy()
            here[:, 0] += region.address
            moved.append((part.target, here))
        return ByteSource((), tuple(moved), np.empty(0), 0)

    def _held_bytes(self, frame: f.WriteFrame, got: Got) -> int:
        return 1024 + sum(len(part.spans) for part in frame.parts)

    def _take_piece(self, incoming: Incoming) -> ErrorInfo | None:
        error = take_in(self._memory, incoming, self.rank, self.endpoint.address)
        self.corrupt += error is not None
        return error
