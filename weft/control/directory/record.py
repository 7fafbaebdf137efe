"""The record of an engine process in a directory, and the interface of a directory.

An engine publishes one record and renews the record at intervals. The record is a *lease*: API servers stop
using an engine whose record was not renewed for ``LEASE_S`` seconds. Backends: a folder
(``weft.control.directory.folder``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from weft import __version__

LEASE_S = 15.0
"""Seconds after the last renewal at which a record expires."""
RENEW_S = 3.0
"""Seconds between two renewals of a record."""


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Directory entry of one engine process.

    Readers ignore unknown fields, so engines of a later release can join a server of an earlier release.
    """

    name: str
    """Name of the engine, unique in the server: ``decode0``."""
    incarnation: int
    """Number of 63 bits, new for each process. A later process of the name has a greater number."""
    endpoint: str
    """Address of the engine's socket: ``ipc://PATH`` on one host, else ``tcp://HOST:PORT``."""
    model: str
    """Name of the served model."""
    fingerprint: str = ""
    """Equal for all engines whose caches have the same content; "" for an encode engine."""
    group: str = ""
    base: str = ""
    """Name of the group without its number; "" for a group without a name."""
    role: str = "unified"
    tower: bool = False
    """True if the engine has a vision tower, so its prompts need no encode group."""
    expert_group: str = ""
    """Expert-parallel group; the engines of one group work together or not at all. "" for none."""
    ready: bool = False
    """True if the engine has loaded its model and answers."""
    draining: bool = False
    """True if the engine finishes its requests and then ends."""
    port: str = ""
    """HOST:PORT of the engine's HTTP port (/live, /ready, /metrics, /drain); "" without a port."""
    messages: int = 1
    """Newest version of ``weft.types.messages`` that the engine speaks. Engines without the field speak 1."""
    release: str = __version__
    beat: int = 0
    """Number of renewals. A reader compares beats, not clocks of two hosts."""


class DirectoryReader(Protocol):
    """A directory, as an API server sees the directory. All methods raise OSError for a directory that cannot
    be reached."""

    def read(self) -> Mapping[str, EngineRecord]:
        """Return all records by name. Expired records may be included."""

    def ask_drain(self, record: EngineRecord) -> None:
        """Leave the request to drain for the engine process of ``record``. May wait for an answer."""


class DirectoryWriter(Protocol):
    """A directory, as a group sees the directory. All methods raise OSError for a directory that cannot be
    reached.

    One process publishes a name at a time. A record of another incarnation replaces the earlier record.
    """

    def read(self) -> Mapping[str, EngineRecord]:
        """Return all records by name. Expired records may be included."""

    def publish(self, record: EngineRecord) -> None:
        """Store ``record`` in place of the earlier record of the name."""

    def withdraw(self, record: EngineRecord) -> None:
        """Remove the record, unless another incarnation has replaced the record."""

    def asked_to_drain(self, record: EngineRecord) -> bool:
        """Return True if somebody left the request to drain for the engine process of ``record``."""
