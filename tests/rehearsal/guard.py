"""A device guard for CUDA in a torch that was built without it.

Many operators first make the device of their tensors the current one, through a table that libc10 keeps of
each type of device. A CPU build has no entry for CUDA there, so that even ``x[0]`` of a fake CUDA tensor
raises. Here an entry is put there that does nothing and says "device 0 of CUDA": a copy of the CPU's, with
two of its functions replaced. A build with CUDA has an entry, which FakeTensorMode sees to where there is
no GPU.
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
"""Of the table of virtual functions, at least."""
_TYPE_SLOT, _DEVICE_SLOT = 0, 2
"""``type()`` and ``getDevice()`` in it."""
_TYPE = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
_DEVICE = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)


class UnknownTorch(Exception):
    """This torch keeps its guards elsewhere than the versions that are known here."""


@contextmanager
def cuda_guard() -> Iterator[None]:
    """While it is open, operators of CUDA tensors may ask for a guard. Raises UnknownTorch."""
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
    """The address of a guard of CUDA; ``kept``: what must live as long as it is used."""
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
