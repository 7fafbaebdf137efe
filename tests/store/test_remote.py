"""A store of records that hosts share: S3-like over sockets, folders, and Mooncake where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.stores import NAMESPACE, get, put, record
from tests.support.s3_server import S3Server, s3_server
from tests.support.slowness import deadline, until
from weft.store.errors import RecordCorrupt, RecordGone
from weft.store.records import Owner, RecordBuffer
from weft.store.remote.objects import open_objects
from weft.store.remote.remote_store import RemoteStore
from weft.store.settings import RemoteSettings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None, reason='needs obstore: pip install "weft[s3]"'
)
URL = "s3://bucket/some/prefix"
SIZE = 20_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as made:
        yield made


def opened(url: str = URL, *, namespace: str = NAMESPACE, **more: Any) -> RemoteStore:
    given = {"segment_bytes": 1 << 20, "list_s": 0.02, "open_s": 0.0, "away_s": 0.05, **more}
    return RemoteStore(RemoteSettings(namespace=namespace, **given), open_objects(url))


def holds(store: RemoteStore, number: int) -> bool:
    """Return True if the store returns the bytes of a record."""
    return get(store, record(number), SIZE)


def stored(server: S3Server | None, *numbers: int, url: str = URL) -> None:
    """Store records with a store that ends."""
    store = opened(url)
    for number in numbers:
        assert not put(store, record(number), SIZE, Owner(salt=f"s{number}"))
    store.close()


def test_another_host_reads_the_records(server: S3Server) -> None:
    """The writer reads its records before the upload, and the other host after the upload."""
    one, two = opened(open_s=3600.0), opened()
    try:
        for number in range(3):
            assert not put(one, record(number), SIZE)
            assert put(one, record(number), SIZE) == "there"
        assert holds(one, 0)
        assert not server.objects
        one._settings.__dict__["open_s"] = 0.0
        one.maintain()
        until(lambda: two.has(record(2)))
        assert [block[1] for block in two.take_changes().added] == [record(n).key for n in range(3)]
        run = two.read_run([record(n) for n in range(3)], RecordBuffer(1 << 20))
        assert [len(one) for one in two.check_run(run)] == 3 * [SIZE]
        assert holds(two, 1)
        until(lambda: not one._memory)
        assert holds(one, 2)
        assert all(name.startswith(f"some/prefix/{NAMESPACE}/") for name in server.objects)
    finally:
        one.close()
        two.close()


def test_lists_of_several_pages_and_records_of_another_namespace(server: S3Server) -> None:
    for number in range(7):
        stored(server, number)
    assert len(server.objects) == 7
    store, other = opened(), opened(namespace="f" * 32)
    until(lambda: all(store.has(record(n)) for n in range(7)))
    until(lambda: other._full_at > 0)
    assert not other.has(record(0))
    store.close()
    other.close()


def test_a_list_of_all_segments_keeps_segments_beyond_one_answer(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket has more objects than one answer lists: all are found, and no segment is forgotten."""
    for name in ("s3", "remote_store"):
        monkeypatch.setattr(f"weft.store.remote.{name}.MOST_LISTED", 2)
    for number in range(5):
        stored(server, number)
    store = opened(list_s=3600.0)
    until(lambda: store._full_at > 0)
    assert all(store.has(record(n)) for n in range(5))
    first = store._full_at
    monkeypatch.setattr("weft.store.remote.remote_store._FULL_S", 0.0)
    store._requests.soon(store._wake.set)
    until(lambda: store._full_at > first)
    assert store.stats().gone == 0
    assert store.flush() == 5
    until(lambda: not server.objects)
    store.close()


