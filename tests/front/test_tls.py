"""HTTPS of the API server: certificates of the server and of clients, new files, and wrong files."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.certificates import HAVE_OPENSSL, Authority, Pair
from tests.support.servers import Servers, events
from tests.support.slowness import deadline
from weft.cli.main import main
from weft.common.client_tls import verification
from weft.common.errors import ConfigError
from weft.config.sections.front_section import FrontSection
from weft.config.sections.tls import server_context
from weft.front.http import tls

pytestmark = pytest.mark.skipif(not HAVE_OPENSSL, reason="needs the openssl command")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


def flags(pair: Pair, **more: Any) -> dict[str, Any]:
    return {"ssl_certfile": str(pair.certificate), "ssl_keyfile": str(pair.key), **more}


def trusting(authority: Authority, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if own is not None:
        context.load_cert_chain(*own)
    return context


def serial(url: str, authority: Authority) -> str:
    """Return the serial number of the certificate in a new handshake."""
    where = httpx.URL(url)
    context = trusting(authority)
    with (
        socket.create_connection((where.host, where.port or 0), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=where.host) as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


def test_clients_with_the_authority_are_served(start_fake: Any, authority: Authority, pair: Pair) -> None:
    server = start_fake(**flags(pair))
    assert server.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=server.url, verify=trusting(authority), timeout=30) as client:
        body = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            assert events(answer)[-1] == "[DONE]"
        assert client.get("/ready").status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{server.url}/ready", verify=ssl.create_default_context())
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/ready")
    assert server.http.get("/ready").status_code == 200, "the refused clients end nothing"


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_no_answer(start_fake: Any, pair: Pair) -> None:
    """The end of the server does not wait for a client that never ends its TLS connection."""
    server = start_fake(**flags(pair))
    where = httpx.URL(server.url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((where.host, where.port or 0)) as plain,
        context.wrap_socket(plain) as secure,
    ):
        secure.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert secure.recv(12) == b"HTTP/1.1 200"
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < deadline(15)


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_paused_and_cut_off(start_fake: Any, pair: Pair) -> None:
    """The limits of unread answers count the encrypted bytes, too."""
    server = start_fake(**flags(pair), constants={"weft.front.connection.UNREAD_SECONDS": deadline(1.0)})
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    fields = {"model": server.model, "prompt": "x", "max_tokens": 490, "logprobs": 20, "n": 4, "stream": True}
    body = json.dumps(fields).encode()
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(deadline(60))
    plain.connect(("127.0.0.1", httpx.URL(server.url).port))
    with context.wrap_socket(plain) as secure:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        secure.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.wait(lambda: server.metric("streams_paused_total") >= 1, 20)
        server.wait(lambda: server.metric("front_sequences") == 0, 20)


def test_new_files_are_used_by_new_connections(
    start_fake: Any, tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    live = Pair(tmp_path / "live.pem", tmp_path / "live.key")

    def put(new: Pair) -> None:
        """Replace both files, as a renewal does."""
        for source, place in zip(new, live, strict=True):
            fresh = place.with_suffix(".new")
            shutil.copy(source, fresh)
            os.replace(fresh, place)

    put(pair)
    server = start_fake(**flags(live))
    before = serial(server.url, authority)
    with httpx.Client(base_url=server.url, verify=trusting(authority), timeout=30) as kept:
        assert kept.get("/live").status_code == 200
        other = authority.issue("renewed")
        shutil.copy(other.certificate, live.certificate)  # for a moment the files do not fit together
        assert serial(server.url, authority) == before
        put(other)
        after = serial(server.url, authority)
        assert after != before
        assert kept.get("/live").status_code == 200, "an open connection stays open"
    live.key.unlink()
    assert serial(server.url, authority) == after
    put(pair)
    assert serial(server.url, authority) == before


@pytest.mark.parametrize("required", [1, 2])
def test_certificates_of_clients(
    start_fake: Any, tmp_path: Path, authority: Authority, pair: Pair, required: int
) -> None:
    clients, strangers = Authority(tmp_path / "clients"), Authority(tmp_path / "strangers")
    known, stranger = clients.issue("known"), strangers.issue("stranger")
    # The test's own client is not known yet, so readiness is seen from the printed line alone.
    server = start_fake(**flags(pair, ssl_ca_certs=str(clients.certificate), ssl_cert_reqs=required))

    def status(own: Pair | None) -> int | None:
        try:
            return httpx.get(f"{server.url}/ready", verify=trusting(authority, own)).status_code
        except httpx.TransportError:
            return None

    assert status(known) == 200
    assert status(stranger) is None
    assert status(None) == (200 if required == 1 else None)


def test_a_withdrawn_authority_is_not_trusted_through_a_kept_session(
    start_fake: Any, tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    """A client may keep a session of TLS 1.3. The next connection checks the certificate again."""
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(first.certificate, trusted)
    server = start_fake(**flags(pair, ssl_ca_certs=str(trusted), ssl_cert_reqs=2))
    context, port = trusting(authority, first.issue("client")), httpx.URL(server.url).port or 0

    def ask(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure,
        ):
            secure.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return secure.recv(12), secure.session

    answer, session = ask(None)
    assert answer == b"HTTP/1.1 200"
    assert session is not None
    assert not session.has_ticket
    shutil.copy(second.certificate, trusted)
    with contextlib.suppress(OSError):  # the end of the connection comes as an error, or as an empty answer
        answer, _ = ask(session)
        assert answer == b""
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError, match=r"."):  # the text depends on who closes first
        ask(None)


@pytest.mark.slow
def test_several_api_servers(servers: Servers, tmp_path: Path, authority: Authority, pair: Pair) -> None:
    script = [{"match": "hello", "text": "Hi.", "repeat": True}]
    pems = ["--ssl-certfile", str(pair.certificate), "--ssl-keyfile", str(pair.key)]
    server = servers.scripted(tmp_path, script, "--fronts", "2", *pems)
    assert server.url.startswith("https://")
    for _ in range(4):  # connections reach both
        assert httpx.get(f"{server.url}/ready", verify=trusting(authority)).status_code == 200
    with httpx.Client(base_url=server.url, verify=trusting(authority), timeout=30) as client:
        assert 'front="1"' in client.get("/metrics").text


def run(monkeypatch: pytest.MonkeyPatch, authority: Authority, *words: str) -> object:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


def test_commands_of_the_operator(
    start_fake: Any, tmp_path: Path, authority: Authority, pair: Pair, monkeypatch: Any, capsys: Any
) -> None:
    own = authority.issue("operator")
    both = tmp_path / "operator.pem"
    both.write_bytes(own.certificate.read_bytes() + own.key.read_bytes())
    mutual = {"ssl_ca_certs": str(authority.certificate), "ssl_cert_reqs": 2}
    server = start_fake(**flags(pair, **mutual), admin_key=["root"])
    to = ("status", "--url", server.url, "--admin-key", "root")
    assert run(monkeypatch, authority, *to, "--client-cert", str(both)) == 0
    assert "running" in capsys.readouterr().out
    assert run(monkeypatch, authority, *to) == 1
    assert "no Weft server answers" in capsys.readouterr().err
    assert run(monkeypatch, authority, *to, "--client-cert", str(own.certificate)) == 2
    assert "--client-cert" in capsys.readouterr().err
    assert run(monkeypatch, authority, *to, "--client-cert", str(tmp_path / "none")) == 2
    assert "No such file" in capsys.readouterr().err


def test_chat_trusts_the_named_authority(
    start_fake: Any, authority: Authority, pair: Pair, monkeypatch: Any, capsys: Any
) -> None:
    server = start_fake(**flags(pair))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(monkeypatch, authority, "chat", server.url, "--no-history", "--max-tokens", "3") == 0
    assert capsys.readouterr().out.strip()
    stranger = Authority(authority.certificate.parent / "strangers")
    assert run(monkeypatch, stranger, "chat", server.url, "--no-history") == 2
    assert "certificate that is not trusted" in capsys.readouterr().err


def _wrong(folder: Path, authority: Authority, pair: Pair) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (flags, part of the error) of each wrong setting."""
    other, locked = authority.issue("other"), authority.issue("locked", "sesame")
    junk = folder / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    text = folder / "text.txt"
    text.write_text("no PEM")
    none = str(folder / "none.pem")
    ca = str(authority.certificate)
    yield flags(pair, ssl_certfile=none), "--ssl-certfile: .*No such file"
    yield flags(pair, ssl_keyfile=none), "--ssl-keyfile: .*No such file"
    yield flags(pair, ssl_keyfile=None), "--ssl-keyfile is required"
    yield flags(pair, ssl_keyfile=str(other.key)), "--ssl-keyfile: .*does not match"
    yield flags(pair, ssl_certfile=str(pair.key)), "--ssl-certfile: .*no certificate"
    yield flags(pair, ssl_keyfile=ca), "--ssl-keyfile: .*no private key"
    yield flags(pair, ssl_certfile=str(text)), "--ssl-certfile: .*no certificate"
    yield flags(pair, ssl_certfile=str(junk)), "--ssl-certfile"
    yield flags(locked), "is encrypted: give --ssl-keyfile-password"
    yield flags(locked, ssl_keyfile_password="x"), "--ssl-keyfile-password does not"
    yield flags(pair, ssl_ca_certs=none, ssl_cert_reqs=2), "--ssl-ca-certs: .*No such"
    yield flags(pair, ssl_ca_certs=str(junk), ssl_cert_reqs=2), "--ssl-ca-certs"
    yield flags(pair, ssl_ca_certs=ca), "--ssl-cert-reqs"
    yield flags(pair, ssl_cert_reqs=2), "requires --ssl-ca-certs"
    yield flags(pair, ssl_certfile=None), "--ssl-keyfile requires --ssl-certfile"
    yield {"ssl_cert_reqs": 2}, "--ssl-cert-reqs requires --ssl-certfile"


