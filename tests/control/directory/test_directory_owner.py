"""The owner of engines that publish themselves: what an API server sees of a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.control.directory.test_leases import record
from weft.common.clock import VirtualClock
from weft.common.errors import EngineDead, InvalidRequest, NotFound, Unavailable
from weft.control.directory.directory_owner import FIRST_WAIT_S, READ_S, DirectoryOwner
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.record import LEASE_S, EngineRecord
from weft.control.links.link import Address
from weft.types.handshake import EngineIdentity


class Broken(FolderDirectory):
    """A folder on a file system that may be away."""

    away = False

    def read(self) -> Mapping[str, EngineRecord]:
        if self.away:
            raise OSError(5, "Input/output error")
        return super().read()

    def ask_drain(self, record: EngineRecord) -> None:
        if self.away:
            raise OSError(5, "Input/output error")
        super().ask_drain(record)


class Seen:
    """An owner over a folder, with a clock."""

    def __init__(self, folder: Path) -> None:
        self.directory = Broken(folder)
        self.clock = VirtualClock()
        self.owner = DirectoryOwner(self.directory, "m", None, _serves, self.clock)

    def present(self, after: float = READ_S) -> dict[str, Address]:
        self.clock.advance_to(self.clock.now() + after)
        found = self.owner.present()
        assert all(isinstance(one, Address) for one in found.values())
        return found  # type: ignore[return-value]


def _serves(roles: set[str]) -> bool:
    return {"prefill", "decode"} <= roles


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path)


def test_engines_appear_drain_and_go(seen: Seen) -> None:
    assert seen.present() == {}
    seen.directory.publish(record(incarnation=3, expert_group="all"))
    address = seen.present()["decode0"]
    assert (address.endpoint, address.incarnation, address.expert_group) == ("ipc:///x", 3, "all")
    assert not address.leaving
    seen.directory.publish(record(incarnation=3, draining=True))
    address = seen.present()["decode0"]
    assert address.leaving
    assert address.draining
    seen.directory.withdraw(record(incarnation=3))
    assert seen.present() == {}


def test_the_identity_of_an_engine_is_known_if_the_engine_can_tell(seen: Seen) -> None:
    seen.directory.publish(record(incarnation=3))  # an engine of the first release
    assert seen.present()["decode0"].identity is None
    seen.directory.publish(record(incarnation=4, messages=2))
    assert seen.present()["decode0"].identity == EngineIdentity(name="decode0", model="m", start=4)


def test_an_expired_engine_is_absent_until_it_renews(seen: Seen) -> None:
    seen.directory.publish(record())
    for _ in range(round(LEASE_S / READ_S)):
        assert seen.present()
    assert not seen.present()
    seen.directory.publish(record(beat=1))
    assert seen.present()


def test_a_directory_that_is_away_keeps_all_engines(seen: Seen) -> None:
    seen.directory.publish(record())
    assert seen.present()
    seen.directory.away = True
    for _ in range(10):
        assert seen.present(LEASE_S)
    seen.directory.away = False
    for _ in range(round(LEASE_S / READ_S) - 3):
        assert seen.present()
    assert [bool(seen.present()) for _ in range(3)][-1] is False


def test_an_api_server_that_stood_still_loses_no_engine(seen: Seen) -> None:
    seen.directory.publish(record())
    assert seen.present()
    assert seen.present(100 * LEASE_S)


@pytest.mark.parametrize(
    "other",
    [{"model": "another"}, {"fingerprint": "f2"}, {"endpoint": "tcp://10.0.0.1:5"}],
    ids=["model", "weights", "host-without-a-secret"],
)
def test_an_engine_that_does_not_fit_is_not_used(seen: Seen, other: dict[str, str]) -> None:
    seen.directory.publish(record("decode0", fingerprint="f1"))
    assert seen.present().keys() == {"decode0"}
    seen.directory.publish(record("decode1", **{"fingerprint": "f1", **other}))
    assert seen.present().keys() == {"decode0"}


def test_new_weights_may_come_when_the_last_engine_with_old_ones_has_gone(seen: Seen) -> None:
    seen.directory.publish(record(fingerprint="f1"))
    assert seen.present()
    seen.directory.publish(record("decode1", fingerprint="f2"))
    assert seen.present().keys() == {"decode0"}
    seen.directory.withdraw(record())
    assert seen.present().keys() == {"decode1"}


def test_an_engine_that_was_lost_and_lives_is_connected_again(seen: Seen) -> None:
    """A network that was broken for a while: the record stays, with the same incarnation."""
    seen.directory.publish(record(incarnation=3))
    numbers = [seen.present()["decode0"].incarnation]
    for times in range(1, 4):
        seen.owner.replace("decode0", numbers[-1], EngineDead("no answer"))
        assert seen.present()["decode0"].incarnation == numbers[-1]  # not at once
        for beat in range(round(FIRST_WAIT_S * 2 ** (times - 1) / READ_S)):
            seen.directory.publish(record(incarnation=3, beat=100 * times + beat))
            now = seen.present()["decode0"].incarnation
        assert now not in numbers
        numbers.append(now)
    seen.directory.publish(record(incarnation=4))
    assert seen.present()["decode0"].incarnation == 4


@pytest.mark.parametrize("tower", [True, False])
def test_the_last_encode_group_may_leave_if_all_others_have_a_tower(seen: Seen, tower: bool) -> None:
    seen.owner._serves = bool
    for name, role, has in (("encode0", "encode", False), ("unified0", "unified", tower)):
        seen.directory.publish(record(name, role=role, group=name, tower=has))
    seen.present()
    if tower:
        assert asyncio.run(seen.owner.remove("encode0")) == ["encode0"]
        return
    with pytest.raises(InvalidRequest, match="without an encode group"):
        asyncio.run(seen.owner.remove("encode0"))


def test_a_removal_is_left_in_the_directory(seen: Seen) -> None:
    for one in (record("prefill0", role="prefill"), record(role="decode"), record("decode1", role="decode")):
        seen.directory.publish(one)
    seen.present()
    assert asyncio.run(seen.owner.remove("decode1")) == ["decode1"]
    assert seen.directory.asked_to_drain(record("decode1"))
    with pytest.raises(InvalidRequest, match="without a prefill group"):
        asyncio.run(seen.owner.remove("prefill0"))
    with pytest.raises(NotFound):
        asyncio.run(seen.owner.remove("decode7"))
    seen.directory.away = True
    with pytest.raises(Unavailable, match="cannot be asked to drain"):
        asyncio.run(seen.owner.remove("decode0"))


def test_an_api_server_starts_no_engine(seen: Seen) -> None:
    for order, what in (
        (lambda: seen.owner.scale("decode", 3), "weft engine FILE --group NAME` for each"),
        (seen.owner.restart, "weft drain NAME` for one group after the other"),
        (lambda: seen.owner.revive("x"), "none is given up"),
    ):
        with pytest.raises(Unavailable, match=what):
            asyncio.run(order())


def test_all_engines_are_asked_to_leave_though_one_goes_meanwhile(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(one: EngineRecord) -> None:
        asked.append(one.name)
        seen.directory.withdraw(record("decode1"))
        seen.present()

    seen.directory.publish(record())
    seen.directory.publish(record("decode1"))
    seen.present()
    monkeypatch.setattr(seen.directory, "ask_drain", ask)
    asyncio.run(seen.owner.remove_all())
    assert asked == ["decode0", "decode1"]
