"""Arrays in JSON: base64 of a file in NumPy's format ``.npy``, made in pieces and read without trust."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from weft.common.errors import InvalidRequest

_FILE = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<>|][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(\d{1,12}, ?){0,8}(\d{1,12})?)\), \} *\n",
    re.DOTALL,
)
"""Start of a file of integers, as ``numpy.save`` writes the start."""


def npy_pieces(shape: tuple[int, ...], dtype: str, data: Iterable[bytes]) -> Iterator[bytes]:
    """Return base64 of the .npy file of an array, piece by piece.

    ``dtype``: little-endian, e.g. ``<f4``. ``data``: the bytes of the array in order.
    """
    head = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return base64_pieces(itertools.chain((head.getvalue(),), data))


def base64_pieces(data: Iterable[bytes]) -> Iterator[bytes]:
    """Yield base64 of all ``data`` together, piece by piece."""
    rest = b""
    for piece in data:
        rest += piece
        whole = len(rest) - len(rest) % 3  # three bytes are four characters
        yield base64.b64encode(rest[:whole])
        rest = rest[whole:]
    yield base64.b64encode(rest)


def to_npy(array: np.ndarray) -> str:
    """Return base64 of the .npy file of an array."""
    plain = np.ascontiguousarray(array)
    return b"".join(npy_pieces(plain.shape, plain.dtype.str, [plain.tobytes()])).decode()


def from_npy(text: str, param: str) -> np.ndarray:
    """Return the array in base64 of a .npy file. The size is checked before any memory is taken. Raises
    InvalidRequest, naming ``param``."""
    wrong = InvalidRequest(f"{param} must be base64 of a .npy file (numpy.save) of integers", param=param)
    try:
        file = base64.b64decode(text, validate=True)
    except ValueError:
        raise wrong from None
    # NumPy's own reader evaluates the header as Python, and raises many kinds of errors for a wrong header.
    found = _FILE.match(file)
    if found is None:
        raise wrong
    dtype = np.dtype(found["dtype"].decode())
    shape = tuple(int(size) for size in found["shape"].replace(b",", b" ").split())
    data = memoryview(file)[found.end() :]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise wrong
    return np.frombuffer(data, dtype).reshape(shape)
