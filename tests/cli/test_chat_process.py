"""``weft chat`` as a process, in a pipe and on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from weft.common import env

ENTRIES: list[dict[str, Any]] = [
    {"match": {"contains": ["be brief", "hello"]}, "text": "Hi.", "repeat": True},
    {"match": "long", "text": "word " * 2000, "delay_ms": 20, "repeat": True},
    {"match": "fail", "text": "half", "finish": "error", "repeat": True},
    {"match": "two\nlines", "text": "Both lines came.", "repeat": True},
    {"match": "hello", "text": "It is **so**:\n\n* one\n* two\n", "repeat": True},
    {"match": "shorten", "text": "cut", "finish": "length", "repeat": True},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    servers = Servers()
    with servers.scope():
        yield servers.scripted(tmp_path_factory.mktemp("script"), ENTRIES)


def piped(lines: str, *arguments: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``weft chat`` with ``lines`` on its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "weft", "chat", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        timeout=deadline(60),
        env=env.child_environment(**variables),
        check=False,
    )


def test_a_pipe_gets_replies_and_nothing_else(server: Running) -> None:
    ended = piped('hello\n"""two\nlines"""\n', server.url)
    assert ended.stdout == "It is **so**:\n\n* one\n* two\n\nBoth lines came.\n"
    assert (ended.stderr, ended.returncode) == ("", 0)


def test_commands_in_a_pipe(server: Running, tmp_path: Path) -> None:
    lines = ["/system be brief", "hello", f"/save {tmp_path}/a.json", "/reset", "/system -", "hello", "/nope"]
    lines += ["/model", "/quit", "hello"]
    ended = piped("\n".join(lines), "--url", server.url)
    assert ended.stdout.startswith("Hi.\nIt is **so**")
    assert ended.stdout.count("It is") == 1
    for words in ("system message: be brief", "a new conversation", "no command /nope", "* spool-text"):
        assert words in ended.stderr
    saved = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert [one["role"] for one in saved] == ["system", "user", "assistant"]
    assert (tmp_path / "a.json").stat().st_mode & 0o077 == 0


def test_server_errors_are_shown_and_the_message_is_removed(server: Running) -> None:
    ended = piped("fail\nunknown\nhello\n", server.url)
    assert re.match(r"h(alf|al|a)?\nIt is", ended.stdout)
    assert "the reply broke off: the script ends this output with an error" in ended.stderr
    assert "refused the request with 400: no entry of the script is left" in ended.stderr
    assert ended.returncode == 0
    assert piped("unknown\n", server.url).returncode == 1
    assert "--max-tokens or the end of the context" in piped("shorten\n", server.url).stderr
    refused = piped("hello\n", server.url, "--temperature", "-3")
    assert "400" in refused.stderr
    assert "temperature" in refused.stderr


def test_a_refused_connection_is_an_error_with_advice() -> None:
    ended = piped("hello\n", "127.0.0.1:9")
    assert ended.returncode == 2
    assert (
        "nothing listens at http://127.0.0.1:9/v1 (connection refused): is the server running?"
        in ended.stderr
    )
    ended = piped("hello\n", "http://256.1.1.1:9")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1


def test_the_cause_of_a_missing_connection_is_named(server: Running) -> None:
    unknown = piped("hello\n", "http://no-such-host.invalid")
    assert "the host name 'no-such-host.invalid' is unknown (DNS)" in unknown.stderr
    plain = piped("hello\n", server.url.replace("http://", "https://"))
    assert "a server without TLS needs http://" in plain.stderr
    for ended in (unknown, plain):
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert "nothing listens" not in ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key -out cert"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as plain:
        serving = threading.Thread(target=_shake_hands, args=(context, plain), daemon=True)
        serving.start()
        ended = piped("hello\n", f"https://127.0.0.1:{plain.getsockname()[1]}")
        serving.join(deadline(10))
    assert "127.0.0.1 has a TLS certificate that is not trusted: self" in ended.stderr
    assert ended.returncode == 2


def _shake_hands(context: ssl.SSLContext, listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        context.wrap_socket(connection, server_side=True)


def test_keys(tmp_path: Path) -> None:
    servers = Servers()
    with servers.scope():
        url = servers.scripted(tmp_path, [{"text": "In.", "repeat": True}], "--api-key", "secret,other").url
        ended = piped("hello\n", url)
        assert ended.returncode == 2
        assert "requires an API key" in ended.stderr
        assert "WEFT_CHAT_API_KEY" in ended.stderr
        assert piped("hello\n", url, "--api-key", "secret").stdout == "In.\n"
        assert piped("hello\n", url, WEFT_CHAT_API_KEY="other").stdout == "In.\n"
        assert piped("hello\n", url, WEFT_API_KEY="secret,third").stdout == "In.\n"


@pytest.mark.slow
def test_a_server_of_its_own_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "s.jsonl"
    script.write_text('{"text": "From my own.", "repeat": true}\n')
    ended = piped("hello\n", "spool-text", "--", "--scripted", str(script), WEFT_API_KEY=None)
    assert ended.stdout == "From my own.\n"
    assert ended.returncode == 0
    assert "starting a server for spool-text" in ended.stderr
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(script) not in listed
    ended = piped("hello\n", "spool-text", "--", "--scripted", str(tmp_path / "none"))
    assert ended.returncode == 2
    assert ": No such file; give the path of a script" in ended.stderr
    assert "the server did not start" in ended.stderr


class Terminal:
    """``weft chat`` on a pseudo terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str) -> None:
        self.screen = ""
        pid, self._fd = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execv(sys.executable, [sys.executable, "-m", "weft", "chat", *arguments])
        self.pid = pid
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait(self, pattern: str, seconds: float = 20.0) -> None:
        """Read until ``pattern`` occurs in the output since the last call, without escape sequences."""
        until = time.monotonic() + deadline(seconds)
        start = len(self.screen)
        while not re.search(pattern, plain(self.screen[start:])):
            assert time.monotonic() < until, f"{pattern!r} did not come:\n{plain(self.screen[start:])}"
            self._read(0.1)

    def _read(self, seconds: float) -> bool:
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                return False
            self.screen += data.decode("utf-8", "replace")
            if b"\x1b[6n" in data:  # where is the cursor?
                self.type("\x1b[1;1R")
            return bool(data)
        return True

    def end(self) -> int:
        """The exit status."""
        until = time.monotonic() + deadline(20)
        while time.monotonic() < until:
            self._read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("it did not end")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


