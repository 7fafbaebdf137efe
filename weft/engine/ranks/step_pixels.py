"""Pixels in step frames: ranks on the engine's host receive the names of shared memory in place of the
pixels.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Protocol, cast

import msgspec

from weft.common.errors import PixelsLost
from weft.common.log import get_logger
from weft.common.shared_bytes import UNREACHABLE, open_shared
from weft.types import frames as f
from weft.types.plan import Encode, SlotUpdate, StepPlan

log = get_logger(__name__)


class _Member(Protocol):
    @property
    def local(self) -> bool: ...


class StepPixels:
    """Pixels in step frames, on the engine's side. Used from the stepping thread."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, list[bytes]]] = deque()
        """(step, pixels) that ranks may still open."""
        self._by_name = True

    def framed(self, plan: StepPlan, members: Iterable[_Member]) -> StepPlan:
        """Return ``plan`` for a frame: with names if all ranks are local, else with pixels.

        A plan without shared pixels is returned unchanged.

        Pixels sent by name stay alive until ``settled`` or ``clear``.
        """
        ops = [op for op in plan.ops if isinstance(op, Encode) and op.shared is not None]
        if not ops:
            return plan
        # Names are useful only where every rank can open the memory. Ranks on other hosts need the pixels.
        by_name = self._by_name and all(member.local for member in members)
        if by_name:
            self._held.append((plan.step, [op.pixels for op in ops]))
        framed = tuple(_framed(op, by_name) for op in plan.ops)
        return msgspec.structs.replace(plan, ops=framed)

    def check(self, frame: f.ToEngine) -> f.ToEngine:
        """Return ``frame`` unchanged.

        After a rank has failed to open a name, later frames carry pixels; logged once.
        """
        if (
            isinstance(frame, f.RankFailed)
            and frame.error.code in (PixelsLost.code, UNREACHABLE)
            and self._by_name
        ):
            self._by_name = False
            log.warning(
                "ranks cannot map shared image memory; pixels are sent as bytes from now on: %s",
                frame.error.message,
            )
        return frame

    def settled(self, step: int) -> None:
        """Release the pixels of ``step`` and earlier steps, which all ranks have executed."""
        while self._held and self._held[0][0] <= step:
            self._held.popleft()

    def clear(self) -> None:
        """Release all pixels at the end of an epoch."""
        self._held.clear()


def _framed(op: SlotUpdate, by_name: bool) -> SlotUpdate:
    if not isinstance(op, Encode) or op.shared is None:
        return op
    return msgspec.structs.replace(op, pixels=b"") if by_name else msgspec.structs.replace(op, shared=None)


def opened(plan: StepPlan) -> StepPlan:
    """Return ``plan`` with all pixels, on a rank's side. Raises PixelsLost."""
    if not any(isinstance(op, Encode) and op.shared is not None for op in plan.ops):
        return plan
    return msgspec.structs.replace(plan, ops=tuple(map(_opened, plan.ops)))


def _opened(op: SlotUpdate) -> SlotUpdate:
    """Map the shared pixels of ``op`` and return ``op`` with the pixels.

    Other operations are returned unchanged. Raises PixelsLost.
    """
    if not isinstance(op, Encode) or op.shared is None:
        return op
    fd, view = open_shared(op.shared)
    os.close(fd)
    return msgspec.structs.replace(op, pixels=cast(bytes, view), shared=None)
