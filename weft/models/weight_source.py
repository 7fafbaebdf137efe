"""Files with new weights: folders of safetensors, and safetensors files in shared memory.

A trainer on the same host writes tensors into shared memory with ``write_shared``. The header of the file has
a digest of each tensor, which every reader checks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.common.errors import InvalidRequest
from weft.types.weights import Backend

SHARED = Path("/dev/shm")
"""Folder of shared memory."""
MOST_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_DIGESTS = "weft_crc32"
"""Entry of a file's metadata: JSON, tensor name -> CRC-32 of its bytes."""
_MOST_HEADER = 100 << 20
_PIECE = 1 << 20
_SAMPLE = 1 << 16
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def source_files(backend: Backend, place: str) -> tuple[str, ...]:
    """Return the absolute paths of the files of a source, sorted.

    backend "file": ``place`` is the absolute path of a folder of safetensors files, or of one file. "shm":
    ``place`` is the name of a file in shared memory. Raises InvalidRequest for a place without files.
    """
    if backend == "shm":
        if not _NAME.fullmatch(place):
            raise InvalidRequest(
                "name must be the name of a file in /dev/shm that ends with .safetensors", param="name"
            )
        found = [SHARED / place]
    else:
        path = Path(place)
        if not path.is_absolute() or "\0" in place:
            raise InvalidRequest("path must be an absolute path", param="path")
        found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        found = [one for one in found if not one.name.startswith("adapter_model")]
    if not found or len(found) > MOST_FILES or not all(one.is_file() for one in found):
        raise InvalidRequest(
            f"{place} holds no safetensors files", param="path" if backend == "file" else "name"
        )
    return tuple(map(str, found))


def check_source(files: Sequence[str]) -> str:
    """Return a digest over the headers and samples of ``files``, 32 hex digits, after a check of the tensors.

    A file with a digest for each tensor is read completely. Raises InvalidRequest, which names a tensor with
    other bytes, or a file that cannot be read.
    """
    made = hashlib.blake2b(digest_size=16)
    for name in files:
        try:
            _check_file(Path(name), made)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged or not a safetensors file"
            raise InvalidRequest(f"{Path(name).name} can't be read: {why}", param="update_info") from error
    return made.hexdigest()


def _check_file(path: Path, made: Any) -> None:
    """Add a file to the digest ``made``."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MOST_HEADER:
            raise ValueError("the header is too large")
        data = file.read(size)
        header = json.loads(data)
        begin, end = 8 + size, os.fstat(file.fileno()).st_size
        made.update(path.name.encode() + b"\0" + data)
        expected = json.loads((header.get("__metadata__") or {}).get(_DIGESTS, "{}"))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            if begin + last > end:
                raise ValueError("the file is shorter than its header says")
            if name in expected:
                _check_tensor(file, name, begin + first, last - first, expected[name])
            for at in (first, max(first, last - _SAMPLE)):
                file.seek(begin + at)
                made.update(file.read(min(_SAMPLE, last - at)))


def _check_tensor(file: Any, name: str, at: int, size: int, expected: int) -> None:
    file.seek(at)
    found = 0
    while size:
        piece = file.read(min(size, _PIECE))
        if not piece:
            raise ValueError("the file has ended")
        found, size = zlib.crc32(piece, found), size - len(piece)
    if found != expected:
        raise InvalidRequest(
            f"tensor {name} has other bytes than its digest says; write the tensor again", param="update_info"
        )


def write_shared(name: str, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path = SHARED) -> str:
    """Write tensors, under published names, into the shared memory ``name`` (ends with .safetensors).

    Return ``name``. The file appears when it is complete, with mode 0600, and replaces a file of the same
    name. Delete the file (/dev/shm/NAME) after the next update. Raises ValueError for a bad name, a repeated
    tensor name or a type without a code, and OSError.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file name that ends with .safetensors")
    header: dict[str, Any] = {}
    digests: dict[str, int] = {}
    temporary = folder / f".{name}.{os.getpid()}"
    at = 0
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        # The tensors come first, one by one: a second pass over an iterator is not possible.
        with os.fdopen(os.open(temporary, flags, 0o600), "w+b") as body:
            for key, tensor in tensors:
                if key in header or tensor.dtype not in _TYPES:
                    raise ValueError(f"tensor {key} is given twice, or has the type {tensor.dtype}")
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                body.write(data.data)
                digests[key] = zlib.crc32(data)
                header[key] = {
                    "dtype": _TYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [at, at + data.nbytes],
                }
                at += data.nbytes
            _put_header(body, {"__metadata__": {_DIGESTS: json.dumps(digests)}, **header}, at)
        temporary.rename(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return name


def _put_header(body: Any, header: dict[str, Any], size: int) -> None:
    """Move ``size`` bytes of tensors behind the header. The last bytes move first."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    offset = 8 + len(text)
    left = size
    while left:
        count = min(left, _PIECE)
        body.seek(left - count)
        piece = body.read(count)
        body.seek(left - count + offset)
        body.write(piece)
        left -= count
    body.seek(0)
    body.write(struct.pack("<Q", len(text)) + text)
