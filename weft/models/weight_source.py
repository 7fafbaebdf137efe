"""Writes tensors of a trainer into shared memory, as a source of new weights (``weft.store.new_weights``)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from weft.store.announced import DTYPES
from weft.store.new_weights import DIGESTS, NAME, PIECE, SHARED

_TYPES = {getattr(torch, name): code for name, (code, _) in DTYPES.items()}


def write_shared(
    name: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path = SHARED,
    replace: bool = True,
    header_bytes: int = 0,
) -> str:
    """Write tensors, under published names, into the shared memory ``name`` (ends with .safetensors).

    Return ``name``. The file appears when it is complete, with mode 0600, and replaces a file of the same
    name; without ``replace`` a file of the same name stays. Delete the file (/dev/shm/NAME) after the next
    update. ``header_bytes``: expected size of the header. A longer header costs a second pass over all bytes.
    Raises ValueError for a bad name, a repeated tensor name or a type without a code, and OSError.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file name that ends with .safetensors")
    header: dict[str, Any] = {}
    digests: dict[str, int] = {}
    temporary = folder / f".{name}.{os.getpid()}"
    at, begin = 0, 8 + header_bytes + -header_bytes % 8
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        # The tensors come first, one by one: a second pass over an iterator is not possible.
        with os.fdopen(os.open(temporary, flags, 0o600), "w+b") as body:
            fcntl.flock(body, fcntl.LOCK_SH)  # without a lock, the writer is dead: see ``delete_stale``
            body.seek(begin)
            for key, tensor in tensors:
                if key in header or tensor.dtype not in _TYPES:
                    raise ValueError(f"tensor {key} is given twice, or has the type {tensor.dtype}")
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                body.write(data.data)
                digests[key] = zlib.crc32(data.data)
                header[key] = {
                    "dtype": _TYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [at, at + data.nbytes],
                }
                at += data.nbytes
            _put_header(body, {"__metadata__": {DIGESTS: json.dumps(digests)}, **header}, begin, at)
        if replace:
            temporary.rename(folder / name)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return name


def _put_header(body: Any, header: dict[str, Any], begin: int, size: int) -> None:
    """Write the header before ``size`` bytes of tensors at ``begin``. Without room for the header the tensors
    move, the last bytes first."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(begin - 8)
    text += b" " * (-len(text) % 8)
    offset = 8 + len(text)
    left = size if offset > begin else 0
    while left:
        count = min(left, PIECE)
        body.seek(begin + left - count)
        piece = body.read(count)
        body.seek(left - count + offset)
        body.write(piece)
        left -= count
    body.seek(0)
    body.write(struct.pack("<Q", len(text)) + text)
