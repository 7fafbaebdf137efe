"""The rendezvous store of host 0: entries, corrections, access, and engines of other hosts."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.faults.rig import config_of
from tests.support.secret import write_secret
from tests.support.slowness import deadline
from weft.cli.processes.host import due
from weft.common.errors import ConfigError, EngineDead
from weft.config.resolved import EngineConfig
from weft.parallel import remote
from weft.parallel.board import Board, BoardClient
from weft.parallel.handshakes import NOTHING, SILENT, STRANGER
from weft.parallel.secret import derive
from weft.types import board as b

KEYS = derive(b"0123456789abcdef")
LONG = deadline(20.0)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board("tcp://127.0.0.1:*", KEYS)
    yield made
    made.close()


def test_entries_come_and_stay(board: Board) -> None:
    one, two = (BoardClient(board.address, KEYS) for _ in range(2))
    one.tell("a", b"1", LONG)
    two.post("b", b"2")
    assert two.look(LONG)
    assert two.entries == {"a": b"1", "b": b"2"}
    assert one.entries == {"a": b"1"}
    board.post("c", b"3")
    assert one.look(LONG)
    assert one.entries == {"a": b"1", "b": b"2", "c": b"3"} == two.entries | {"c": b"3"}
    version = one.version
    assert one.look(LONG)  # nothing new: the table is kept, and not sent again
    assert (one.version, len(one.entries)) == (version, 3)
    assert board.get("b") == b"2"
    one.close()
    two.close()


def test_what_was_overwritten_is_right_again_with_the_next_look(board: Board) -> None:
    alive, dead = (BoardClient(board.address, KEYS) for _ in range(2))
    alive.tell("lease", b"new", LONG)
    dead.tell("lease", b"old", LONG)
    assert alive.look(LONG)
    assert board.get("lease") == b"new"
    alive.close()
    dead.close()


def test_a_look_that_does_not_wait_takes_what_came_before(board: Board) -> None:
    client = BoardClient(board.address, KEYS)
    board.post("a", b"1")
    until = time.monotonic() + LONG
    while not client.entries:
        client.look(0.0)
        assert time.monotonic() < until
        time.sleep(0.01)
    assert client.entries == {"a": b"1"}
    client.close()


@pytest.mark.requirement("F27")
def test_strangers_get_no_answer(board: Board) -> None:
    stranger = BoardClient(board.address, derive(b"another secret, as long"))
    with pytest.raises(EngineDead, match="did not answer"):
        stranger.tell("a", b"1", 0.5)
    stranger.close()
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(board.address)
    plain.send(msgspec.msgpack.encode(b.Ask(number=1, board=0, version=0, entries={"a": b"1"})))
    assert not plain.poll(300)
    context.destroy(linger=0)
    assert board.get("a") is None


def test_another_board_at_the_same_place_is_noticed(board: Board) -> None:
    client = BoardClient(board.address, KEYS)
    client.tell("a", b"1", LONG)
    board.post("b", b"2")
    first, address = client.board, board.address
    board.close()
    assert not client.look(0.1)
    again = Board(address, KEYS)
    until = time.monotonic() + LONG
    while not client.look(1.0):
        assert time.monotonic() < until
    assert client.board != first
    assert client.entries == {"a": b"1"}  # the entries of this client
    client.close()
    again.close()


def test_a_port_that_is_taken_is_named(board: Board) -> None:
    with pytest.raises(ConfigError, match="--rdzv: cannot listen"):
        Board(board.address, KEYS)


def test_what_is_due() -> None:
    assert due({0: 1, 1: 2}, {}) == [0, 1]
    assert due({0: 1, 1: 2}, {0: 1, 1: 1}) == [1]
    assert due({0: 0, 1: 0}, {1: 3}) == [1]
    assert due({}, {0: 1}) == []


# ---- heads of other hosts


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    secret = write_secret(tmp_path)
    hosts = {"nnodes": 2, "rdzv": "127.0.0.1:5799", "group_secret": str(secret)}
    return config_of(data_parallel_size=2, kv_cache_memory="8MiB", **hosts)


@pytest.fixture
def engines(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[remote.RemoteEngines]:
    monkeypatch.setattr(remote, "open_board", lambda _: Board("tcp://127.0.0.1:*", KEYS))
    made = remote.RemoteEngines(config)
    yield made
    made.close(0.0)


def wanted(board: Board) -> int:
    return msgspec.msgpack.decode(board.get(b.wanted_key(1)) or b"", type=int)


def test_an_engine_of_another_host(engines: remote.RemoteEngines) -> None:
    board = engines._board
    assert (0 in engines, 1 in engines) == (False, True)
    engine = engines.start(1)
    assert wanted(board) == engine.incarnation > 0
    assert (engine.poll(), engine.endpoint()) == (None, None)  # the host has not come
    board.post(
        b.engine_key(1),
        msgspec.msgpack.encode(b.Listening(incarnation=engine.incarnation, address="tcp://x:1")),
    )
    assert engine.endpoint() == "tcp://x:1"
    board.post(
        b.ended_key(1), msgspec.msgpack.encode(b.EngineEnded(incarnation=engine.incarnation, status=-9))
    )
    assert engine.poll() == engine.wait(1.0) == -9

    again = engines.start(1)
    assert (again.poll(), again.endpoint()) == (None, None)  # the entry belongs to the earlier incarnation
    engine.kill()
    assert wanted(board) == again.incarnation > engine.incarnation
    board.post(
        b.engine_key(1),
        msgspec.msgpack.encode(b.Listening(incarnation=again.incarnation, address="tcp://x:2")),
    )
    assert again.endpoint() == "tcp://x:2"
    with pytest.raises(subprocess.TimeoutExpired):
        again.wait(0.1)
    board.post(
        b.engine_key(1),
        msgspec.msgpack.encode(b.Listening(incarnation=again.incarnation, address="tcp://x:3")),
    )
    assert again.poll() == 1  # another process of the incarnation: the host was restarted
    again.kill()
    assert wanted(board) == 0


def answer(board: Board, mark: str) -> str | None:
    told = board.get(b.answer_key(1, mark))
    return None if told is None else told.decode()


def come(board: Board, mark: str, config: EngineConfig) -> None:
    board.post(b.settings_key(1, mark), msgspec.msgpack.encode(remote.host_settings(config)))


def test_hosts_that_differ_are_refused(engines: remote.RemoteEngines, config: EngineConfig) -> None:
    engine, board = engines.start(1), engines._board
    scheduler = msgspec.structs.replace(config.scheduler, max_num_seqs=5)
    come(board, "differs", msgspec.structs.replace(config, scheduler=scheduler))
    assert engine.poll() == remote.REFUSED
    told = answer(board, "differs") or ""
    assert "--max-num-seqs" in told
    assert "host 0 has 4, host 1 has 5" in told

    parallel = msgspec.structs.replace(config.parallel, node_rank=1)
    kv = msgspec.structs.replace(config.kv, pools=())  # may differ between hosts
    come(board, "good", msgspec.structs.replace(config, parallel=parallel, kv=kv))
    assert engine.poll() is None
    assert answer(board, "good") == ""
    assert engines._reading() == [1]


def test_one_host_of_each_number(
    engines: remote.RemoteEngines, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second host waits for the first to end, gets an error otherwise, and ends no served engine."""
    monkeypatch.setattr(remote, "AWAY_S", 0.4)
    engine, board = engines.start(1), engines._board
    come(board, "first", config)
    assert (engine.poll(), answer(board, "first")) == (None, "")
    until = time.monotonic() + LONG
    while answer(board, "second") is None:
        come(board, "first", config)
        come(board, "second", config)
        assert engine.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    assert "another host has --node-rank 1" in (answer(board, "second") or "")

    while answer(board, "third") is None:  # the first says nothing any more
        come(board, "third", config)
        assert engine.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    assert answer(board, "third") == ""
    assert answer(board, "first") is None
    board.post(b.settings_key(1, "fourth"), b"nonsense")
    while answer(board, "fourth") is None:
        assert engine.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    assert "another version" in (answer(board, "fourth") or "")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + deadline(10)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_both_ends_say_that_their_secrets_differ(caplog: pytest.LogCaptureFixture) -> None:
    board = Board("tcp://127.0.0.1:*", KEYS)
    stranger = BoardClient(board.address, derive(b"another secret of enough bytes"))
    try:
        until(lambda: not stranger.look(0.05) and stranger.why == STRANGER)
        until(lambda: board.refused == "127.0.0.1")
        with pytest.raises(EngineDead, match="--group-secret differs"):
            stranger.tell("key", b"", 0.2)
    finally:
        stranger.close()
        board.close()
    told = [message for message in caplog.messages if "rejected" in message]
    assert len(told) == 1, told  # one line, though the client tried again and again
    assert told[0].startswith("rejected a connection from ")
    assert told[0].endswith(": wrong --group-secret")


def test_a_client_says_that_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        silent = BoardClient(f"tcp://127.0.0.1:{port}", KEYS)
        until(lambda: not silent.look(0.05) and silent.why == SILENT)
    nobody = BoardClient(f"tcp://127.0.0.1:{port}", KEYS)
    assert not nobody.look(0.3)
    assert nobody.why == NOTHING
    nobody.close()
    silent.close()
