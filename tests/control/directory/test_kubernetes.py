"""EndpointSlices: the events of a watch, cut anywhere, and a fake API server with the faults of real ones."""

from __future__ import annotations

import functools
import itertools
import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.directory.test_leases import record
from tests.support import slowness
from weft.control.directory.endpoint_slices import Endpoint, EndpointSlices, Expired
from weft.control.directory.kubernetes import KubernetesGroups
from weft.control.directory.polled import PolledDirectory


def slice_of(name: str, version: int, *addresses: str, port: int | None = 9000) -> dict[str, Any]:
    """An EndpointSlice as the API server writes it, with fields that nobody reads."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {"name": name, "resourceVersion": str(version), "labels": {"a": "b"}},
        "endpoints": [
            {"addresses": [one], "conditions": {"ready": False, "serving": True}, "nodeName": "n"}
            for one in addresses
        ],
        "ports": [{"name": "zmq", "port": 1}, {"name": "http", "port": port, "protocol": "TCP"}],
    }


def event(kind: str, what: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return event("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(version)}})


def listed(version: int, *slices: dict[str, Any]) -> bytes:
    return json.dumps({"metadata": {"resourceVersion": str(version)}, "items": list(slices)}).encode()


until = functools.partial(slowness.until, seconds=20.0, every=0.01)

GONE = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410}
WATCH = (
    event("ADDED", slice_of("a", 11, "10.0.0.1", "10.0.0.2"))
    + bookmark(15)
    + event("MODIFIED", slice_of("a", 16, "10.0.0.2"))
    + event("ADDED", slice_of("b", 17, "10.0.0.3", "10.0.0.2"))
    + event("DELETED", slice_of("c", 18))
)


@given(st.lists(st.integers(0, len(WATCH)), max_size=12))
def test_events_may_be_cut_anywhere(cuts: list[int]) -> None:
    slices = EndpointSlices("http")
    slices.relist(listed(10, slice_of("c", 5, "10.0.0.9")))
    places = [0, *sorted(cuts), len(WATCH)]
    for first, last in itertools.pairwise(places):
        slices.feed(WATCH[first:last])
    assert slices.endpoints == [Endpoint("10.0.0.2", 9000), Endpoint("10.0.0.3", 9000)]
    assert slices.version == "18"


def test_a_bookmark_moves_the_version_alone() -> None:
    slices = EndpointSlices("http")
    slices.relist(listed(10, slice_of("a", 5, "10.0.0.1")))
    slices.feed(bookmark(99))
    assert (slices.version, len(slices.endpoints)) == ("99", 1)


def test_a_list_replaces_everything_and_a_half_event_is_forgotten() -> None:
    slices = EndpointSlices("http")
    slices.relist(listed(10, slice_of("a", 5, "10.0.0.1")))
    slices.feed(WATCH[:40])
    slices.relist(listed(20, slice_of("b", 6, "10.0.0.2")))
    slices.feed(bookmark(21))
    assert slices.endpoints == [Endpoint("10.0.0.2", 9000)]
    slices.feed(WATCH[:40])
    slices.reconnect()
    slices.feed(bookmark(22))
    assert slices.version == "22"


def test_an_old_version_is_expired_and_other_errors_are_errors() -> None:
    slices = EndpointSlices("http")
    with pytest.raises(Expired):
        slices.feed(event("ERROR", GONE))
    with pytest.raises(ValueError, match="the watch failed"):
        slices.feed(event("ERROR", {"code": 500}))
    with pytest.raises(ValueError, match="JSON"):
        slices.feed(b"<html>\n")


@pytest.mark.parametrize("missing", ["endpoints", "ports"])
def test_a_slice_without_pods_or_ports_has_none(missing: str) -> None:
    slices = EndpointSlices("http")
    slices.relist(listed(1, {**slice_of("a", 1, "10.0.0.1"), missing: None}, slice_of("b", 1, port=None)))
    assert slices.endpoints == []


class Api:
    """A fake API server: answers lists with the present slices, and plays watches from a script."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.version = 100
        self.list_status = 200
        self.asked: list[dict[str, str]] = []
        self.lists = 0
        self.tokens: set[str | None] = set()
        self.script: queue.Queue[bytes | int | None] = queue.Queue()
        """For watches, in order: bytes to send, a status to answer with, or None for the end of the watch."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        place = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(place.query).items()}
        assert place.path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
        assert query["labelSelector"] == "kubernetes.io/service-name=engines"
        self.tokens.add(handler.headers.get("authorization"))
        if "watch" in query:
            self.asked.append(query)
            self._watch(handler)
            return
        self.lists += 1
        handler.send_response(self.list_status)
        handler.end_headers()
        handler.wfile.write(listed(self.version, *self.slices))

    def _watch(self, handler: BaseHTTPRequestHandler) -> None:
        """Play the script until its next None; a status alone is the answer to the watch."""
        begun = False
        while (step := self.script.get()) is not None:
            if isinstance(step, int):
                handler.send_response(step)
                handler.end_headers()
                return
            if not begun:
                handler.send_response(200)
                handler.end_headers()
                begun = True
            handler.wfile.write(step)
            handler.wfile.flush()
        if not begun:
            handler.send_response(200)
            handler.end_headers()

    def close(self) -> None:
        for _ in range(10):
            self.script.put(None)
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("t1\n")
    (tmp_path / "namespace").write_text("prod")
    return tmp_path


def urls(groups: KubernetesGroups) -> list[str]:
    try:
        return groups.urls()
    except OSError:
        return []


def test_a_watch_goes_on_through_everything_that_api_servers_do(api: Api, account: Path) -> None:
    api.slices = [slice_of("a", 90, "10.0.0.1")]
    groups = KubernetesGroups("engines", server=api.url, account=account, again=0.05)
    try:
        until(lambda: urls(groups) == ["http://10.0.0.1:9000"])
        # an event in two pieces, then the end of the watch: the next watch begins at the last version
        added = event("ADDED", slice_of("b", 120, "10.0.0.2"))
        api.script.put(added[:30])
        api.script.put(added[30:] + bookmark(130))
        until(lambda: len(urls(groups)) == 2)
        api.script.put(None)
        until(lambda: len(api.asked) == 2)
        assert api.asked[1]["resourceVersion"] == "130"
        assert api.asked[1]["allowWatchBookmarks"] == "true"
        # a broken connection in the middle of an event
        api.script.put(added[:30])
        api.script.put(None)
        until(lambda: len(api.asked) == 3)
        assert len(urls(groups)) == 2
        # 410 as a status, and 410 as an event: list again
        (account / "token").write_text("t2\n")
        api.slices, api.version = [slice_of("a", 190, "10.0.0.5")], 200
        api.script.put(410)
        until(lambda: urls(groups) == ["http://10.0.0.5:9000"])
        api.slices, api.version = [slice_of("a", 290, "10.0.0.6")], 300
        api.script.put(event("ERROR", GONE))
        api.script.put(None)
        until(lambda: urls(groups) == ["http://10.0.0.6:9000"])
        assert api.lists == 3
        assert api.tokens == {"Bearer t1", "Bearer t2"}
        # nonsense, and an answer of an overloaded server: the last state stays, and the watch comes back
        api.script.put(b"<html>\n")
        api.script.put(None)
        api.script.put(503)
        api.script.put(event("MODIFIED", slice_of("a", 310, "10.0.0.7")))
        until(lambda: urls(groups) == ["http://10.0.0.7:9000"])
    finally:
        api.close()
        groups.close()


def test_a_list_that_is_forbidden_is_tried_again(api: Api, account: Path) -> None:
    api.list_status = 403
    api.slices = [slice_of("a", 90, "10.0.0.1")]
    groups = KubernetesGroups("engines", server=api.url, account=account, again=0.05)
    until(lambda: api.lists >= 1)
    with pytest.raises(OSError, match="has not listed"):
        groups.urls()
    api.list_status = 200
    until(lambda: urls(groups) == ["http://10.0.0.1:9000"])
    groups.close()


class Group:
    """The HTTP port of a group, as far as a directory asks."""

    def __init__(self, *records: Any) -> None:
        self.records = list(records)
        self.drained: list[str | None] = []
        self.away = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(500 if outer.away else 200)
                self.end_headers()
                self.wfile.write(msgspec.json.encode(outer.records))

            def do_POST(self) -> None:
                outer.drained.append(self.headers.get("authorization"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def test_the_answering_one_of_two_groups_with_one_name_counts() -> None:
    dead, alive = Group(record(incarnation=1)), Group(record(incarnation=2))
    directory = PolledDirectory(lambda: [alive.url, dead.url], poll=0.02)
    try:
        until(lambda: len(directory._found) == 2)
        dead.away = True
        until(lambda: directory.read()["decode0"].incarnation == 2)
        time.sleep(0.2)
        assert directory.read()["decode0"].incarnation == 2
    finally:
        directory.close()
        dead.close()
        alive.close()


def test_the_later_one_of_two_live_groups_with_one_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.control.directory.polled.LEASE_S", slowness.deadline(0.5))
    later, earlier = Group(record(incarnation=9)), Group(record(incarnation=3))
    directory = PolledDirectory(lambda: [later.url, earlier.url], poll=0.02)
    try:
        until(lambda: len(directory._found) == 2)
        answers = set()
        for _ in range(50):
            answers.add(directory.read()["decode0"].incarnation)
            time.sleep(0.005)
        assert answers == {9}
        later.away = True
        until(lambda: directory.read()["decode0"].incarnation == 3)
    finally:
        directory.close()
        later.close()
        earlier.close()


def test_a_refused_or_failed_order_to_drain_is_an_error() -> None:
    group = Group(record())
    for key in ("", "key"):
        directory = PolledDirectory(lambda: [group.url], key, poll=0.02)
        until(lambda directory=directory: bool(directory._found))  # type: ignore[misc]
        if key:
            group.close()
        with pytest.raises(OSError, match="does not answer" if key else "no admin key"):
            directory.ask_drain(record())
        directory.close()


def test_groups_are_asked_for_their_records() -> None:
    first, second = Group(record("prefill0")), Group(record("decode0", beat=1), record("decode1"))
    places = [first.url, second.url, "http://127.0.0.1:1"]
    directory = PolledDirectory(lambda: places, "key", poll=0.02)
    try:
        until(lambda: directory.read().keys() == {"prefill0", "decode0", "decode1"})
        second.away = True
        second.records = []
        time.sleep(0.2)
        assert directory.read()["decode0"].beat == 1  # no answer: the last records stay, and their leases end
        second.away = False
        until(lambda: directory.read().keys() == {"prefill0"})
        directory.ask_drain(record("prefill0", incarnation=8))  # of an earlier process
        directory.ask_drain(record("prefill0"))
        assert first.drained == ["Bearer key"]
        places.remove(first.url)
        until(lambda: directory.read() == {})
    finally:
        directory.close()
        first.close()
        second.close()


def test_groups_that_cannot_be_found_are_an_error_for_the_reader() -> None:
    def nowhere() -> list[str]:
        raise OSError("away")

    directory = PolledDirectory(nowhere, poll=0.02)

    def fails() -> bool:
        try:
            directory.read()
        except OSError:
            return True
        return False

    until(fails)
    directory.close()
