"""Errors of the disk tier. A record that cannot be read is no error of a request: the prompt is computed."""

from __future__ import annotations


class RecordError(Exception):
    """A record that cannot be read."""


class RecordGone(RecordError):
    """The record was removed: by eviction, age, a flush, or the end of a file."""


class RecordCorrupt(RecordError):
    """The bytes on disk are not the written bytes. The record is dropped."""


class StoreOff(RecordError):
    """The store has turned itself off after an error of the disk."""
