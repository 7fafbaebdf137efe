"""Transports by name, and transports of other packages."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.disagg.transport.rig import SECRET, kinds
from weft.common.errors import ConfigError
from weft.config import transfers
from weft.disagg.transport import transport_registry
from weft.disagg.transport.loopback_transport import LoopbackNetwork, LoopbackTransport
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.transport_registry import (
    TransportKind,
    TransportPlace,
    open_transport,
    transport_kind,
)

NETWORK = LoopbackNetwork(lambda: 0.0)
KIND = TransportKind(
    4096, lambda place: LoopbackTransport(NETWORK, "added", place.incarnation, rank=place.rank)
)
ONE_SIDED = TransportKind(4096, lambda place: LoopbackTransport(NETWORK, "rdma", 0, "rekey"))
NEITHER = object()


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> TransportPlace:
    memory = SharedMemory(4096)
    return TransportPlace(
        rank=1,
        incarnation=77,
        host=lambda: "127.0.0.1",
        secret=lambda: SECRET,
        folder=lambda: str(tmp_path_factory.mktemp("t")),
        sends=True,
        regions=[memory.tensor],
        shared=[memory],
        staged=None,
    )


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with four entry points."""
    values = {"added": "KIND", "rdma": "ONE_SIDED", "neither": "NEITHER", "missing": "NOTHING"}
    made = [
        importlib.metadata.EntryPoint(name, f"{__name__}:{value}", transfers.GROUP)
        for name, value in values.items()
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: made)


@pytest.mark.parametrize("name", kinds("shm", "tcp", "nixl"))
def test_own_transports_have_a_name_and_memory(place: TransportPlace, name: str) -> None:
    made: Any = open_transport(name, place)
    assert made.endpoint.transport == made.name == name
    assert transport_kind(name).slot_bytes == type(made).slot_bytes
    assert made._memory.regions[0].numel() == 4096
    made.close()


def test_an_entry_point_adds_a_transport(place: TransportPlace) -> None:
    made = open_transport("added", place)
    assert (made.endpoint.transport, made.endpoint.incarnation) == ("loopback", 77)
    assert transport_kind("added").slot_bytes == 4096


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("neither", "is no TransportKind"),
        ("missing", "cannot be loaded"),
        ("rdma", 'is "rekey"; only "copy"'),
    ],
)
def test_an_entry_point_that_cannot_serve_is_refused(place: TransportPlace, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_transport(name, place)


def test_a_transport_whose_memory_is_refused_is_closed(
    place: TransportPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[str]()

    class Refuses(transport_registry.TcpTransport):
        def register(self, regions: Any) -> None:
            raise ConfigError("planted")

        def close(self) -> None:
            closed.append(self.name)
            super().close()

    monkeypatch.setattr(transport_registry, "TcpTransport", Refuses)
    with pytest.raises(ConfigError, match="planted"):
        open_transport("tcp", place)
    assert closed == ["tcp"]
