"""Files with new weights: folders of safetensors, GGUF files, and safetensors files in shared memory.

A trainer on the same host writes tensors into shared memory (``weft.models.weight_source``). The header of
the file has a digest of each tensor, which every reader checks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.common.errors import ConfigError, InvalidRequest
from weft.gguf.checkpoint_folder import model_files
from weft.gguf.container import Container
from weft.types.weights import Backend

SHARED = Path("/dev/shm")
"""Folder of shared memory."""
MOST_FILES = 4096
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
DIGESTS = "weft_crc32"
"""Entry of a file's metadata: JSON, tensor name -> CRC-32 of its bytes."""
_MOST_HEADER = 100 << 20
PIECE = 1 << 20
_SAMPLE = 1 << 16


def source_files(backend: Backend, place: str) -> tuple[str, ...]:
    """Return the absolute paths of the files of a source, sorted.

    backend "file": ``place`` is the absolute path of a folder of safetensors files, of one such file, of a
    GGUF file (with all its parts), or of a folder with one GGUF model. "shm": ``place`` is the name of a
    file in shared memory. Raises InvalidRequest for a place without files.
    """
    if backend == "shm":
        if not NAME.fullmatch(place):
            raise InvalidRequest(
                "name must be the name of a file in /dev/shm that ends with .safetensors", param="name"
            )
        found = [SHARED / place] if (SHARED / place).is_file() else []
    else:
        path = Path(place)
        if not path.is_absolute() or "\0" in place:
            raise InvalidRequest("path must be an absolute path", param="path")
        found = _found_in(path)
    if not found or len(found) > MOST_FILES:
        raise InvalidRequest(
            f"{place} holds no safetensors files and no GGUF file",
            param="path" if backend == "file" else "name",
        )
    return tuple(map(str, found))


def _found_in(path: Path) -> list[Path]:
    """Return ``path``, or the safetensors files of the folder ``path``, or the parts of a GGUF model; [] if
    one can't be read as a file. Raises InvalidRequest for a folder with several GGUF models."""
    try:
        if path.suffix == ".gguf" or (path.is_dir() and not any(path.glob("*.safetensors"))):
            return model_files(path)
        found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        found = [one for one in found if not one.name.startswith("adapter_model")]
        return found if all(one.is_file() for one in found) else []
    except ConfigError as error:
        raise InvalidRequest(error.message, param="path") from error
    except (OSError, ValueError):  # a name that is too long, no permission, text that is no file name
        return []


def check_source(files: Sequence[str]) -> str:
    """Return a digest over the headers and samples of ``files``, 32 hex digits, after a check of the tensors.

    A file with a digest for each tensor is read completely. Raises InvalidRequest, which names a tensor with
    other bytes, or a file that cannot be read.
    """
    made = hashlib.blake2b(digest_size=16)
    for name in files:
        try:
            check = _check_gguf if name.endswith(".gguf") else _check_file
            check(Path(name), made)
        except ConfigError as error:
            raise InvalidRequest(error.message, param="update_info") from error
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
        expected = json.loads((header.get("__metadata__") or {}).get(DIGESTS, "{}"))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            if begin + last > end:
                raise ValueError("the file is shorter than its header says")
            if name in expected:
                _check_tensor(file, name, begin + first, last - first, expected[name])
            _sample(file, begin + first, last - first, made)


def _check_gguf(path: Path, made: Any) -> None:
    """Add a GGUF file to the digest ``made``. Raises ConfigError for a damaged file."""
    made.update(path.name.encode())
    with path.open("rb") as file:
        for tensor in Container(path).tensors():
            made.update(f"\0{tensor.name} {tensor.kind} {tensor.dims}".encode())
            size = math.prod(tensor.dims) * np.dtype(tensor.dtype).itemsize
            _sample(file, tensor.offset, size, made)


def _sample(file: Any, begin: int, size: int, made: Any) -> None:
    """Add the first and the last bytes of a tensor to the digest ``made``. ``size``: bytes of the tensor."""
    for at in (0, max(0, size - _SAMPLE)):
        file.seek(begin + at)
        made.update(file.read(min(_SAMPLE, size - at)))


def _check_tensor(file: Any, name: str, at: int, size: int, expected: int) -> None:
    file.seek(at)
    found = 0
    while size:
        piece = file.read(min(size, PIECE))
        if not piece:
            raise ValueError("the file has ended")
        found, size = zlib.crc32(piece, found), size - len(piece)
    if found != expected:
        raise InvalidRequest(
            f"tensor {name} has other bytes than its digest says; write the tensor again", param="update_info"
        )
