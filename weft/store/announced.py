"""Tensors that a trainer announces in a request before it sends them, in vLLM's form.

Every number that a client chooses is bounded here, before an engine process receives anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.types.weights import AnnouncedTensors, IpcHandle, TrainerGroup

DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
}
"""torch's name of a type -> (the name in safetensors files, bytes of an element)."""
MOST_TENSORS = 100_000
MOST_NAME = 512
MOST_DIMS = 8
MOST_BYTES = 1 << 43
"""Maximum bytes of one tensor or buffer: 8 TiB. Engine processes also compare with their free memory."""
MOST_SECONDS = 900.0
DEFAULT_SECONDS = 120.0
MOST_WORLD = 4096
PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
"""Fields of a request about packing. Trainers send them with the set-up, or with each update."""
HANDLE_BYTES = 64
"""Bytes that name an allocation on a GPU."""


def read_group(info: dict[str, Any], device: str, ranks: int) -> tuple[TrainerGroup, int]:
    """Return the group of ``init_info``, and the rank of the first receiver. Raises InvalidRequest.

    ``device``: of the server, "cpu" or "cuda". ``ranks``: number of ranks of all engine processes.
    """
    backend = info.get("backend", "gloo" if device == "cpu" else "nccl")
    if backend == "ipc":
        if device == "cpu":
            raise _bad(
                "backend ipc passes memory of a GPU, and this server uses a CPU: use gloo, shm or file"
            )
        return TrainerGroup(backend="ipc", address="", port=0, world_size=1, seconds=DEFAULT_SECONDS), 1
    if (backend == "nccl") == (device == "cpu"):
        other = "gloo" if device == "cpu" else "nccl"
        raise _bad(f"backend {backend} needs another device than {device}: use {other}, shm or file")
    address = info.get("master_address")
    if not isinstance(address, str) or not 0 < len(address) <= 253 or not address.isprintable():
        raise _bad("master_address must be the host name or the address of the trainer")
    port = _number(info, "master_port", 1, 65535)
    offset = _number(info, "rank_offset", 1, MOST_WORLD)
    world = _number(info, "world_size", 2, MOST_WORLD)
    if world - offset != ranks:
        raise _bad(
            f"world_size - rank_offset is {world - offset}, and the server has {ranks} ranks (GET "
            "/get_world_size): the trainer has rank 0, and the ranks of the server follow from rank_offset on"
        )
    seconds = info.get("timeout", DEFAULT_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        raise _bad(f"timeout must be a number of seconds up to {MOST_SECONDS:g}")
    group = TrainerGroup(
        backend=backend, address=address, port=port, world_size=world, seconds=float(seconds)
    )
    return group, offset


def read_tensors(info: dict[str, Any], packing: dict[str, Any]) -> AnnouncedTensors:
    """Return the tensors that ``update_info`` announces. Raises InvalidRequest, which names the field.

    ``packing``: fields of ``PACKING`` from the set-up, for a request without them.
    """
    names = _list(info, "names", str)
    dtypes, shapes = _list(info, "dtype_names", str), _list(info, "shapes", list)
    digests = _list(info, "digests", int) if "digests" in info else []
    if not 0 < len(names) <= MOST_TENSORS or len(set(names)) < len(names):
        raise _bad(f"names must have 1 to {MOST_TENSORS} different names", "update_info")
    for field, values in (("dtype_names", dtypes), ("shapes", shapes), ("digests", digests)):
        if len(values) != len(names) and not (field == "digests" and not values):
            raise _bad(f"{field} has {len(values)} entries, and names has {len(names)}", "update_info")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise _bad(f"a name must have 1 to {MOST_NAME} printable characters", "update_info")
        if dtype.removeprefix("torch.") not in DTYPES:
            raise _bad(f"{name} has type {dtype[:80]}; types are {', '.join(DTYPES)}", "update_info")
        whole = all(type(one) is int and one > 0 for one in shape)
        if not whole or len(shape) > MOST_DIMS or prod(shape) > MOST_BYTES // 8:
            raise _bad(f"{name} has no possible shape: {str(shape)[:80]}", "update_info")
    if any(not 0 <= one < 1 << 32 for one in digests):
        raise _bad("digests must be CRC-32 of the bytes of each tensor", "update_info")
    packed, size = packing_of({**packing, **info}, "update_info")
    handles = _handles(info, len(names))
    return AnnouncedTensors(
        names=tuple(names),
        dtypes=tuple(one.removeprefix("torch.") for one in dtypes),
        shapes=tuple(tuple(one) for one in shapes),
        digests=tuple(digests),
        packed=packed,
        buffer_bytes=size,
        handles=handles,
    )


def _handles(info: dict[str, Any], count: int) -> tuple[IpcHandle, ...]:
    """Return the handles of ``update_info``; () without handles. Raises InvalidRequest for pickles."""
    form = 'ipc_handles must be a list of {"gpu": UUID, "name": base64 of 64 bytes, "offset": bytes}'
    if "ipc_handles_pickled" in info:
        raise _bad(f"ipc_handles_pickled is refused, because a pickle runs code of its sender: {form}")
    if "ipc_handles" not in info:
        return ()
    try:
        found = msgspec.convert(info["ipc_handles"], tuple[IpcHandle, ...])
    except msgspec.ValidationError as error:
        raise _bad(f"{form} ({error})", "update_info") from error
    if len(found) != count:
        raise _bad(f"ipc_handles has {len(found)} entries, and names has {count}", "update_info")
    if any(len(one.name) != HANDLE_BYTES or not 0 <= one.offset <= MOST_BYTES for one in found):
        raise _bad(form, "update_info")
    return found


def packing_of(info: dict[str, Any], param: str) -> tuple[bool, int]:
    """Return (packed, bytes of a buffer) of ``info``. Raises InvalidRequest. The number of buffers, which
    changes no byte, is checked alone."""
    packed = info.get("packed", False)
    if not isinstance(packed, bool):
        raise _bad("packed must be true or false", param)
    _number({"packed_num_buffers": 2} | info, "packed_num_buffers", 1, 64, param)
    default = AnnouncedTensors(names=(), dtypes=(), shapes=()).buffer_bytes
    given = {"packed_buffer_size_bytes": default} | info
    return packed, _number(given, "packed_buffer_size_bytes", 1, MOST_BYTES, param)


def broadcasts(tensors: AnnouncedTensors) -> Iterator[list[tuple[int, int]]]:
    """Yield the tensors of each broadcast, as (index, bytes)."""
    some, size = list[tuple[int, int]](), 0
    for index, count in enumerate(sizes(tensors)):
        some.append((index, count))
        size += count
        if not tensors.packed or size > tensors.buffer_bytes:
            yield some
            some, size = [], 0
    if some:
        yield some


def sizes(tensors: AnnouncedTensors) -> list[int]:
    """Return the bytes of each tensor."""
    return [
        prod(shape) * DTYPES[dtype][1] for dtype, shape in zip(tensors.dtypes, tensors.shapes, strict=True)
    ]


def _list(info: dict[str, Any], field: str, kind: type) -> list[Any]:
    found = info.get(field)
    if not isinstance(found, list) or any(type(one) is not kind for one in found):
        raise _bad(f"{field} must be a list, one entry for each tensor", "update_info")
    return found


def _number(info: dict[str, Any], field: str, low: int, high: int, param: str = "init_info") -> int:
    found = info.get(field)
    if type(found) is not int or not low <= found <= high:
        raise _bad(f"{field} must be a number from {low} to {high}", param)
    return found


def _bad(message: str, param: str = "init_info") -> InvalidRequest:
    return InvalidRequest(message, param=param)
