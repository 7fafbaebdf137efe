"""Memory of a GPU that several processes of one host map (CUDA IPC). Not confirmed on a GPU."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from weft.common.errors import Unavailable
from weft.store.announced import HANDLE_BYTES


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
