"""A small server with the interface of S3, for tests: PUT, ranged GET, removals and lists, and faults.

Objects are in memory. The server checks no signature.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_PAGE = 5  # names in one page of a list: lists of several pages are common in tests


class S3Server:
    """One bucket, at ``url``."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.stalls = threading.Event()
        """Set: requests get no answer."""
        self.uploads_stall = threading.Event()
        """Set: uploads get no answer."""
        self.denied = set[str]()
        """Objects that may not be read."""
        self.broken = False
        """True: every answer is an error."""
        self.fails_after_put = False
        """True: after the next upload every answer is an error."""
        self.dead = False
        """True: connections end without an answer."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return

            def handle_one(self) -> None:
                server._answer(self)

            do_GET = do_PUT = do_POST = handle_one

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.stalls.clear()
        self.uploads_stall.clear()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        parts, body = urlsplit(request.path), b""
        length = int(request.headers.get("content-length", 0))
        body = request.rfile.read(length)
        if self.dead:
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        while self.stalls.is_set() or (request.command == "PUT" and self.uploads_stall.is_set()):
            time.sleep(0.01)
        key = unquote(parts.path).split("/", 2)[2] if parts.path.count("/") > 1 else ""
        status, data, headers = self._carry_out(request, key, parse_qs(parts.query), body)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _carry_out(
        self, request: BaseHTTPRequestHandler, key: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        facts = {"etag": '"1"', "last-modified": "Sat, 01 Aug 2026 00:00:00 GMT"}
        if self.broken:
            return 500, b"", {}
        if request.command == "PUT":
            self.objects[key] = body
            self.broken = self.fails_after_put
            return 200, b"", facts
        if request.command == "POST":  # a removal of several objects
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for name in names:
                self.objects.pop(unescape(name), None)
            rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return 200, f"<DeleteResult>{rows}</DeleteResult>".encode(), {}
        if not key:
            return 200, self._list(query), {"content-type": "application/xml"}
        data = self.objects.get(key)
        if key in self.denied:
            return 403, b"", {}
        if data is None:
            return 404, b"", {}
        begin, _, end = request.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        last = min(int(end or len(data)), len(data) - 1)
        facts["content-range"] = f"bytes {begin}-{last}/{len(data)}"
        return 206, data[int(begin) : last + 1], facts

    def _list(self, query: dict[str, list[str]]) -> bytes:
        after = max(query.get("start-after", [""])[0], query.get("continuation-token", [""])[0])
        names = sorted(n for n in self.objects if n.startswith(query.get("prefix", [""])[0]) and n > after)
        rows = "".join(
            f"<Contents><Key>{escape(n)}</Key><Size>{len(self.objects[n])}</Size><ETag>1</ETag>"
            "<LastModified>2026-08-01T00:00:00.000Z</LastModified></Contents>"
            for n in names[:_PAGE]
        )
        more = len(names) > _PAGE
        token = f"<NextContinuationToken>{escape(names[_PAGE - 1])}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        ).encode()


@contextmanager
def s3_server(monkeypatch: Any) -> Iterator[S3Server]:
    """Yield a server; ``s3://bucket/..`` leads to the server meanwhile."""
    server = S3Server()
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    try:
        yield server
    finally:
        server.close()
