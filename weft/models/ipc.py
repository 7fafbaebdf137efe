"""Weights in the memory of a GPU, passed by name to another process of the same host (CUDA IPC).

    trainer: export(tensors) ──► (GPU, 64 bytes of the CUDA runtime, offset) a tensor ──► receiver: opened(..)

The trainer keeps the tensors until POST /update_weights has answered. Other engines send torch's own handles
as a pickle. A pickle runs code of its sender, and torch's handles name files whose counters the receiver
writes: both are refused. Not confirmed on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from weft.common.errors import InvalidRequest, Unavailable
from weft.store.announced import HANDLE_BYTES, sizes
from weft.types.weights import AnnouncedTensors, IpcHandle


class Runtime(Protocol):
    """The calls of the CUDA runtime and driver that IPC needs. Each raises Unavailable after an error."""

    def range_of(self, pointer: int) -> tuple[int, int]:
        """Return (begin, bytes) of the allocation of a pointer on the device."""

    def name_of(self, begin: int) -> bytes:
        """Return the name of an allocation of this process."""

    def open(self, name: bytes) -> int:
        """Map an allocation of another process, and return the begin."""

    def read(self, pointer: int, into: torch.Tensor) -> None:
        """Copy bytes from the device into ``into`` (uint8 in host memory)."""

    def close(self, begin: int) -> None:
        """Undo ``open``."""


def export(tensors: Iterable[torch.Tensor], gpu: str, runtime: Runtime | None = None) -> list[IpcHandle]:
    """Return a handle for each contiguous tensor on the GPU with the UUID ``gpu``."""
    cuda = CudaRuntime() if runtime is None else runtime
    made = []
    for tensor in tensors:
        begin, _ = cuda.range_of(tensor.data_ptr())
        made.append(IpcHandle(gpu=gpu, name=cuda.name_of(begin), offset=tensor.data_ptr() - begin))
    return made


def opened(announced: AnnouncedTensors, runtime: Runtime | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor in host memory) of announced handles. Raises InvalidRequest for a handle that has
    no such bytes, and Unavailable."""
    cuda = CudaRuntime() if runtime is None else runtime
    bases = dict[tuple[str, bytes], int]()
    try:
        for index, size in enumerate(sizes(announced)):
            name, handle = announced.names[index], announced.handles[index]
            if (key := (handle.gpu, handle.name)) not in bases:
                if runtime is None:
                    _use_gpu(handle.gpu)
                bases[key] = cuda.open(handle.name)
            begin, length = cuda.range_of(bases[key])
            if handle.offset + size > length:
                raise InvalidRequest(f"the handle of tensor {name} has fewer bytes than announced")
            buffer = torch.empty(size, dtype=torch.uint8)
            cuda.read(begin + handle.offset, buffer)
            yield name, buffer.view(getattr(torch, announced.dtypes[index])).view(announced.shapes[index])
    finally:
        for base in bases.values():
            cuda.close(base)


def gpu_of(tensor: torch.Tensor) -> str:
    """Return the UUID of the GPU of ``tensor``."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def _use_gpu(gpu: str) -> None:
    """Let this thread use the GPU with the UUID ``gpu``. Raises InvalidRequest."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == gpu:
            torch.cuda.set_device(number)
            return
    raise InvalidRequest(f"the engine process has no GPU {gpu}")


class _Name(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class CudaRuntime:
    """``Runtime`` by libcudart and libcuda. Raises Unavailable without them."""

    def __init__(self) -> None:
        torch.cuda.init()
        try:
            self._cudart = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(f"no CUDA runtime for IPC: {error}") from error

    def range_of(self, pointer: int) -> tuple[int, int]:
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        call = self._driver.cuMemGetAddressRange_v2
        _check(call(ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(pointer)), "range")
        return begin.value, size.value

    def name_of(self, begin: int) -> bytes:
        name = _Name()
        _check(self._cudart.cudaIpcGetMemHandle(ctypes.byref(name), ctypes.c_void_p(begin)), "export")
        return bytes(memoryview(name).cast("B"))

    def open(self, name: bytes) -> int:
        begin, lazy = ctypes.c_void_p(), ctypes.c_uint(1)
        call = self._cudart.cudaIpcOpenMemHandle
        _check(call(ctypes.byref(begin), _Name.from_buffer_copy(name), lazy), "open")
        return begin.value or 0

    def read(self, pointer: int, into: torch.Tensor) -> None:
        to, size, kind = ctypes.c_void_p(into.data_ptr()), ctypes.c_size_t(into.numel()), ctypes.c_int(2)
        _check(self._cudart.cudaMemcpy(to, ctypes.c_void_p(pointer), size, kind), "copy")

    def close(self, begin: int) -> None:
        _check(self._cudart.cudaIpcCloseMemHandle(ctypes.c_void_p(begin)), "close")


def _check(status: int, what: str) -> None:
    if status:
        raise Unavailable(f"CUDA IPC: {what} of memory failed with status {status}")