def test_a_full_index_leaves_out_the_oldest_segments(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.store.remote.remote_store._MOST_RECORDS", 2)
    monkeypatch.setattr("weft.store.remote.remote_store._AT_ONCE", 1)
    for number in range(3):
        stored(server, number)
    store = opened()
    until(lambda: store._full_at > 0)
    assert [store.has(record(n)) for n in range(3)] == [False, True, True]
    stored(server, 3)
    until(lambda: store.has(record(3)))
    assert [store.has(record(n)) for n in range(4)] == [False, False, True, True]
    store.close()


def test_an_object_that_may_not_be_read_fails_alone(server: S3Server) -> None:
    """Such as an object that a rule of the bucket has archived."""
    stored(server, 1)
    server.denied.update(server.objects)
    stored(server, 2)
    store = opened()
    until(lambda: store.has(record(2)))
    assert not store.away
    assert not store.has(record(1))
    server.denied.update(server.objects)
    with pytest.raises(RecordGone):
        holds(store, 2)
    assert not store.away
    store.close()


def test_a_store_that_comes_back_at_once_is_reported(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop ends the outage while the changes are taken."""
    stored(server, 1)
    store = opened(list_s=3600.0)
    until(lambda: store.has(record(1)))
    store.take_changes()
    answers = [True, False]
    with monkeypatch.context() as patched:
        away = property(lambda self: answers.pop(0) if answers else False)
        patched.setattr(RemoteStore, "away", away)
        assert store.take_changes().whole
        assert store.take_changes().added == [(0, record(1).key)]
    store.close()


def test_a_flush_also_removes_an_object_whose_upload_is_under_way(server: S3Server) -> None:
    """Also if the object store fails right after the upload."""
    store = opened()
    until(lambda: store._full_at > 0)
    server.uploads_stall.set()
    assert not put(store, record(1), SIZE, Owner(salt="s1"))
    store._seal()
    assert store.flush(salt="s1") == 1
    store._requests.call(asyncio.sleep(0), 30)
    until(lambda: not store._flushes)
    server.fails_after_put = True
    server.uploads_stall.clear()
    until(lambda: store.away)
    assert len(server.objects) == 1
    server.broken = server.fails_after_put = False
    until(lambda: not server.objects)
    assert not store.has(record(1))
    store.close()


@pytest.mark.parametrize("place", [0, 4096 + 100, 4096 * 2 + 50, -8192 + 5, -4096 + 9])
def test_damaged_bytes_are_never_returned(server: S3Server, place: int) -> None:
    """A flipped bit in the first page, a header, a payload, the footer or the trailer."""
    stored(server, 1)
    ((name, data),) = server.objects.items()
    damaged = bytearray(data)
    damaged[place] ^= 0x80
    server.objects[name] = bytes(damaged)
    store = opened()
    until(lambda: store._full_at > 0)
    if store.has(record(1)):
        with pytest.raises(RecordCorrupt):
            holds(store, 1)
        assert not store.has(record(1))
    else:
        assert store.stats().damaged == 1
    store.close()


@pytest.mark.parametrize("fault", ["stalls", "errors", "dies"])
def test_a_store_that_does_not_answer_is_a_miss(
    server: S3Server, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads end at their deadline, blocks are gone at once, and come back with the store."""
    monkeypatch.setattr("weft.store.remote.remote_store._READ_S", 0.2)
    monkeypatch.setattr("weft.store.remote.remote_store._ASK_S", 0.2)
    stored(server, 1)
    store = opened(list_s=3600.0)
    until(lambda: store.has(record(1)))
    assert len(store.take_changes().added) == 1
    if fault == "stalls":
        server.stalls.set()
    elif fault == "errors":
        server.broken = True
    else:
        server.dead = True
    began = time.monotonic()
    with pytest.raises(RecordGone):
        holds(store, 1)
    assert time.monotonic() - began < deadline(5)
    assert not store.has(record(1))
    assert put(store, record(2), SIZE) == "away"
    assert store.take_changes() == ([], [], True)
    assert store.take_changes() == ([], [], False)
    monkeypatch.undo()  # a busy machine may need longer for an answer
    server.stalls.clear()
    server.broken = server.dead = False
    until(lambda: not store.away)
    assert store.take_changes().added == [(0, record(1).key)]
    assert holds(store, 1)
    store.close()


def test_slow_uploads_skip_blocks(server: S3Server) -> None:
    """At most two uploads are under way. No call waits for an upload."""
    store = opened(segment_bytes=16 << 10)  # no record fits
    assert put(store, record(1), SIZE) == "large"
    store.close()
    store = opened(segment_bytes=60_000)  # one record
    until(lambda: store._full_at > 0)
    server.stalls.set()
    results = [put(store, record(number), SIZE) for number in range(5)]
    assert results == ["", "", "", "slow", "slow"] or results == ["", "", "slow", "slow", "slow"]
    server.stalls.clear()
    until(lambda: len(server.objects) >= 2)
    store.close()


def test_a_flush_removes_the_objects_of_every_namespace(server: S3Server) -> None:
    stored(server, 1)
    stored(server, 2)
    other = opened(namespace="f" * 32)
    assert not put(other, record(3), SIZE, Owner(salt="s1"))
    other.close()
    store = opened()
    until(lambda: store.has(record(1)) and store.has(record(2)))
    assert store.flush(salt="s1") == 1
    assert not store.has(record(1))
    until(lambda: len(server.objects) == 1)
    assert holds(store, 2)
    assert store.flush() == 1
    until(lambda: not server.objects)
    store.close()


def test_expired_objects_are_removed(server: S3Server) -> None:
    stored(server, 1)
    store = opened(ttl=0.01)
    until(lambda: not server.objects)
    assert not store.has(record(1))
    store.close()


def test_a_folder_is_an_object_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects"
    stored(None, 1, 2, url=url)
    store = opened(url)
    until(lambda: store.has(record(2)))
    assert holds(store, 1)
    store.close()
    assert stat.S_IMODE((tmp_path / "objects").stat().st_mode) == 0o700, "the objects contain prompts"


@pytest.mark.slow
def test_moto_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the S3 of moto."""
    pytest.importorskip("moto", reason="needs moto[server] and boto3")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    try:
        for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
        _whole_life(URL)
    finally:
        server.stop()


@pytest.mark.slow
def test_mooncake() -> None:
    """Against a master and a segment of Mooncake, over TCP."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs mooncake-transfer-engine and its libraries: {error}")
    folder, port = Path(sys.modules["mooncake"].__path__[0]), 50553
    master = subprocess.Popen(
        [folder / "mooncake_master", f"--rpc_port={port}", f"--metrics_port={port + 1}"]
    )
    segment = (
        "import time; from mooncake.store import MooncakeDistributedStore as S; s = S();"
        "assert not s.setup('localhost', 'P2PHANDSHAKE', 256 << 20, 64 << 20, 'tcp', '', "
        f"'127.0.0.1:{port}');"
        "print('up', flush=True); time.sleep(120)"
    )
    time.sleep(2)
    holder = subprocess.Popen([sys.executable, "-c", segment], stdout=subprocess.PIPE, env=os.environ.copy())
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        _whole_life(f"mooncake://127.0.0.1:{port}/weft?host=localhost")
    finally:
        for process in (holder, master):
            process.kill()
            process.wait()


def _whole_life(url: str) -> None:
    """Write, read by another store, and flush."""
    stored(None, 1, url=url)
    stored(None, 2, url=url)
    store = opened(url)
    until(lambda: store.has(record(1)) and store.has(record(2)))
    assert holds(store, 1)
    assert holds(store, 2)
    store.flush(salt="s1")
    until(lambda: len(store._known) == 1)
    assert holds(store, 2)
    store.close()