def test_errors_name_the_flag(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    for given, message in _wrong(tmp_path, authority, pair):
        with pytest.raises(ConfigError, match=message):
            server_context(FrontSection(**given))


def test_good_files(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    locked = authority.issue("locked", "sesame")
    both = tmp_path / "both.pem"
    both.write_bytes(pair.key.read_bytes() + pair.certificate.read_bytes())
    assert server_context(FrontSection()) is None
    for given in (
        flags(locked, ssl_keyfile_password="sesame"),
        {"ssl_certfile": str(both)},
    ):
        context = server_context(FrontSection(**given))
        assert context is not None
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("name", ["load_cert_chain", "load_verify_locations"])
def test_a_file_that_vanishes_during_the_read(
    authority: Authority, pair: Pair, monkeypatch: Any, caplog: Any, name: str
) -> None:
    """The start ends with an error that names a flag. A handshake keeps the last good files."""
    ca = {"ssl_ca_certs": str(authority.certificate), "ssl_cert_reqs": 1}
    section = FrontSection(**flags(pair, **ca))
    opened = tls.open_tls(section)
    assert opened is not None

    def gone(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ssl.SSLContext, name, gone)
    with pytest.raises(ConfigError, match=r"^--ssl-.*No such file") as failed:
        tls.open_tls(section)
    assert failed.value.param in ("--ssl-certfile", "--ssl-ca-certs")
    opened._reload()
    assert opened._newest is opened.context
    assert "the last good files stay" in caplog.text


def test_a_readable_key_is_reported(authority: Authority, caplog: Any) -> None:
    own = authority.issue("readable")
    own.key.chmod(0o600)
    assert tls.open_tls(FrontSection(**flags(own))) is not None
    assert "chmod" not in caplog.text
    own.key.chmod(0o644)
    assert tls.open_tls(FrontSection(**flags(own))) is not None
    assert f"run `chmod 600 {own.key}`" in caplog.text


def test_an_encrypted_client_key_does_not_ask(tmp_path: Path, authority: Authority) -> None:
    locked, both = authority.issue("locked client", "sesame"), tmp_path / "both.pem"
    both.write_bytes(locked.certificate.read_bytes() + locked.key.read_bytes())
    with pytest.raises(ConfigError, match=r"--client-cert.*the key is encrypted"):
        verification("https://127.0.0.1", str(both))


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_wrong_file_ends_the_start(tmp_path: Path, capsys: Any, command: str) -> None:
    topology = tmp_path / "topology.yaml"
    topology.write_text(
        f"model: spool-text\nfront: {{ssl-certfile: {tmp_path}/none}}\ngroups: [{{count: 1}}]\n"
    )
    words = {
        "serve": ["serve", "spool-text", "--ssl-certfile", str(tmp_path / "none")],
        "up": ["up", str(topology), "--check"],
    }[command]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "--ssl-certfile" in capsys.readouterr().err


def test_a_silent_client_is_closed(authority: Authority, pair: Pair, monkeypatch: Any) -> None:
    """A client that begins no handshake loses its connection."""
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.2)

    async def silent() -> bytes:
        opened = tls.open_tls(FrontSection(**flags(pair)))
        assert opened is not None
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=opened.context)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()
            server.close()

    with asyncio.Runner(loop_factory=tls.ServerLoop) as runner:
        assert runner.run(silent()) == b""


def test_a_server_of_a_topology(servers: Servers, tmp_path: Path, authority: Authority, pair: Pair) -> None:
    topology = tmp_path / "topology.yaml"
    pems = f"{{ssl-certfile: {pair.certificate}, ssl-keyfile: {pair.key}, port: 0}}"
    topology.write_text(f"model: spool-text\nthreads: 1\nfront: {pems}\ngroups: [{{count: 1}}]\n")
    program = "from weft.cli.main import main; main()"
    server = servers.start([sys.executable, "-c", program, "up", str(topology)], 120, HF_HUB_OFFLINE="1")
    assert httpx.get(f"{server.url}/ready", verify=trusting(authority)).status_code == 200
