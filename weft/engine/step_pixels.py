"""Pixels in frames of steps: to ranks on the head's host go the names of the memory that has them."""

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
from weft.types.plan import Encode, Op, StepPlan

log = get_logger(__name__)


class _Member(Protocol):
    @property
    def local(self) -> bool: ...


class StepPixels:
    """Pixels in the frames of steps, on the head's side. Used from the thread that steps."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, list[bytes]]] = deque()
        """By step, what ranks may still have to open."""
        self._by_name = True

    def framed(self, plan: StepPlan, members: Iterable[_Member]) -> StepPlan:
        """``plan`` as its frame has it."""
        ops = [op for op in plan.ops if isinstance(op, Encode) and op.shared is not None]
        if not ops:
            return plan
        by_name = self._by_name and all(member.local for member in members)
        if by_name:
            self._held.append((plan.step, [op.pixels for op in ops]))
        framed = tuple(_framed(op, by_name) for op in plan.ops)
        return msgspec.structs.replace(plan, ops=framed)

    def heard(self, frame: f.ToHead) -> f.ToHead:
        """``frame``. A rank that cannot open what it is told is sent pixels from then on."""
        if (
            isinstance(frame, f.Failed)
            and frame.error.code in (PixelsLost.code, UNREACHABLE)
            and self._by_name
        ):
            self._by_name = False
            log.warning("ranks get the pixels of images in frames from now on: %s", frame.error.message)
        return frame

    def settled(self, step: int) -> None:
        """All ranks have carried out ``step``, and those before it."""
        while self._held and self._held[0][0] <= step:
            self._held.popleft()

    def clear(self) -> None:
        """The epoch has ended."""
        self._held.clear()


def _framed(op: Op, by_name: bool) -> Op:
    if not isinstance(op, Encode) or op.shared is None:
        return op
    return msgspec.structs.replace(op, pixels=b"") if by_name else msgspec.structs.replace(op, shared=None)


def opened(plan: StepPlan) -> StepPlan:
    """A rank's side: ``plan`` with all pixels. Raises PixelsLost."""
    if not any(isinstance(op, Encode) and op.shared is not None for op in plan.ops):
        return plan
    return msgspec.structs.replace(plan, ops=tuple(map(_opened, plan.ops)))


def _opened(op: Op) -> Op:
    if not isinstance(op, Encode) or op.shared is None:
        return op
    fd, view = open_shared(op.shared)
    os.close(fd)
    return msgspec.structs.replace(op, pixels=cast(bytes, view), shared=None)
