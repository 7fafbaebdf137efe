"""Fetching over real sockets: allowed addresses, time limits and size limits."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft.media import fetch as fetching
from weft.media.fetch import Fetcher
from weft.media.media_errors import BadMedia

Answer = Callable[[socket.socket, str], None]


class Server:
    """A server on loopback. ``answer`` gets the connection and the requested path."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[str] = []
        self.connections = 0
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._handle, args=(link,), daemon=True).start()

    def _handle(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += link.recv(65536) or b"\r\n\r\n"
            self.asked.append(data.decode())
            self._answer(link, data.split()[1].decode())

    def url(self, path: str = "/a.png", host: str = "images.test") -> str:
        return f"http://{host}:{self.port}{path}"

    def close(self) -> None:
        self._socket.close()


def whole(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Server]]:
    """Starts servers; every name ends in ``.test`` is loopback's, as a resolver may well say."""
    servers: list[Server] = []
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if str(host).endswith(".test") else host, port, *rest, **more)

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield start
    for server in servers:
        server.close()


def fetcher(server: Server, seconds: float = 10, most: int = 1 << 20, *, permits: Any = None) -> Fetcher:
    allowed = (f"*:{server.port}", "*")
    return Fetcher(allowed, most, seconds, permits=permits or (lambda address: address == "127.0.0.1"))


def test_a_file_comes(serve: Any) -> None:
    body = bytes(range(256)) * 2000
    server = serve(lambda link, path: link.sendall(whole(body)))
    assert fetcher(server).fetch(server.url("/x?y=1#z")) == body
    (asked,) = server.asked
    assert asked.startswith("GET /x?y=1 HTTP/1.1\r\n")
    assert f"Host: images.test:{server.port}\r\n" in asked
    assert "uthorization" not in asked
    assert "ookie" not in asked


def test_chunks_and_an_end_by_closing(serve: Any) -> None:
    def answer(link: socket.socket, path: str) -> None:
        if path == "/chunks":
            link.sendall(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            )
        else:
            link.sendall(b"HTTP/1.0 200 OK\r\n\r\nabcde")

    server = serve(answer)
    assert fetcher(server).fetch(server.url("/chunks")) == b"abcde"
    assert fetcher(server).fetch(server.url("/close")) == b"abcde"


@pytest.mark.requirement("F21")
def test_no_connection_is_made_to_an_address_that_is_not_public(serve: Any) -> None:
    server = serve(lambda link, path: link.sendall(whole(b"secret")))
    for host in ("images.test", "127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"):
        with pytest.raises(BadMedia) as caught:
            Fetcher((f"*:{server.port}",), 1 << 20, 5).fetch(server.url(host=host))
        assert caught.value.code == "image_url_refused"
        assert "public" in caught.value.reason
        assert "127" not in caught.value.reason
    time.sleep(0.1)
    assert server.connections == 0


@pytest.mark.requirement("F21")
def test_one_address_that_is_not_public_among_several_is_enough(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda link, path: link.sendall(whole(b"x")))
    two = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, server.port)) for host in ("8.8.8.8", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: two)
    with pytest.raises(BadMedia, match="public"):
        Fetcher((f"*:{server.port}",), 1 << 20, 5).fetch(server.url())
    assert server.connections == 0


