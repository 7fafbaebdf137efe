"""The models of a directory, for an API server that runs alone: states, and refused requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.control.directory.test_leases import record
from weft.common.clock import VirtualClock
from weft.common.errors import EngineDead, InvalidRequest, Unavailable
from weft.control.directory.directory_hub import AGAIN_S, ByModel, DirectoryHub
from weft.control.directory.directory_owner import READ_S, DirectoryOwner
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.record import EngineRecord
from weft.control.model_fronts import ModelRecord, Use
from weft.control.models import BACKOFF_S

PATIENCE = 30.0


class Seen:
    """A hub over a folder with the models a and b, with a clock."""

    def __init__(self, folder: Path) -> None:
        self.directory, self.clock = FolderDirectory(folder), VirtualClock()
        records = ByModel(self.directory, "ab")
        owners = {one: DirectoryOwner(records.of(one), one, None, clock=self.clock) for one in "ab"}
        self.hub = DirectoryHub(owners, PATIENCE, self.clock)
        self.hub.join()

    def after(self, seconds: float = READ_S, model: str = "a") -> ModelRecord:
        """Return the record of a model later. The record counts as seen."""
        self.clock.advance_to(self.clock.now() + seconds)
        found = self.hub.record()
        assert found is self.hub.record(), "no change, no new record"
        self.hub.used(found.version, {})
        return next(one for one in found.models if one.name == model)

    def connect(self, model: str = "a") -> None:
        self.hub.ready(model, self.after(model=model).load)

    def asks(self, model: str) -> ModelRecord:
        """Return the record after a request that waits for the model, and then gives up."""
        self.hub.used(0, {model: Use(waiting=1, requests=1)})
        found = self.after(0.0, model)
        self.hub.used(0, {model: Use(requests=1)})
        return found

    def keep(self, *names: str, **fields: object) -> None:
        """Renew the records of engines of the model a."""
        for name in names:
            self.directory.publish(record(name, model="a", beat=int(self.clock.now() * 10), **fields))


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path)


def test_a_model_is_loaded_while_it_has_engines(seen: Seen) -> None:
    assert (seen.after().state, seen.after().load) == ("unloaded", 0)
    seen.keep("one")
    assert seen.after().state == "loading"
    seen.connect()
    assert (seen.after().state, seen.after(model="b").state) == ("loaded", "unloaded")
    seen.keep("two")
    seen.directory.withdraw(record("one", model="a"))
    for _ in range(20):
        seen.keep("two")
        assert seen.after(5.0).state == "loaded", "a second engine keeps the model"
    seen.directory.withdraw(record("two", model="a"))
    assert seen.after(PATIENCE - 1).state == "loaded", "requests wait for the next engine"
    seen.after(2 * READ_S)
    assert seen.after(PATIENCE).state == "draining"
    assert seen.after().state == "unloaded"
    assert "no engine serves the model a" in seen.after().failure
    seen.keep("three", incarnation=8)
    assert (seen.after().state, seen.after().load) == ("loading", 2)
    seen.connect()
    assert seen.after().failure == ""


def test_a_request_without_an_engine_is_refused_at_once_with_the_name(seen: Seen) -> None:
    first, second = seen.asks("b"), seen.asks("b")
    assert second.refused == first.refused + 1 > 1
    assert second.refusal is not None
    assert "the model b" in second.refusal.message
    assert second.refusal.http_status == 503
    assert second.failure == "", "a model that nobody has started is no fault"
    seen.directory.publish(record("one", model="b"))
    assert seen.after(model="b").state == "loading", "the refusal delays no engine"


def test_engines_that_drain_in_order_are_no_fault(seen: Seen) -> None:
    seen.keep("one")
    seen.connect()
    seen.keep("one", draining=True)
    seen.after(1.0)
    seen.directory.withdraw(record("one", model="a"))
    seen.after(PATIENCE + 1)
    assert (seen.after().state, seen.after().failure) == ("unloaded", "")


def test_a_failed_connection_is_made_again_later(seen: Seen) -> None:
    seen.keep("one")
    load = seen.after().load
    seen.hub.ready("a", load, error=EngineDead("no token"))
    assert seen.after().state == "unloaded"
    assert "no token" in seen.after().failure
    seen.keep("one")
    assert seen.after(AGAIN_S).state == "loading"
    assert seen.after().load == load + 1
    assert AGAIN_S < BACKOFF_S


def test_engines_of_other_models_are_reported_once(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    seen.directory.publish(record("one", model="c"))
    seen.after()
    seen.after()
    assert caplog.text.count("engine one is not used: it serves c, and this API server serves a, b") == 1


def test_an_unload_drains_all_engines_of_the_model(seen: Seen) -> None:
    def ask(what: str) -> None:
        asyncio.run(seen.hub.ask("a", what))

    with pytest.raises(Unavailable, match="no engine serves the model a"):
        ask("load")
    seen.keep("one", "two")
    seen.directory.publish(record("three", model="b"))
    seen.after()
    with pytest.raises(InvalidRequest, match="a model is loaded while an engine has the model"):
        ask("unpin")
    for what in ("load", "pin", "keep", "unload"):
        ask(what)
    unloads = [seen.after(model=one).unloads for one in "ab"]
    assert unloads == [1, 0], "updates of the weights are given up"
    found = seen.directory.read()
    assert [seen.directory.asked_to_drain(found[one]) for one in ("one", "two", "three")] == [
        True,
        True,
        False,
    ]


def test_all_models_share_one_read_of_the_directory(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    read = seen.directory.read

    def counted() -> Mapping[str, EngineRecord]:
        reads.append(seen.clock.now())
        return read()

    monkeypatch.setattr(seen.directory, "read", counted)
    seen.keep("one")
    seen.directory.publish(record("two", model="b"))
    for number in range(1, 4):
        assert (seen.after().load, seen.after(0.0, "b").load) == (1, 1)
        assert len(reads) == number
