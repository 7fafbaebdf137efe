"""A device guard for CUDA in a build of torch without CUDA.

Many operators first make the device of their tensors current, through a table in libc10 with one entry for
each device type. A CPU build has no entry for CUDA, so that even ``x[0]`` of a fake CUDA tensor raises. This
module adds an entry that does nothing and reports "device 0 of CUDA". The entry is a copy of the CPU entry
with two replaced functions. A build with CUDA has an entry already, which FakeTensorMode handles without a
GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
_CPU, _CUDA, _TYPES = 0, 1, 24
_SLOTS = 32
"""Minimum number of entries in the table of virtual functions."""
_TYPE_SLOT, _DEVICE_SLOT = 0, 2
"""Indices of ``type()`` and ``getDevice()`` in the table."""
_TYPE = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
_DEVICE = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)


class UnknownTorch(Exception):
    """This version of torch keeps its guards at an unknown place."""


@contextmanager
def cuda_guard() -> Iterator[None]:
    """Allow operators on CUDA tensors inside the ``with`` block. Raise ``UnknownTorch`` if the table is
    not found."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        yield
        return
    registry = _registry()
    kept: list[Any] = []
    registry[_CUDA] = _entry(registry[_CPU], kept)
    try:
        yield
    finally:
        registry[_CUDA] = None
        kept.clear()


def _registry() -> Any:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * _TYPES).in_dll(ctypes.CDLL(str(library)), _TABLE)
    except (OSError, ValueError) as error:
        raise UnknownTorch(f"no table of device guards in {library}: {error}") from error


def _entry(cpu: int | None, kept: list[Any]) -> int:
    """Return the address of a CUDA guard. Objects that must stay alive are added to ``kept``."""
    if cpu is None:
        raise UnknownTorch("torch has no guard of the CPU")
    functions = ctypes.cast(
        ctypes.cast(cpu, ctypes.POINTER(ctypes.c_void_p))[0] or 0, ctypes.POINTER(ctypes.c_void_p)
    )
    kind = _TYPE(functions[_TYPE_SLOT])(cpu)
    device = _DEVICE(functions[_DEVICE_SLOT])(cpu)
    if (kind, device & 0xFF) != (_CPU, _CPU):
        raise UnknownTorch("torch's device guards have other functions than the versions that are known")
    table = (ctypes.c_void_p * _SLOTS)(*[functions[slot] for slot in range(_SLOTS)])
    says_type, says_device = _TYPE(lambda this: _CUDA), _DEVICE(lambda this: _CUDA)
    table[_TYPE_SLOT] = ctypes.cast(says_type, ctypes.c_void_p).value
    table[_DEVICE_SLOT] = ctypes.cast(says_device, ctypes.c_void_p).value
    entry = (ctypes.c_void_p * 4)(ctypes.addressof(table))
    kept += (table, says_type, says_device, entry)
    return ctypes.addressof(entry)
