"""Leases by the reader's clock, and the folder with records."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.control.directory.backends import directory_for_engine, directory_for_front
from weft.control.directory.cached import CachedDirectory
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.host_server import check_names, new_incarnation
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


@pytest.mark.parametrize("order", [(7, 8), (8, 7), (7, 8, 7), (8, 7, 8, 7)])
def test_all_readers_choose_the_same_of_two_living_processes(order: tuple[int, ...]) -> None:
    leases = Leases()
    for beat, incarnation in enumerate(order):
        found = leases.present({"a": record("a", incarnation=incarnation, beat=beat)}, float(beat))
    assert found["a"].incarnation == 8
    # The other one renews. It is used when the lease of the first one has ended.
    later = len(order) - 1 + LEASE_S
    assert leases.present({"a": record("a", incarnation=7, beat=100)}, later)["a"].incarnation == 7


def test_a_process_whose_record_was_withdrawn_leaves_the_name_to_others() -> None:
    leases = Leases()
    leases.present({"a": record("a", incarnation=8)}, 0.0)
    assert leases.present({}, 1.0) == {}
    assert leases.present({"a": record("a", incarnation=7)}, 2.0)["a"].incarnation == 7


def test_incarnations_grow_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for now in (1.7e9, 1.7e9 + 0.001, 4e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        made.append(new_incarnation())
    assert made == sorted(made)
    assert len({new_incarnation() for _ in range(100)}) > 90
    assert max(made) < 1 << 63


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


def test_a_folder_that_has_gone_is_no_server_without_engines(tmp_path: Path) -> None:
    """An unmounted share leaves an empty folder."""
    folder = FolderDirectory(tmp_path / "share")
    folder.publish(record())
    (tmp_path / "share").rename(tmp_path / "away")
    with pytest.raises(OSError, match="gone, or is not mounted"):
        folder.read()
    (tmp_path / "share").mkdir(mode=0o700)
    with pytest.raises(OSError, match="gone, or is not mounted"):
        folder.read()
    (tmp_path / "share").rmdir()
    (tmp_path / "away").rename(tmp_path / "share")
    assert folder.read().keys() == {"decode0"}


def test_entries_that_are_no_files_hide_no_other(tmp_path: Path) -> None:
    folder = FolderDirectory(tmp_path)
    folder.publish(record())
    (tmp_path / "a.engine.json").mkdir()
    os.mkfifo(tmp_path / "b.engine.json")
    (tmp_path / "c.engine.json").symlink_to("/dev/zero")
    assert folder.read().keys() == {"decode0"}


class Slow(FolderDirectory):
    """A folder whose reads take as long as the test wants, or fail."""

    failure: OSError | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = threading.Event()

    def read(self) -> Mapping[str, EngineRecord]:
        self.go.wait(deadline(10))
        if self.failure is not None:
            raise self.failure
        return super().read()


def test_a_slow_directory_stops_no_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(tmp_path)
    slow.publish(record())
    slow.go.set()
    cached = CachedDirectory(slow, 0.01)
    assert cached.read().keys() == {"decode0"}
    monkeypatch.setattr("weft.control.directory.cached.STALE_S", 0.2)
    slow.go.clear()
    assert "no answer" in said(cached, "no answer")
    slow.failure = OSError(5, "Input/output error")
    slow.go.set()
    assert "Input/output" in said(cached, "Input/output")
    slow.failure = None
    assert said(cached, "") == ""
    cached.close()


def said(cached: CachedDirectory, wanted: str) -> str:
    """Read until an error says ``wanted``, or for "" until there is no error. Return the last error."""
    end, text = time.monotonic() + deadline(10), ""
    while time.monotonic() < end:
        try:
            cached.read()
            text = ""
        except OSError as error:
            text = str(error)
        if text == "" if wanted == "" else wanted in text:
            break
        time.sleep(0.01)
    return text


def test_a_name_that_lives_is_refused_and_that_of_a_dead_engine_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.control.directory.host_server.RENEW_S", 0.3)
    folder = FolderDirectory(tmp_path)
    check_names(folder, ["decode0"])
    folder.publish(record())
    check_names(folder, ["decode0"])  # its beat stands still
    check_names(folder, ["decode1"])
    threading.Timer(0.1, folder.publish, [record(beat=1)]).start()
    with pytest.raises(ConfigError, match="lives already"):
        check_names(folder, ["decode0", "decode1"])


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        FolderDirectory(tmp_path)


def test_a_place_is_a_folder_or_has_a_known_scheme(tmp_path: Path) -> None:
    front = directory_for_front(f"folder:{tmp_path / 'a'}")
    assert isinstance(front, CachedDirectory)
    front.close()
    assert isinstance(directory_for_engine(str(tmp_path / "b:c"), False), FolderDirectory)
    assert isinstance(directory_for_engine("port", True), PortDirectory)
    with pytest.raises(ConfigError, match="give --port"):
        directory_for_engine("port", False)
    for one in (directory_for_front, lambda place: directory_for_engine(place, True)):
        with pytest.raises(ConfigError, match="unknown kind of directory 'etcd'"):
            one("etcd:somewhere")
        with pytest.raises(ConfigError, match="give --directory"):
            one("")
    with pytest.raises(ConfigError, match="is for engines"):
        directory_for_front("port")
    with pytest.raises(ConfigError, match="runs in no pod"):
        directory_for_front("kubernetes:weft")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        directory_for_front(str(tmp_path / "file"))
