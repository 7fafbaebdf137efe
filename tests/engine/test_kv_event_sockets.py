"""Sockets of KV cache events: addresses, slow and greedy routers, the end of the thread."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config.sections.events_section import EventsSection, check_events
from weft.engine import kv_events
from weft.engine.kv_events import EventForm, KVEventPublisher
from weft.kv.block_events import Cleared

WAIT_S = deadline(10.0)
FORM = EventForm("map", 16, "full_attention")


def section(folder: Path, buffer: int = 10000) -> EventsSection:
    return EventsSection(
        kv_events_endpoint=f"ipc://{folder}/events",
        kv_events_replay_endpoint=f"ipc://{folder}/replay",
        kv_events_buffer=buffer,
    )


def wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("events", "replay", "highest"),
    [
        ("tcp://*:5557", "tcp://*:5557", 0),
        ("tcp://*:5557", "tcp://*:5558", 1),
        ("tcp://*:5559", "tcp://*:5557", 2),
        ("tcp://[::]:5559", "tcp://*:5557", 2),
        ("ipc:///run/a", "ipc:///run/a-1", 1),
    ],
)
def test_overlapping_addresses_are_refused(events: str, replay: str, highest: int) -> None:
    settings = EventsSection(kv_events_endpoint=events, kv_events_replay_endpoint=replay)
    with pytest.raises(ConfigError, match=r"--kv-events-replay-endpoint .* overlaps"):
        check_events(settings, highest)
    if highest:
        check_events(settings, highest - 1)


def test_the_port_of_the_highest_engine_exists() -> None:
    settings = EventsSection(kv_events_endpoint="tcp://*:65530")
    check_events(settings, 5)
    with pytest.raises(ConfigError, match="a port from 1 to 65529"):
        check_events(settings, 6)


def test_an_address_of_all_hosts_is_not_connected_to() -> None:
    with pytest.raises(ConfigError, match=r"write tcp://\*:5557"):
        check_events(EventsSection(kv_events_endpoint="tcp://0.0.0.0:5557"))
    # A connected address takes no port of this host.
    check_events(
        EventsSection(kv_events_endpoint="tcp://router:5557", kv_events_replay_endpoint="tcp://*:5557"), 3
    )


@pytest.mark.parametrize(
    ("endpoint", "replay", "flag"),
    [
        ("tcp://[::]x:5557", None, "--kv-events-endpoint"),
        ("ipc:///no/such/folder/a", None, "--kv-events-endpoint"),
        ("", "ipc:///no/such/folder/b", "--kv-events-replay-endpoint"),
    ],
)
def test_an_unusable_address_is_named_by_its_flag(
    tmp_path: Path, endpoint: str, replay: str | None, flag: str
) -> None:
    settings = EventsSection(
        kv_events_endpoint=endpoint or f"ipc://{tmp_path}/events", kv_events_replay_endpoint=replay
    )
    with pytest.raises(ConfigError) as raised:
        KVEventPublisher(settings, FORM, 0, 0)
    assert raised.value.param == flag
    assert raised.value.message.startswith(flag)


def test_routers_reach_an_engine_over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("needs IPv6")
    publisher = KVEventPublisher(EventsSection(kv_events_endpoint=f"tcp://[::]:{port}"), FORM, 0, 0)
    context = zmq.Context()
    try:
        for host in ("[::1]", "127.0.0.1"):
            router = context.socket(zmq.SUB)
            router.setsockopt(zmq.IPV6, 1)
            router.subscribe("")
            router.connect(f"tcp://{host}:{port}")

            def arrived(router: zmq.Socket[bytes] = router) -> bool:
                publisher.publish([Cleared()])
                return bool(router.poll(20))

            wait(arrived)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_an_address_in_use_is_reported_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_events, "WARN_S", 0.0)
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        settings = EventsSection(kv_events_endpoint=f"tcp://*:{holder.getsockname()[1]}")
        with caplog.at_level(logging.WARNING):
            publisher = KVEventPublisher(settings, FORM, 0, 0)
            wait(lambda: caplog.text.count("is in use") >= 3 or not publisher._wakeup.ring())
            publisher.publish([Cleared()])
            wait(lambda: caplog.text.count("is in use") >= 3)
        publisher.close()


def test_events_go_out_between_replays(tmp_path: Path) -> None:
    """A router that asks without end neither holds up new batches nor the end."""
    publisher = KVEventPublisher(section(tmp_path), FORM, 0, 0)
    for _ in range(300):
        publisher.publish([Cleared()])
    context = zmq.Context()
    greedy, router = context.socket(zmq.DEALER), context.socket(zmq.SUB)
    router.subscribe("")
    router.connect(f"ipc://{tmp_path}/events")
    greedy.setsockopt(zmq.SNDHWM, 0)
    greedy.connect(f"ipc://{tmp_path}/replay")
    try:

        def arrived() -> bool:
            publisher.publish([Cleared()])
            return bool(router.poll(20))

        wait(arrived)
        wait(lambda: not publisher._queue)
        answers = publisher._answer_replay
        between: list[int] = []

        def answered() -> None:
            between.append(len(publisher._queue))
            answers()

        publisher._answer_replay = answered  # type: ignore[method-assign]
        for _ in range(3000):
            greedy.send_multipart([b"", bytes(8)])
        wait(lambda: len(between) > 5)
        last = publisher._next
        publisher.publish([Cleared()])
        while True:
            assert router.poll(WAIT_S * 1e3)
            if int.from_bytes(router.recv_multipart()[1], "big") == last:
                break
        assert len(between) < 2000, "the batch waited for all replays"
        began = time.monotonic()
        publisher.close()
        assert not publisher._thread.is_alive()
        assert time.monotonic() - began < kv_events.CLOSE_S
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_a_frame_that_is_too_long_ends_its_connection_alone(tmp_path: Path) -> None:
    publisher = KVEventPublisher(section(tmp_path), FORM, 0, 0)
    context = zmq.Context()
    try:
        for size, answered in ((1 << 20, False), (8, True)):
            router = context.socket(zmq.DEALER)
            router.connect(f"ipc://{tmp_path}/replay")
            router.send_multipart([b"", bytes(size)])
            assert bool(router.poll(WAIT_S * 1e3 if answered else 150)) == answered
            router.close(linger=0)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_after_an_error_in_the_thread_nothing_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = KVEventPublisher(section(tmp_path), FORM, 0, 0)

    def fail(events: object) -> list[object]:
        raise RuntimeError("a fault of the test")

    monkeypatch.setattr(FORM, "of", fail)
    for _ in range(3):
        publisher.publish([Cleared()])
    publisher._thread.join(WAIT_S)
    publisher.publish([Cleared()])
    assert not publisher._queue
    assert caplog.text.count("KV cache events end") == 1
    publisher.close()


def test_the_queue_of_a_router_is_bounded_by_the_buffer(tmp_path: Path) -> None:
    publisher = KVEventPublisher(section(tmp_path, buffer=50), FORM, 0, 0)
    assert publisher._pub.getsockopt(zmq.SNDHWM) == 50
    assert publisher._pub.getsockopt(zmq.TCP_KEEPALIVE) == 1
    publisher.close()
