"""weft run, pull, list and ps: in processes of their own, and against a running server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from weft.cli.chat.chat_client import ChatClient
from weft.cli.local_models import list_models, ps, pull, run


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=deadline(120),
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    servers = Servers()
    with servers.scope():
        yield servers.weft("--threads", "1", "--max-model-len", "2048")


def test_bundled_models_are_listed_and_need_no_download() -> None:
    listed = CliRunner().invoke(list_models)
    assert "spool-text" in listed.stdout
    assert "bundled" in listed.stdout
    assert CliRunner().invoke(pull, ["spool-text"]).stdout.rstrip().endswith("spool-text")
    refused = CliRunner().invoke(pull, ["no-such-model"])
    assert "no folder 'no-such-model'" in str(refused.exception)


@pytest.fixture
def other() -> Iterator[str]:
    """URL of a server that is not Weft, and knows no key."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = {
                "/v1/models": (401, b'{"error": {"message": "wrong key"}}'),
                "/named/models": (200, b'{"data": [{"id": "listed"}]}'),
                "/named/models/alias": (200, b'{"id": "listed"}'),
                "/named/models/other": (404, b"{}"),
            }.get(self.path, (200, b"<html>"))
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_url_that_is_no_server_of_weft(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for a server on this machine
    for url, said in ((other, "is not a server of Weft"), ("http://[::1", "is not a URL")):
        refused = CliRunner().invoke(ps, ["--url", url])
        assert said in str(refused.exception)
    # A refused key is not a missing model.
    refused = CliRunner().invoke(run, ["spool-text", "hello", "--url", other])
    assert "wrong key" in str(refused.exception)
    refused = CliRunner().invoke(run, ["spool-text", "hello", "--url", "http://127.0.0.1:9"])
    assert "does not have the model" not in str(refused.exception)
    client = ChatClient(f"{other}/named")
    assert [client.has(name) for name in ("listed", "alias", "other")] == [True, True, False]
    client.close()


@pytest.mark.slow
def test_the_loaded_models_of_a_server(server: Running) -> None:
    shown = weft("ps", "--url", server.url)
    assert server.model in shown.stdout
    assert "2048" in shown.stdout
    gone = weft("ps", "--url", "http://127.0.0.1:9")
    assert gone.returncode == 2
    assert "does not answer" in gone.stderr


@pytest.mark.slow
def test_a_prompt_goes_to_the_server_that_has_the_model(server: Running) -> None:
    ran = weft("run", server.model, "What", "is", "7", "times", "8?", "--url", server.url)
    assert ran.returncode == 0, ran.stderr
    assert "56" in ran.stdout
    other = weft("run", "other-model", "hello", "--url", server.url)
    assert other.returncode == 2
    assert "does not have the model" in other.stderr


@pytest.mark.slow
def test_without_a_server_the_command_starts_one() -> None:
    ran = weft("run", "spool-text", "What is 7 times 8?")
    assert "56" in ran.stdout, ran.stderr
