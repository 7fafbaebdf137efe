"""Engines that read the memory of another process: NIXL, behind a small protocol.

    sender's rank     register(regions); metadata() ── Weft's own connection ──►  receiver's rank
    receiver's rank   add(metadata) ── name;  start(name, to, source) ── read;  ended(read), polled

Only ``NixlEngine`` imports NIXL. Tests use a stand-in with the same methods.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from weft.common import env
from weft.common.errors import ConfigError, TransportFailed
from weft.config.transfers import NIXL, NIXL_MODULES, check_installed

_WAKE_US = 10_000
"""Maximum microseconds between two rounds of NIXL's progress thread. Sockets wake the thread at once. With
NIXL's own default of 0 the thread spins and takes a whole core."""

Kind = Literal["DRAM", "VRAM"]


class Segment(NamedTuple):
    """Contiguous memory of one region."""

    kind: Kind
    """DRAM: host memory. VRAM: memory of a GPU."""
    address: int
    nbytes: int
    device: int
    """Number of the GPU; 0 for host memory."""


class ReadBroken(TransportFailed):
    """A read has failed."""

    def __init__(self, message: str, over: bool) -> None:
        """``over``: True if the engine writes no byte of the read any more."""
        super().__init__(message)
        self.over = over


class ReadEngine(Protocol):
    """Reads memory of peers into registered memory of this process. Used from one thread. No call waits for a
    peer, but ``start`` may copy all bytes before the return."""

    name: str
    """Name of this engine for peers, unique over all processes."""

    def register(self, segments: Sequence[Segment]) -> None:
        """Register memory of this process, for reads by peers and as target of own reads. Raises ConfigError
        if the engine refuses the memory."""

    def metadata(self) -> bytes:
        """Return the bytes by which a peer reaches this engine and the registered memory."""

    def add(self, metadata: bytes) -> str:
        """Add a peer and return its name. Raises TransportFailed for bad metadata."""

    def remove(self, peer: str) -> None:
        """Disconnect a peer. No read from the peer may be under way. No effect for an unknown peer."""

    def start(self, peer: str, kind: Kind, source: np.ndarray, to: np.ndarray, to_kind: Kind) -> Any:
        """Start a read and return a handle for ``ended``.

        ``kind``, ``to_kind``: of the peer's memory and of ``to``. source, to: uint64 [n, 3], address, bytes
        and device of each piece, with the same lengths. Raises ReadBroken.
        """

    def ended(self, read: Any) -> bool:
        """Return True once all bytes of the read are there. Afterwards ``read`` must not be used. Raises
        ReadBroken after a failure, which ends the read, too."""

    def close(self) -> None:
        """Free all resources. No read may be under way."""


def segment_of(region: torch.Tensor) -> Segment:
    """Return the segment of a contiguous tensor, in host memory or on a GPU."""
    nbytes = region.numel() * region.element_size()
    if region.device.type == "cpu":
        return Segment("DRAM", region.data_ptr(), nbytes, 0)
    return Segment("VRAM", region.data_ptr(), nbytes, region.get_device())


def module_name(cuda: str | None = None) -> str | None:
    """Return the name of the installed NIXL module, or None. ``cuda``: version of CUDA, such as "12.8": its
    wheel is preferred."""
    wanted = f"nixl_cu{(cuda or '').partition('.')[0]}"
    names = sorted(NIXL_MODULES, key=lambda name: name != wanted)
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


class NixlEngine:
    """NIXL with its UCX backend. See ``ReadEngine``.

    The engine uses NIXL's bindings directly: NIXL's Python class has no setting for the delay of the
    progress thread, and its handles cancel a read when Python drops them.
    """

    def __init__(self, name: str) -> None:
        """Raises ConfigError without NIXL, or if UCX cannot start."""
        check_installed(NIXL)
        module = module_name(torch.version.cuda)
        env.prepare_ucx()
        self.name = name
        try:
            self._nixl: Any = importlib.import_module(f"{module}._bindings")
            config = self._nixl.nixlAgentConfig()
            # A sender calls nothing while peers read, so a thread of NIXL serves the peers.
            config.useProgThread, config.pthrDelay = True, _WAKE_US
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._backend = [self._agent.createBackend("UCX", {})]
        except Exception as error:
            raise ConfigError(f"--transfer nixl: NIXL cannot start ({error})", param="--transfer") from error
        self._registered: list[Any] = []
        self._kinds = {"DRAM": self._nixl.DRAM_SEG, "VRAM": self._nixl.VRAM_SEG}

    def register(self, segments: Sequence[Segment]) -> None:
        for kind in sorted({segment.kind for segment in segments}):
            rows = [segment[1:] for segment in segments if segment.kind == kind and segment.nbytes]
            if not rows:
                continue
            listed = self._nixl.nixlRegDList(self._kinds[kind], np.array(rows, np.uint64))
            try:
                self._agent.registerMem(listed, self._backend)
            except Exception as error:  # NIXL has a class of exceptions per status
                size = sum(row[1] for row in rows)
                raise ConfigError(
                    f"--transfer nixl: NIXL cannot register {size} bytes of {kind} for caches ({error}); for "
                    "RDMA raise the limit of locked memory (ulimit -l)",
                    param="--transfer",
                ) from error
            self._registered.append(listed)

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def add(self, metadata: bytes) -> str:
        try:
            name = self._agent.loadRemoteMD(metadata)
        except Exception as error:  # NIXL has a class of exceptions per status
            raise TransportFailed(f"NIXL does not accept the metadata of a peer ({error})") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        # After a disconnect NIXL has removed the peer already.
        with contextlib.suppress(Exception):
            self._agent.invalidateRemoteMD(peer)

    def start(self, peer: str, kind: Kind, source: np.ndarray, to: np.ndarray, to_kind: Kind) -> Any:
        nixl = self._nixl
        try:
            read = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(self._kinds[to_kind], to),
                nixl.nixlXferDList(self._kinds[kind], source),
                peer,
                "",
                self._backend,
            )
        except Exception as error:  # NIXL has a class of exceptions per status
            raise ReadBroken(f"NIXL cannot read a peer's memory ({error})", over=True) from error
        try:
            self._agent.postXferReq(read, "")
        except Exception as error:  # NIXL has a class of exceptions per status
            raise self._broken(read, error) from error
        return read

    def ended(self, read: Any) -> bool:
        try:
            state = self._agent.getXferStatus(read)
        except Exception as error:  # NIXL has a class of exceptions per status
            raise self._broken(read, error) from error
        if state == self._nixl.NIXL_IN_PROG:
            return False
        self._agent.releaseXferReq(read)
        return True

    def close(self) -> None:
        for listed in self._registered:
            self._agent.deregisterMem(listed, self._backend)
        self._registered.clear()
        self._agent = None

    def _broken(self, read: Any, error: Exception) -> ReadBroken:
        """Release a failed read and return its error.

        After a disconnect UCX has ended every operation of the connection. NIXL then forgets the peer, so
        other reads from the peer end with "not found". After any other error some pieces of the read may
        still arrive: ``over`` is False.
        """
        gone = isinstance(error, self._nixl.nixlRemoteDisconnectError | self._nixl.nixlNotFoundError)
        if gone:
            self._agent.releaseXferReq(read)
            return ReadBroken("the connection to a rank of the other group broke", over=True)
        return ReadBroken(f"a read of a peer's memory failed ({error})", over=False)
