"""Arrays in JSON: base64 of a file in NumPy's format ``.npy``, made in pieces and read without trust."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Iterator

import numpy as np

from weft.common.errors import InvalidRequest


def npy_pieces(shape: tuple[int, ...], dtype: str, data: Iterable[bytes]) -> Iterator[bytes]:
    """Yield base64 of the .npy file of an array, piece by piece.

    ``dtype``: little-endian, e.g. ``<f4``. ``data``: the bytes of the array in order.
    """
    head = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    rest = head.getvalue()
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
        file = io.BytesIO(base64.b64decode(text, validate=True))
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[version](file)
    except (binascii.Error, ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError):
        raise wrong from None
    data = file.getbuffer()[file.tell() :]
    if fortran or dtype.kind not in "iu" or len(shape) > 8 or any(size < 0 for size in shape):
        raise wrong
    count = 1
    for size in shape:
        count *= size
    if count * dtype.itemsize != len(data):
        raise wrong
    return np.frombuffer(data, dtype).reshape(shape)
