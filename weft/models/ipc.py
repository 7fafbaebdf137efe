"""Weights in the memory of a GPU, passed by name to another process of the same host (CUDA IPC).

    trainer: export(tensors) ──► (GPU, 64 bytes of the CUDA runtime, offset) a tensor ──► receiver: opened(..)

The trainer keeps the tensors until POST /update_weights has answered. Other engines send torch's own handles
as a pickle. A pickle runs code of its sender, and torch's handles name files whose counters the receiver
writes: both are refused. Not confirmed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from weft.common.errors import InvalidRequest
from weft.parallel.cuda_memory import CudaRuntime, Runtime
from weft.store.announced import sizes
from weft.types.weights import AnnouncedTensors, IpcHandle


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
