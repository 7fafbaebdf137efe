"""Defaults of the configuration classes of transformers, committed as data.

``python scripts/class_defaults.py`` writes the file again from the installed transformers, for all rows.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).with_name("class_defaults.json")


class ClassDefaults(msgspec.Struct, frozen=True):
    """One configuration class."""

    model_type: str
    fields: dict[str, Any]
    """Field -> default, for all fields of the class."""
    renamed: dict[str, str] = {}
    """Further name of a field -> name of the field."""
    theta: float | dict[str, float] | None = None
    """Default base of the rotary embedding, in some classes by kind of layer."""


@functools.cache
def class_defaults() -> dict[str, ClassDefaults]:
    """Return the defaults by name of the configuration class."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, ClassDefaults])
