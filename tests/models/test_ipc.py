"""Handles of GPU memory, with a stand-in for the CUDA runtime: places and bounds, not CUDA itself."""

from __future__ import annotations

import ctypes

import msgspec
import pytest
import torch

from weft.common.errors import InvalidRequest
from weft.models.ipc import export, opened
from weft.models.weight_group import announce


class HostRuntime:
    """Allocations in host memory of this process, under names of 64 bytes."""

    def __init__(self, *allocations: torch.Tensor) -> None:
        self._all = {one.data_ptr(): one for one in allocations}
        self.open_now: list[int] = []

    def range_of(self, pointer: int) -> tuple[int, int]:
        return next(
            (begin, one.nbytes) for begin, one in self._all.items() if begin <= pointer < begin + one.nbytes
        )

    def name_of(self, begin: int) -> bytes:
        return begin.to_bytes(64, "little")

    def open(self, name: bytes) -> int:
        self.open_now.append(int.from_bytes(name, "little"))
        return self.open_now[-1]

    def read(self, pointer: int, into: torch.Tensor) -> None:
        ctypes.memmove(into.data_ptr(), pointer, into.numel())

    def close(self, begin: int) -> None:
        self.open_now.remove(begin)


def test_tensors_of_one_allocation_are_read_at_their_offsets() -> None:
    arena, other = torch.arange(64, dtype=torch.float32), torch.arange(6, dtype=torch.bfloat16)
    sent = [("a", arena[8:20].view(3, 4)), ("b", arena[40:41]), ("c", other)]
    runtime = HostRuntime(arena, other)
    handles = export([one for _, one in sent], "GPU-1", runtime)
    assert [one.offset for one in handles] == [32, 160, 0]
    announced = msgspec.structs.replace(announce(sent), handles=tuple(handles))
    found = []
    for name, tensor in opened(announced, runtime):
        found.append((name, tensor))
        assert 1 <= len(runtime.open_now) <= 2  # an allocation is opened once
    assert runtime.open_now == []
    assert [name for name, _ in found] == ["a", "b", "c"]
    assert all(torch.equal(tensor, one) for (_, tensor), (_, one) in zip(found, sent, strict=True))
    beyond = msgspec.structs.replace(handles[1], offset=arena.nbytes - 2)
    announced = msgspec.structs.replace(announced, handles=(handles[0], beyond, handles[2]))
    with pytest.raises(InvalidRequest, match="tensor b has fewer bytes"):
        list(opened(announced, runtime))
    assert runtime.open_now == []
