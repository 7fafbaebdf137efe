"""C++ structs of the extension, made by field name. The fields are declared in csrc/library.cpp."""

from __future__ import annotations

import functools
from typing import Any

import torch

from weft.ops.ggml import Coding


def struct(name: str, **fields: float) -> Any:
    """Return a new struct ``name`` of the extension with ``fields``: integers, booleans and floats.

    Raises RuntimeError if the struct lacks a field, or if an integer field gets a fraction.
    """
    return getattr(torch.classes.weft_cpu, name)(list(fields), [float(value) for value in fields.values()])


@functools.cache
def coding_struct(coding: Coding) -> Any:
    """Return ``coding`` as an object of the extension. A model has few codings, so the objects are kept."""
    return torch.classes.weft_cpu.Coding(**coding._asdict())
