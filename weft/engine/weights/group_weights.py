"""New weights on all ranks of a group.

Staging runs on all ranks in parallel to steps, and is complete when all ranks have read the same files. A
swap is carried out with no step in flight. From the first message of a swap on, the new version is the
version of the group: a rank that is lost during the swap is started again with the new weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from weft.common.errors import EngineDead, InvalidRequest, ReportedError, Unavailable, WeftError
from weft.engine.weights.rank_weights import RankWeights
from weft.types import frames as f
from weft.types.weights import (
    DropWeights,
    FreeMemory,
    StageWeights,
    SwapWeights,
    WeightsReport,
    WeightsUpdate,
)

SWAP_S = 120.0
"""Maximum seconds until all ranks have copied the weights."""


class GroupWeights:
    """The engine's side. Used from the stepping thread, except ``ended``."""

    def __init__(
        self,
        own: RankWeights,
        others: Collection[int],
        send: Callable[[int, bytes], bool],
        chosen: Callable[[tuple[WeightsUpdate, ...]], None],
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        """``own``: the engine's rank. ``others``: all other ranks. ``send(rank, frame)``: returns False for a
        rank that takes no frames now. ``chosen``: gets the updates that ranks need after a start, before a
        swap. ``wait(until)``: handles frames until ``until()``; raises GroupLost."""
        self._own, self._others, self._send = own, others, send
        self._chosen, self._wait = chosen, wait
        self.updates: tuple[WeightsUpdate, ...] = ()
        """Updates from the last complete one to the version in use, in order."""
        self._update: WeightsUpdate | None = None
        self._reports: dict[int, WeightsReport] = {}
        self._lost = False
        """True after the end of a rank's process since ``stage``."""

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._own.version

    @property
    def name(self) -> str | None:
        """Name of the weights in use, see ``WeightsChanged.name``."""
        return self._own.name

    @property
    def staged_version(self) -> int:
        """Version of the staged weights; 0 for none."""
        return 0 if self._update is None else self._update.version

    @property
    def descriptor(self) -> Any:
        """Readable when the engine's rank has staged."""
        return self._own.wakeup.descriptor

    def stage(self, update: WeightsUpdate) -> None:
        """Begin to read ``update`` on all ranks. ``staged`` has the result."""
        self._update, self._reports, self._lost = update, {}, False
        self._own.stage(update)
        data = f.encode(StageWeights(update=update)) if self._others else b""
        sent = [self._send(rank, data) for rank in self._others]
        if not all(sent):  # ``ended`` may have set the flag meanwhile
            self._lost = True

    def staged(self) -> str | None:
        """Return the digest of the staged files once all ranks are done; None before.

        Raises InvalidRequest or Unavailable if a rank refuses the files, reads other files or is lost.
        """
        if self._update is None:
            return None
        if (report := self._own.report()) is not None:
            self._reports[-1] = report  # -1: the engine's rank
        if self._lost:
            raise self._failed(Unavailable("a rank was lost while new weights were read; try again"))
        if len(self._reports) <= len(self._others):
            return None
        reports = list(self._reports.values())
        for report in reports:
            if report.error is not None:
                raise self._failed(ReportedError(report.error))
        if len({report.digest for report in reports}) > 1:
            raise self._failed(InvalidRequest("the ranks read different files", param="update_info"))
        return reports[0].digest

    def swap(self, version: int) -> str:
        """Use the staged weights on all ranks, with no step in flight, and return the digest of the files.

        Blocks. Raises InvalidRequest or Unavailable before anything has changed. Raises GroupLost if a rank
        is lost, or holds other weights than the engine: the group then recovers with the new weights.
        """
        update = self._update
        if version == self.version and version:
            return ""
        if update is None or update.version != version or len(self._reports) <= len(self._others):
            raise InvalidRequest(f"version {version} of the weights was not staged")
        if self._lost:
            raise self._failed(Unavailable("a rank was lost since new weights were read; try again"))
        if self._own.moved:  # all ranks move experts together
            raise self._failed(Unavailable("experts have moved since new weights were read; try again"))
        self._update = None
        self.updates = (*self.updates, update) if update.partial else (update,)
        self._chosen(self.updates)
        self._reports = {}
        digest = self._own.swap(version).digest
        self._command(SwapWeights(version=version), "use the new weights")
        for report in self._reports.values():
            if (report.version, report.digest) != (version, digest):
                raise EngineDead(f"rank {report.rank} holds other weights than the engine")
        return digest

    def free(self, weights: bool) -> None:
        """Release the memory of the KV cache, and with ``weights`` also of the weights, on all ranks.

        No sequence may be open. Blocks. Raises GroupLost if a rank is lost.
        """
        self._update, self._reports = None, {}
        self._own.free(weights)
        self._command(FreeMemory(weights=weights), "release memory")

    def _command(self, message: SwapWeights | FreeMemory, what: str) -> None:
        """Send ``message`` to all other ranks, and block until all have reported. Raises GroupLost."""
        data = f.encode(message) if self._others else b""
        for rank in self._others:
            self._send(rank, data)
        until = time.monotonic() + SWAP_S

        def done() -> bool:
            if time.monotonic() > until:
                raise EngineDead(f"a rank did not {what} in time")
            return len(self._reports) == len(self._others)

        self._wait(done)

    def drop(self) -> None:
        """Forget staged weights on all ranks."""
        self._update = None
        self._own.drop()
        for rank in self._others:
            self._send(rank, f.encode(DropWeights()))

    def report(self, report: WeightsReport) -> None:
        """Store the report of another rank."""
        self._reports[report.rank] = report

    def ended(self, rank: int) -> None:
        """Note the end of a rank's process. Safe from any thread."""
        self._lost = True

    def _failed(self, error: WeftError) -> WeftError:
        """Forget the staged weights and return ``error``."""
        self.drop()
        return error
