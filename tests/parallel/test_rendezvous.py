"""The rendezvous store of a group's head: entries, corrections, access, and ports."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tests.support.slowness import deadline, until
from weft.common.errors import ConfigError
from weft.parallel import rendezvous
from weft.parallel.handshakes import NOTHING, SILENT, STRANGER
from weft.parallel.rendezvous import RendezvousClient, RendezvousStore
from weft.parallel.secret import CurveKeys, derive
from weft.types.rendezvous import Ask

KEYS = derive(b"0123456789abcdef")
STRANGE = derive(b"another secret of enough bytes")
LONG = deadline(20.0)


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    made = RendezvousStore("tcp://127.0.0.1:*", KEYS)
    yield made
    made.close()


@pytest.fixture
def clients() -> Iterator[list[RendezvousClient]]:
    made: list[RendezvousClient] = []
    yield made
    for client in made:
        client.close()


def connect(clients: list[RendezvousClient], address: str, keys: CurveKeys = KEYS) -> RendezvousClient:
    clients.append(RendezvousClient(address, keys))
    return clients[-1]


def test_entries_come_and_stay(store: RendezvousStore, clients: list[RendezvousClient]) -> None:
    one, two = connect(clients, store.address), connect(clients, store.address)
    one.post("a", b"1")
    two.post("b", b"2")
    assert two.wait("a", LONG) == b"1"
    assert one.wait("b", LONG) == b"2"
    store.post("c", b"3")
    assert one.wait("c", LONG) == b"3"
    assert one.entries == {"a": b"1", "b": b"2", "c": b"3"}
    assert one.head == store.head
    assert one.wait("none", 0.05) is None
    assert store.look("b")["b"][0] == b"2"
    store.drop("c")
    until(lambda: "c" not in one.entries)


def test_an_overwritten_entry_is_right_again_with_the_next_poll(
    store: RendezvousStore, clients: list[RendezvousClient]
) -> None:
    alive, dead = connect(clients, store.address), connect(clients, store.address)
    dead.post("lease", b"old")
    until(lambda: "lease" in store.look(""))
    dead.close()
    clients.remove(dead)
    alive.post("lease", b"new")
    until(lambda: store.look("")["lease"][0] == b"new")
    store.post("lease", b"old")
    until(lambda: alive.entries.get("lease") == store.look("")["lease"][0] == b"new")


def test_the_age_of_an_entry_shows_a_silent_client(
    store: RendezvousStore, clients: list[RendezvousClient]
) -> None:
    client = connect(clients, store.address)
    client.post("host/1/a", b"")
    until(lambda: "host/1/a" in store.look("host/"))
    client.close()
    clients.clear()
    until(lambda: store.look("host/")["host/1/a"][1] > 1.0)
    assert store.look("other/") == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_port(store: RendezvousStore, number: signal.Signals) -> None:
    """Also if the caller has blocked stop signals until the handlers of the command are there."""
    code = f"""
import signal
from weft.common import signals
from weft.parallel.rendezvous import RendezvousStore
from weft.parallel.secret import derive
for number in signals.STOPS:
    signal.signal(number, signal.SIG_DFL)  # a shell may start tests with ignored signals
signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
print("begins", flush=True)
RendezvousStore({store.address!r}, derive(b"0123456789abcdef"), 3600.0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        process.send_signal(number)
        assert process.wait(LONG) == -number
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_client_without_a_free_file_descriptor_tries_again(
    clients: list[RendezvousClient], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "RENEW_S", 0.2)
    first = RendezvousStore("tcp://127.0.0.1:*", KEYS)
    client = connect(clients, first.address)
    until(lambda: client.head == first.head)
    with monkeypatch.context() as patch:

        def fail(socket: object) -> None:
            raise zmq.ZMQError(errno.EMFILE)

        patch.setattr(rendezvous, "Handshakes", fail)
        first.close()
        until(lambda: "trouble with the connection to the head" in caplog.text)
    again = RendezvousStore(first.address, KEYS, LONG)
    try:
        until(lambda: client.head == again.head)
    finally:
        again.close()


def test_a_table_that_the_client_has_is_not_sent_again(
    store: RendezvousStore, clients: list[RendezvousClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    take = RendezvousClient._take

    def counted(self: RendezvousClient, data: bytes) -> None:
        sizes.append(len(data))
        take(self, data)

    monkeypatch.setattr(RendezvousClient, "_take", counted)
    client = connect(clients, store.address)
    client.post("a", b"1")
    store.post("large", bytes(10_000))
    until(lambda: client.wait("large", LONG) is not None and "a" in client.entries)
    sizes.clear()
    until(lambda: len(sizes) >= 4)
    assert max(sizes[1:]) < 200
    store.drop("large")
    until(lambda: client.entries == {"a": b"1"})


@pytest.mark.requirement("F27")
def test_clients_without_the_secret_get_no_answer(
    store: RendezvousStore, clients: list[RendezvousClient]
) -> None:
    stranger = connect(clients, store.address, STRANGE)
    stranger.post("a", b"1")
    assert stranger.wait("a", 0.5) is None
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(store.address)
    plain.send(msgspec.msgpack.encode(Ask(number=1, entries={"a": b"1"})))
    assert not plain.poll(300)
    context.destroy(linger=0)
    assert store.look("") == {}


def test_an_invalid_poll_is_dropped(store: RendezvousStore, clients: list[RendezvousClient]) -> None:
    context = zmq.Context()
    rough = context.socket(zmq.DEALER)
    KEYS.guard_rank(rough)
    rough.connect(store.address)
    for parts in ([b"nonsense"], [b"a", b"b"], [b""]):
        rough.send_multipart(parts)
    client = connect(clients, store.address)
    client.post("a", b"1")
    assert client.wait("a", LONG) == b"1"
    context.destroy(linger=0)


@pytest.mark.slow
def test_the_next_head_at_the_same_place_gets_all_entries(clients: list[RendezvousClient]) -> None:
    first = RendezvousStore("tcp://127.0.0.1:*", KEYS)
    client = connect(clients, first.address)
    client.post("a", b"1")
    first.post("b", b"2")
    assert client.wait("b", LONG) == b"2"
    head, address = first.head, first.address
    first.close()
    again = RendezvousStore(address, KEYS, LONG)
    try:
        assert again.head != head
        until(lambda: client.head == again.head and client.entries == {"a": b"1"})
    finally:
        again.close()


def test_a_port_that_stays_taken_is_named_with_its_flag(store: RendezvousStore) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        RendezvousStore(store.address, KEYS, 0.4)
    assert time.monotonic() - began > 0.4
    assert refused.value.param == "--join-port"
    why = f"cannot listen at {store.address} (Address already in use) for 0.4 s: choose another port"
    assert refused.value.message == f"--join-port: {why}"


def test_an_address_that_can_never_be_had_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"--join-port: cannot listen at tcp://192\.0\.2\.1:5799"):
        RendezvousStore("tcp://192.0.2.1:5799", KEYS, LONG)
    assert time.monotonic() - began < LONG / 2


def test_a_head_waits_for_the_port_of_the_head_before() -> None:
    """A killed head may hold the port until its end, while the next head starts at once."""
    dying = socket.create_server(("127.0.0.1", 0))
    late = threading.Timer(0.5, dying.close)
    late.start()
    address = f"tcp://127.0.0.1:{dying.getsockname()[1]}"
    made = RendezvousStore(address, KEYS, LONG)
    late.join()
    assert made.address == address
    made.close()


def test_both_ends_say_that_their_secrets_differ(
    store: RendezvousStore,
    clients: list[RendezvousClient],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stranger = connect(clients, store.address, STRANGE)
    until(lambda: stranger.why == STRANGER)
    until(lambda: store.refused == "127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "REFUSED_S", 0.0)
        assert store.refused == ""
    told = [message for message in caplog.messages if "rejected" in message]
    assert len(told) == 1, told  # one line, though the client tried again and again
    assert told[0].startswith("rejected a connection from ")
    assert told[0].endswith(": wrong --group-secret")


def test_a_client_reports_a_refused_connection(clients: list[RendezvousClient]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        silent = connect(clients, f"tcp://127.0.0.1:{port}")
        until(lambda: silent.why == SILENT)
    nobody = connect(clients, f"tcp://127.0.0.1:{port}")
    until(lambda: nobody.why == NOTHING)
    assert nobody.head == 0
