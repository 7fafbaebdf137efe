"""Leases by the reader's clock, and the folder with records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from weft.common.errors import ConfigError
from weft.control.directory.backends import directory_for_engine, directory_for_front
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.leases import Leases
from weft.control.directory.polled import PortDirectory
from weft.control.directory.record import LEASE_S, EngineRecord


def record(name: str = "decode0", **fields: object) -> EngineRecord:
    facts = {"name": name, "group": name, "incarnation": 7, "endpoint": "ipc:///x", "model": "m", **fields}
    return msgspec.convert(facts, EngineRecord)


def test_a_record_expires_when_its_beat_stands_still() -> None:
    leases = Leases()
    for beat in range(5):
        now = beat * 10.0
        assert leases.present({"a": record("a", beat=beat)}, now).keys() == {"a"}
    last = {"a": record("a", beat=4)}
    assert leases.present(last, now + LEASE_S - 0.1)
    assert not leases.present(last, now + LEASE_S)
    assert leases.present({"a": record("a", beat=5)}, now + LEASE_S + 1)


def test_another_incarnation_has_a_lease_of_its_own() -> None:
    leases = Leases()
    leases.present({"a": record("a", beat=3)}, 0.0)
    assert leases.present({"a": record("a", incarnation=8, beat=3)}, LEASE_S + 1)


def test_time_in_which_the_directory_could_not_be_read_does_not_count() -> None:
    leases = Leases()
    leases.present({"a": record("a")}, 0.0)
    leases.stall(100.0)
    assert leases.present({"a": record("a")}, 100.0)
    assert not leases.present({"a": record("a")}, 100.0 + LEASE_S)


def test_records_are_replaced_and_withdrawn(tmp_path: Path) -> None:
    folder = FolderDirectory(tmp_path / "new" / "folder")
    first, second = record(), record(incarnation=8, role="decode", draining=True)
    folder.publish(first)
    folder.publish(record("prefill0"))
    folder.publish(second)
    assert folder.read() == {"decode0": second, "prefill0": record("prefill0")}
    folder.withdraw(first)  # a late process of the name removes nothing
    assert folder.read()["decode0"] == second
    folder.withdraw(second)
    folder.withdraw(second)
    assert folder.read().keys() == {"prefill0"}


def test_an_order_to_drain_is_for_one_incarnation(tmp_path: Path) -> None:
    folder = FolderDirectory(tmp_path)
    folder.ask_drain(record())
    assert folder.asked_to_drain(record())
    assert not folder.asked_to_drain(record(incarnation=8))
    assert not folder.asked_to_drain(record("decode00"))
    folder.withdraw(record())
    assert not folder.asked_to_drain(record())


def test_a_record_of_a_later_release_is_read(tmp_path: Path) -> None:
    folder = FolderDirectory(tmp_path)
    fields = {**msgspec.to_builtins(record()), "colour": "blue", "release": "9.0"}
    (tmp_path / "decode0.engine.json").write_text(json.dumps(fields))
    assert folder.read()["decode0"].endpoint == "ipc:///x"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "decode0"}', '{"name": 1}', "\x00\xff"])
def test_a_file_that_is_no_record_hides_no_other(tmp_path: Path, content: str) -> None:
    folder = FolderDirectory(tmp_path)
    folder.publish(record("prefill0"))
    (tmp_path / "decode0.engine.json").write_text(content)
    (tmp_path / "decode1.engine.json").write_text(msgspec.json.encode(record("decode9")).decode())
    assert folder.read().keys() == {"prefill0"}


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        FolderDirectory(tmp_path)


def test_a_place_is_a_folder_or_has_a_known_scheme(tmp_path: Path) -> None:
    assert isinstance(directory_for_front(f"folder:{tmp_path / 'a'}"), FolderDirectory)
    assert isinstance(directory_for_engine(str(tmp_path / "b:c"), False), FolderDirectory)
    assert isinstance(directory_for_engine("port", True), PortDirectory)
    with pytest.raises(ConfigError, match="give --port"):
        directory_for_engine("port", False)
    for one in (directory_for_front, lambda place: directory_for_engine(place, True)):
        with pytest.raises(ConfigError, match="unknown kind of directory 'etcd'"):
            one("etcd:somewhere")
        with pytest.raises(ConfigError, match="give --directory"):
            one("")
    with pytest.raises(ConfigError, match="runs in no pod"):
        directory_for_front("kubernetes:weft")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        directory_for_front(str(tmp_path / "file"))