@pytest.mark.requirement("F21")
def test_a_name_that_changes_its_address_changes_nothing(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is public at the check and private at the connection; the fetch uses the checked address."""
    server = serve(lambda link, path: link.sendall(whole(b"good")))
    other = serve(lambda link, path: link.sendall(whole(b"secret")))
    looked_up: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        looked_up.append(host)
        return real("127.0.0.1", server.port if len(looked_up) == 1 else other.port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert fetcher(server).fetch(server.url()) == b"good"
    assert looked_up == ["images.test"]
    assert other.connections == 0


@pytest.mark.requirement("F21")
def test_redirects_are_followed_and_bounded(serve: Any) -> None:
    def answer(link: socket.socket, path: str) -> None:
        left = int(path[1:])
        link.sendall(whole(b"", "302 Found", f"Location: /{left - 1}") if left else whole(b"here"))

    server = serve(answer)
    assert fetcher(server).fetch(server.url("/3")) == b"here"
    with pytest.raises(BadMedia, match="3 redirects"):
        fetcher(server).fetch(server.url("/4"))


@pytest.mark.requirement("F21")
@pytest.mark.parametrize(
    "location",
    [
        "http://private.test:{port}/x",
        "http://127.0.0.2:{port}/x",
        "http://2130706433:{port}/",
        "http://a@images.test:{port}/",
        "http://images.test:{port}\\@127.0.0.2/",
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data/",
    ],
)
def test_a_redirect_to_elsewhere_is_refused(
    serve: Any, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = serve(lambda link, path: link.sendall(whole(b"secret")))
    place = location.format(port=target.port)
    server = serve(lambda link, path: link.sendall(whole(b"", "302 Found", f"Location: {place}")))
    real = socket.getaddrinfo
    private = {"private.test": "127.0.0.3"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: real(private.get(host, host), *rest, **more)
    )
    allowed = (f"*:{server.port}", f"*:{target.port}", "*")
    one = Fetcher(allowed, 1 << 20, 5, permits=lambda address: address == "127.0.0.1")
    with pytest.raises(BadMedia) as caught:
        one.fetch(server.url())
    assert caught.value.code == "image_url_refused"
    assert server.connections == 1
    assert target.connections == 0


@pytest.mark.requirement("F23")
def test_a_slow_server_has_a_deadline_for_all_of_it(serve: Any) -> None:
    def drip(link: socket.socket, path: str) -> None:
        data = {"/head": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10_000, "/body": whole(b"z" * 10_000)}
        for byte in data.get(path, b""):
            link.sendall(bytes([byte]))
            time.sleep(0.05)
        time.sleep(30)

    server = serve(drip)
    for path in ("/silent", "/head", "/body"):
        began = time.monotonic()
        with pytest.raises(BadMedia, match="longer than") as caught:
            fetcher(server, seconds=0.5).fetch(server.url(path))
        assert caught.value.code == "image_fetch_failed"
        assert time.monotonic() - began < deadline(3)


@pytest.mark.requirement("F23")
def test_too_many_bytes_are_not_read(serve: Any) -> None:
    sent = 0

    def answer(link: socket.socket, path: str) -> None:
        nonlocal sent
        if path == "/said":
            link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n")
            return
        link.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sent += link.send(bytes(65536))

    server = serve(answer)
    for path in ("/said", "/endless"):
        with pytest.raises(BadMedia, match="more than 1048576 bytes"):
            fetcher(server).fetch(server.url(path))
    assert sent < 32 << 20


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 302 Found\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\nabc",
        b"220 smtp.test ready\r\n",
    ],
)
def test_answers_that_are_no_file(serve: Any, answer: bytes) -> None:
    server = serve(lambda link, path: link.sendall(answer))
    with pytest.raises(BadMedia) as caught:
        fetcher(server, seconds=5).fetch(server.url())
    assert caught.value.code == "image_fetch_failed"
    assert "abc" not in caught.value.reason


@pytest.mark.requirement("F21")
def test_proxies_of_the_environment_are_not_used(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = serve(lambda link, path: link.sendall(whole(b"from a proxy")))
    server = serve(lambda link, path: link.sendall(whole(b"itself")))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    assert fetcher(server).fetch(server.url()) == b"itself"
    assert proxy.connections == 0


def test_nobody_listens(serve: Any) -> None:
    server = serve(lambda link, path: None)
    server.close()
    time.sleep(0.05)
    with pytest.raises(BadMedia, match="could not be fetched"):
        fetcher(server).fetch(server.url())
    assert fetching.MAX_REDIRECTS == 3


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the key and the certificate of images.test."""
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "both.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=images.test",
    ]
    command += ["-addext", "subjectAltName=DNS:images.test", "-keyout", str(key), "-out", str(made)]
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    subprocess.run(command, check=True, capture_output=True)
    made.write_text(made.read_text() + key.read_text())
    return str(made)


@pytest.mark.requirement("F21")
def test_https_goes_to_the_checked_address_and_asks_for_the_name(
    serve: Any, certificate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate)

    def answer(link: socket.socket, path: str) -> None:
        link.sendall(whole(b"secret"))

    server = serve(answer)
    handle = server._handle
    monkeypatch.setattr(server, "_handle", lambda link: handle(_secured(ours, link)))
    trusting = ssl.create_default_context(cafile=certificate)
    one = Fetcher((f"*:{server.port}",), 1 << 20, 10, permits=lambda address: True, secure=trusting)
    assert one.fetch(f"https://images.test:{server.port}/a") == b"secret"
    for host, context in (("other.test", trusting), ("images.test", None)):
        strict = Fetcher((f"*:{server.port}",), 1 << 20, 10, permits=lambda address: True, secure=context)
        with pytest.raises(BadMedia, match="could not be fetched"):
            strict.fetch(f"https://{host}:{server.port}/a")
    assert len(server.asked) == 1


def _secured(context: ssl.SSLContext, link: socket.socket) -> socket.socket:
    with contextlib.suppress(OSError):
        return context.wrap_socket(link, server_side=True)
    return link
