"""Contents of a GGUF file: metadata, and memory-mapped tensors.

``header`` reads the file; the package ``gguf`` knows the tensor types. The package's own reader is 35 times
slower, because that reader makes several objects for each vocabulary entry, and it trusts all counts.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weft.common.errors import ConfigError
from weft.common.lfs import refuse_pointer
from weft.gguf.header import Damaged, Header, HeaderTensor, read_header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PLAIN = ("F32", "F16", "BF16", "F64")
QUANTIZED = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Supported quantized tensor types: all types that the package ``gguf`` dequantizes."""
SUPPORTED = (*PLAIN, *QUANTIZED)
"""All supported tensor types."""
PACKED = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_K", "IQ4_XS", "Q3_K", "IQ4_NL", "Q2_K")
"""Types that stay quantized in memory on a CPU; computed by ``weft.ops.ggml``."""
WIDENED = {"Q3_K": 4.5625, "Q2_K": 5.125}
"""Bits per element in memory, for packed types that are much larger in memory than in the file."""
_NUMBERS = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
"""Types with a numpy dtype, as numpy type strings."""
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.S)
_MOST_SHARDS = 1000


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Numbers in each dimension, the slowest dimension first."""
    kind: str
    """Name of the GGML type."""
    path: str
    """Path of the file with the tensor."""
    offset: int
    """Offset in the file, in bytes."""
    dtype: str
    """Numpy type string of ``data``."""
    dims: tuple[int, ...]
    """Shape of ``data``."""

    @property
    def data(self) -> NDArray[Any]:
        """Memory-mapped content: numbers [shape] for F32, F16 and F64, otherwise uint8.

        The last dimension of uint8 content is the bytes of a row's blocks.
        """
        import numpy as np

        return np.memmap(self.path, self.dtype, "r", self.offset, self.dims)


def shards(path: Path) -> list[Path]:
    """Return all files of the model of ``path``, in order: ``name-00001-of-00003.gguf``.

    Raises ConfigError if a file is missing.
    """
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= count <= _MOST_SHARDS:
        raise ConfigError(f"the name {path.name} claims {count} parts", param="--model")
    parts = [path.with_name(f"{found['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ConfigError(
                f"{path.name} is one of {count} parts, and {part.name} is missing", param="--model"
            )
    return parts


class Container:
    """One file with a checked header.

    Raises ConfigError for a damaged or foreign file, for a tensor of an unsupported type, and without the
    ``gguf`` package.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header of the file ``path``. Raises ConfigError."""
        self.path = path
        refuse_pointer(path, "--model")
        self._package = _package()
        try:
            self._header = read_header(path)
            check_tensors(path, self._header, self._package)
        except (Damaged, OSError) as error:
            raise ConfigError(
                f"{path.name} is damaged or not a GGUF file: {error}", param="--model"
            ) from error

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata by key: numbers, booleans, strings, and lists of these types."""
        return self._header.metadata

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield all tensors in the file's order."""
        for stored in self._header.tensors:
            kind = self._package.GGMLQuantizationType(stored.kind).name
            shape = tuple(reversed(stored.dims))
            dims = shape
            if kind not in _NUMBERS:  # bytes, with whole blocks in a row
                numbers, size = self._package.GGML_QUANT_SIZES[stored.kind]
                dims = (*shape[:-1], shape[-1] // numbers * size)
            yield StoredTensor(
                name=stored.name,
                shape=shape,
                kind=kind,
                path=str(self.path),
                offset=self._header.data + stored.offset,
                dtype=_NUMBERS.get(kind, "|u1"),
                dims=dims,
            )


def check_tensors(path: Path, header: Header, package: Any) -> None:
    """Raise ConfigError for unsupported tensor types, and Damaged for tensors outside the file.

    ``package``: the package ``gguf``, which names the types and their sizes.
    """
    unsupported: dict[str, list[HeaderTensor]] = {}
    for tensor in header.tensors:
        known = tensor.kind in package.GGMLQuantizationType.__members__.values()
        kind = package.GGMLQuantizationType(tensor.kind).name if known else f"number {tensor.kind}"
        if kind not in SUPPORTED:
            unsupported.setdefault(kind, []).append(tensor)
            continue
        numbers, size = package.GGML_QUANT_SIZES[tensor.kind]
        if tensor.dims and tensor.dims[0] % numbers:
            raise Damaged(
                f"rows of {tensor.name!r} have {tensor.dims[0]} numbers, and {kind} requires a multiple "
                f"of {numbers}"
            )
        end = header.data + tensor.offset + math.prod(tensor.dims) // numbers * size
        if end > header.size:
            raise Damaged(
                f"{tensor.name!r} ends at byte {end}, but the file ends at byte {header.size}: is the "
                "download complete?"
            )
    if unsupported:  # one error lists all types, so that the user needs only one more download
        kind, tensors = next(iter(unsupported.items()))
        more = f", {len(tensors) - 1} more of this type" if len(tensors) > 1 else ""
        others = f", and tensors of {', '.join(list(unsupported)[1:])}" if len(unsupported) > 1 else ""
        raise ConfigError(
            f"{path.name} has a tensor of the GGUF type {kind}, which is not supported "
            f"({tensors[0].name}{more}{others}). Use a file of the same model in one of: "
            f"{', '.join(SUPPORTED)} (a Q4_K_M file has Q4_K and Q6_K), or convert this file with "
            "llama.cpp's llama-quantize",
            param="--model",
        )


def dequantized(kind: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of blocks of type ``kind``: [..., bytes of a row] -> [..., numbers of a row].

    ``kind`` must be in ``QUANTIZED``; ``Container`` rejects files with other types.
    """
    import gguf

    numbers: NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return numbers


def _package() -> Any:
    """Return the package ``gguf``. Raises ConfigError if the package is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "reading GGUF files needs the package gguf: pip install 'weft[gguf]'", param="--model"
        ) from error
    return gguf