def plain(text: str) -> str:
    """Without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


@pytest.fixture
def terminal(server: Running, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(server.url, "--history-file", str(tmp_path / "state" / "history"))
    made.wait("/help shows commands[^>]*>")  # the program now accepts keys
    yield made
    made.close()


def test_markdown_is_shown_and_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.type("hello\r")
    terminal.wait(r"• two[\s\S]*tokens, [^>]*>")
    assert "\x1b[1mso\x1b[0m" in terminal.screen
    assert "Solves arithmetic word problems" in plain(terminal.screen), "abilities of the bundled model"
    terminal.type("\x04")
    assert terminal.end() == 0


@pytest.mark.slow
def test_alt_enter_and_quotes_make_several_lines(terminal: Terminal) -> None:
    for keys in ("two\x1b\rlines\r", '"""two\rlines\r"""\r'):
        terminal.type(keys)
        terminal.wait(r"Both lines came\.[\s\S]*tokens, [^>]*>")


def test_ctrl_c_stops_a_reply_and_cancels_its_request(terminal: Terminal, server: Running) -> None:
    terminal.type("a long story\r")
    terminal.wait("word word")
    server.wait(lambda: server.metric("num_requests_running") == 1)
    terminal.type("\x03")
    terminal.wait(r"\(stopped\)[^>]*>")
    server.wait(lambda: server.metric("num_requests_running") == 0)
    terminal.type("\x03")
    terminal.wait("Ctrl-D leaves[^>]*>")
    terminal.type("and hello\r")  # the conversation goes on
    terminal.wait("word")
    terminal.type("\x03")
    terminal.wait(r"\(stopped\)[^>]*>")
    terminal.type("/quit\r")
    assert terminal.end() == 0


@pytest.mark.slow
def test_inputs_are_kept_over_sessions(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    for keys in ("hello\r", "\x1b[A\r"):  # the second one goes up to the first one's input
        made = Terminal(server.url, "--history-file", str(file))
        made.wait("/help shows commands[^>]*>")
        made.type(keys)
        made.wait(r"• two[\s\S]*tokens, [^>]*>")
        made.type("\x04")
        assert made.end() == 0
        made.close()
    assert file.stat().st_mode & 0o077 == 0
    assert file.read_text().count("+hello") >= 1
