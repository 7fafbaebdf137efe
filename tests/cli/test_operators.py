"""Operators' commands at a server that is played by a list of answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from weft.cli import admin


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the bodies of the requests to a server of an earlier release, whose only engine is retired."""
    bodies: list[Any] = []

    def call(_: admin.Server, method: str, path: str, body: Any = None) -> Any:
        if method == "GET":
            engine = {"name": "all0", "state": "retired", "alive": False, "incarnation": "a", "starts": 6}
            return {"engines": [engine]}
        bodies.append(body)
        return {"status": "restarting all0", "engines": ["all0"]}

    monkeypatch.setattr(admin.Server, "call", call)
    return bodies


def test_a_change_names_the_model_of_the_groups(played: list[Any]) -> None:
    CliRunner().invoke(admin.restart, ["--model", "small"])
    CliRunner().invoke(admin.scale, ["decode", "2", "--model", "small"])
    CliRunner().invoke(admin.drain, ["decode0", "--model", "small"])
    CliRunner().invoke(admin.revive, ["all0", "--model", "small"])
    assert [body["model"] for body in played] == ["small"] * 4


def test_the_status_has_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [{"name": "p0", "model": name, "role": "prefill", "state": "running"} for name in ("a", "b")]
    monkeypatch.setattr(admin.Server, "call", lambda *_: {"engines": engines})
    shown = CliRunner().invoke(admin.status).stdout.splitlines()
    assert [line.split()[:2] for line in shown] == [["model", "name"], ["a", "p0"], ["b", "p0"]]
    assert len(CliRunner().invoke(admin.status, ["--model", "b"]).stdout.splitlines()) == 2


def test_a_restart_without_a_file_sends_what_an_earlier_release_takes(played: list[Any]) -> None:
    found = CliRunner().invoke(admin.restart, ["--wait", "1"])
    assert played == [{"group": ""}]
    assert "all0 did not start again, and the restart is cancelled" in str(found.exception)


def test_a_local_server_is_reached_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"engines": []}')

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.handle_request)
        server.timeout = 10
        thread.start()
        listed = admin.Server(f"http://127.0.0.1:{server.server_port}", "key").listed()
        thread.join()
    assert listed == []
