"""Host names under which a server answers: a web page cannot read a local server through its own name."""

from __future__ import annotations

from typing import Any

import pytest

from weft.common.errors import Forbidden
from weft.front.http.access import Hosts

LOCAL = ["localhost", "LOCALHOST:8000", "app.localhost", "localhost.", "127.0.0.1:1", "127.9.9.9", "[::1]:80"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evillocalhost",
    "10.0.0.7",
    "[fe80::1]",
    "",
    ":8000",
    "localhost:8000:9",
    "localhost/",
    "evil.example, localhost",
    "user@localhost",
    "\xff",
]


def refused(hosts: Hosts, host: str) -> bool:
    try:
        hosts.check(host.encode("latin-1"))
    except Forbidden:
        return True
    return False


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_a_local_server_answers_to_local_names(bound: str) -> None:
    hosts = Hosts(bound, "::1" if bound == "::1" else "127.0.0.1")
    assert [host for host in LOCAL if refused(hosts, host)] == []
    assert [host for host in FOREIGN if not refused(hosts, host)] == []
    hosts.check(None)


def test_the_name_of_a_local_address_counts() -> None:
    hosts = Hosts("workstation", "127.0.1.1")
    assert not refused(hosts, "workstation:8000")
    assert refused(hosts, "evil.example")


def test_allowed_names() -> None:
    hosts = Hosts("127.0.0.1", "127.0.0.1", ["Llm.example.org", "[fe80::1]"])
    for host in ("llm.example.org:443", "[fe80::1]:8000", *LOCAL):
        assert not refused(hosts, host), host
    assert refused(hosts, "evil.example")
    assert refused(hosts, "a.llm.example.org")
    assert not refused(Hosts("127.0.0.1", "127.0.0.1", ["*"]), "evil.example")


def test_servers_for_others_are_checked_only_when_asked() -> None:
    assert not refused(Hosts("0.0.0.0", "0.0.0.0"), "evil.example")
    assert not refused(Hosts("127.0.0.1", "127.0.0.1", keys=True), "evil.example")
    asked = Hosts("0.0.0.0", "0.0.0.0", ["llm.example.org"], keys=True)
    assert refused(asked, "evil.example")
    assert not refused(asked, "llm.example.org")


@pytest.mark.requirement("F6")
def test_a_page_that_rebinds_its_name_reads_nothing(fake: Any) -> None:
    evil = {"host": "evil.example:8000"}
    for path in ("/", "/v1/models", "/metrics", "/docs", "/openapi.json", "/v1/models/", "/none"):
        answer = fake.http.get(path, headers=evil)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), path
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    body = {"model": "fake", "prompt": "ab", "max_tokens": 1}
    assert fake.http.post("/v1/completions", json=body, headers=evil).status_code == 403
    assert fake.http.options("/v1/completions", headers=evil).status_code == 403
    for path in ("/health", "/live", "/ready", "/ping", "/ready/"):
        assert fake.http.get(path, headers=evil).status_code == 200, path
    assert fake.http.get("/v1/models", headers={"host": "app.localhost:1"}).status_code == 200
