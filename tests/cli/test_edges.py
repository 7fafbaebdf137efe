"""Commands at the edges of a machine: odd servers, keys, URLs, files, folders and standard streams."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.slow import mostly_slow
from weft.cli.chat.chat_client import ChatClient, ChatError
from weft.cli.generate import _read_prompt
from weft.cli.main import main
from weft.cli.result_file import check_result_file, write_json
from weft.common.client_tls import client_options
from weft.common.errors import ConfigError
from weft.front.front_server import bind, print_ready

ANSWERS = {
    "/v1/models": b'{"data": []}',
    "/text/v1/models": b"welcome",
    "/list/v1/models": b"[1]",
    "/text/admin/groups": b"[1]",
    "/list/admin/groups": b'{"error": "not found"}',
    "/odd/v1/models": b'{"data": [{"id": "odd"}]}',
    "/odd/v1/chat/completions": b'{"choices": []}',
}


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """Return the URL of a server that is not Weft."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path == "/list/admin/groups" else 200)
            self.end_headers()
            self.wfile.write(ANSWERS[self.path])

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def failed(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Run a command that fails, and return the error: one line."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("weft: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[Any]]:
    """Return the commands that talk to a server, without the URL and the key."""
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    return {
        "batch": ["batch", "run", source, tmp_path / "out.jsonl", "--url"],
        "eval": ["eval", "gsm-mini", "--limit", 1, "--url"],
        "tools": ["eval", "tools-mini", "--limit", 1, "--url"],
        "ps": ["ps", "--url"],
        "chat": ["chat", "--url"],
        "status": ["status", "--url"],
        "bench": ["bench", "serve", "--num-requests", 1, "--base-url"],
    }


KEYS = {"status": "--admin-key", "bench": "--key"}


@mostly_slow("name", ["batch", "chat", "eval", "tools", "ps", "status", "bench"], 2)
def test_keys_and_urls_that_cannot_be_sent(
    name: str, commands: dict[str, list[Any]], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = KEYS.get(name, "--api-key")
    assert "printable ASCII" in failed(capsys, *commands[name], other, key, "schlüssel")
    for url in ("http://[::1", "http://a:99999"):
        assert "is not a URL" in failed(capsys, *commands[name], url, key, "k")


@mostly_slow(
    ("name", "path", "said"),
    [
        ("batch", "", "lists no model"),
        ("eval", "/odd", "no chat completion"),
        ("status", "/text", "not a server of Weft"),
        ("batch", "/text", "not OpenAI-compatible"),
        ("batch", "/list", "not OpenAI-compatible"),
        ("eval", "", "lists no model"),
        ("eval", "/list", "lists no model"),
        ("tools", "/odd", "no chat completion"),
        ("status", "/list", "not found"),
    ],
    3,
)
def test_servers_of_another_kind(
    name: str,
    path: str,
    said: str,
    commands: dict[str, list[Any]],
    other: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):  # not for a server on this machine
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert said in failed(capsys, *commands[name], other + path, KEYS.get(name, "--api-key"), "k")


def test_a_proxy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "socks9://127.0.0.1:9")
    assert client_options("http://127.0.0.1:8000")["trust_env"] is False
    with pytest.raises(ConfigError, match=r"proxy of the environment cannot be used.*socks9"):
        client_options("http://example.org")


def test_result_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_result_file(None)
    check_result_file(str(tmp_path / "new.json"))
    assert not (tmp_path / "new.json").exists()
    for wrong in (tmp_path, tmp_path / "none" / "x"):
        with pytest.raises(ConfigError, match="--plot must name a file in an existing folder"):
            check_result_file(str(wrong), "--plot")
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    with pytest.raises(ConfigError, match="no write permission"):
        check_result_file(str(tmp_path / "new.json"))
    with pytest.raises(ConfigError, match="--json /dev/full cannot be written: No space left"):
        write_json("/dev/full", {"a": 1})


def test_the_ready_line_without_a_reader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``weft serve | grep -q ready`` and ``weft serve > /full/disk`` serve on."""
    readable, writable = os.pipe()
    os.close(readable)
    with open(writable, "w") as pipe, open("/dev/full", "w") as full:
        for stream, why in ((pipe, "Broken pipe"), (full, "No space left")):
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr("weft.front.front_server.log.propagate", True)
            print_ready("weft is ready\n")
            assert why in caplog.text
            stream.flush()  # as at the exit of the process: nothing fails again


def test_closed_streams() -> None:
    """No file of the process gets the number of a closed standard stream."""
    code = (
        "import os, subprocess, sys; from weft.cli.main import open_closed_streams as f; f(); f();"
        "assert sys.stdin.read() == ''; print('lost'); "
        "made = os.open('/dev/null', os.O_RDONLY); child = subprocess.run(['true']); "
        "sys.exit(made if made > 2 and child.returncode == 0 else 0)"
    )
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], check=False
    )
    assert ran.returncode > 2


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as Python in the C locale
def test_standard_input_that_is_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errors: str) -> None:
    (tmp_path / "bytes").write_bytes(b"caf\xe9")
    with open(tmp_path / "bytes", encoding="utf-8", errors=errors) as source:
        monkeypatch.setattr(sys, "stdin", source)
        with pytest.raises(ConfigError, match="standard input is not UTF-8"):
            _read_prompt(None, asked=True)


def test_a_prompt_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the PROMPT is not UTF-8 text" in failed(capsys, "generate", "spool-text", "a", "caf\udce9")


def test_a_failure_of_the_machine_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        (tmp_path / "none" / "file").read_bytes()

    monkeypatch.setattr("weft.cli.main.cli.main", fail)
    assert "none/file: No such file or directory" in failed(capsys)

    for fault in (TimeoutError(110, "a fault of the program"), PermissionError(1, "not of a file")):

        def faulty(*_: object, fault: OSError = fault, **__: object) -> None:
            raise fault

        monkeypatch.setattr("weft.cli.main.cli.main", faulty)
        with pytest.raises(type(fault)):
            main([])


def test_names_of_hosts() -> None:
    with contextlib.closing(bind("[::1]", 0)) as listener:
        assert listener.getsockname()[0] == "::1"
    for host in ("x" * 64, "a..b"):
        with pytest.raises(ConfigError, match="is no host name"):
            bind(host, 0)


def test_a_message_of_bytes(other: str) -> None:
    client = ChatClient(other)
    with contextlib.closing(client), pytest.raises(ChatError, match="no UTF-8 text"):
        list(client.stream({"messages": [{"role": "user", "content": "caf\udce9"}]}))
