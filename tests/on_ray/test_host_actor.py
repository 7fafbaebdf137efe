"""Orders of the actor of a further host: a small command in place of ``weft engine``, and no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.control.directory.test_leases import record
from tests.support.slowness import deadline

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from tests.on_ray.test_group_actor import SLOW_DRAIN, Group, ready
from weft.on_ray.host_actors import HostActor


class Host(HostActor, Group):
    """An actor of host 1 whose fleet is in this process."""

    head = "10.0.0.1:99"
    """Address of the head; "" while the head drains."""
    joins = True

    _command = Group._command

    def _call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if method == "join":
            return ("text", "secret", self.head) if self.joins else None
        return self.wanted


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(tmp_path, SLOW_DRAIN, monkeypatch)
    ready(tmp_path)
    yield made
    made.joins = False
    assert made.wait() == 0


def happens(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + deadline(20)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_the_drain_of_the_head_keeps_the_ranks_and_another_address_does_not(host: Host) -> None:
    process = host._process
    host.wanted, host.head = False, ""
    calls = len(host.calls)
    happens(lambda: len(host.calls) > calls + 10)
    assert host._process is process
    assert not host._signalled
    host.head = "10.0.0.1:100"
    happens(lambda: host.starts == 2)


@pytest.mark.slow
def test_engines_of_a_further_host_drain_with_the_head(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"decode0.1": record("decode0.1")}
    monkeypatch.setattr("weft.control.directory.folder.FolderDirectory.read", lambda _: found)
    calls = len(host.calls)
    happens(lambda: len(host.calls) > calls + 10)
    assert not host._signalled
    host.wanted, host.head = False, ""
    happens(lambda: host._over)
