"""A port in use ends `weft up` before any group starts."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from weft.cli.serve.up import up
from weft.common import signals
from weft.common.errors import ConfigError
from weft.engine.server import engine_processes
from weft.front.front_server import bind

TOPOLOGY = """
model: spool-text
threads: 1
groups:
  - {role: unified}
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port in use."""
    handlers = {number: signal.getsignal(number) for number in (signals.RESTART, *signals.STOPS)}
    with bind("127.0.0.1", 0) as taken:
        yield taken.getsockname()[1]
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)


@pytest.mark.parametrize(("place", "fronts"), [("host", 1), ("host", 2), ("ray", 1)])
def test_no_group_starts(
    place: str, fronts: int, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("something starts")

    monkeypatch.setattr(engine_processes.EngineGroups, "__init__", started)
    if place == "ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
        monkeypatch.setattr("weft.on_ray.server.connect", started)
    file = tmp_path / "shop.yaml"
    file.write_text(TOPOLOGY)
    file.chmod(0o600)
    ran = CliRunner().invoke(up, [str(file), "--on", place, "--port", str(port), "--fronts", str(fronts)])
    assert isinstance(ran.exception, ConfigError), ran.exception
    assert ran.exception.message == (
        f"cannot listen on port {port} (address already in use); change --host or --port"
    )


def test_a_reserved_port_is_free_for_the_api_servers_alone() -> None:
    """Between the reservation and the first API server lie the imports, so seconds on a busy host."""
    with bind("127.0.0.1", 0, listens=False) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConfigError, match="address already in use"):
            bind("127.0.0.1", port)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the supervisor does
        with (
            bind("127.0.0.1", port, shared=True),
            bind("127.0.0.1", port, shared=True),
            pytest.raises(ConfigError, match="address already in use"),
        ):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("listens", [True, False])
def test_ended_connections_leave_the_port_to_the_next_server(listens: bool) -> None:
    """``listens``: False for an API server that started again, and listens once ready."""
    with bind("127.0.0.1", 0, listens=False) as reserved:
        port = reserved.getsockname()[1]
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with bind("127.0.0.1", port, shared=True, listens=listens) as front:
            front.listen()
            with socket.create_connection(("127.0.0.1", port)) as client:
                front.accept()[0].close()  # the server closes first, so the system keeps the connection
                assert client.recv(1) == b""
    bind("127.0.0.1", port, listens=False).close()
    bind("127.0.0.1", port).close()
