"""The parser of multipart bodies: any division into pieces, and bodies of another form."""

from __future__ import annotations

import random

import httpx
import pytest

from weft.common.errors import InvalidRequest, UnsupportedMedia
from weft.front.batches.multipart import MultipartParser, PartBegin, PartData, boundary_of


def parsed(boundary: bytes, pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    parser, parts = MultipartParser(boundary), []
    for piece in pieces:
        for part in parser.feed(piece):
            if isinstance(part, PartBegin):
                parts.append((part.name, part.file, b""))
            elif isinstance(part, PartData):
                name, file, data = parts[-1]
                parts[-1] = (name, file, data + part.data)
    parser.finish()
    return parts


def test_any_division_gives_the_same_parts() -> None:
    data = b"a\r\n--b\r\n\r\n-" * 30 + b"\r\n"
    request = httpx.Request(
        "POST", "http://x/", data={"purpose": "batch", "none": ""}, files={"file": ('a "b".jsonl', data)}
    )
    body, boundary = request.read(), boundary_of(request.headers["content-type"])
    whole = [("purpose", None, b"batch"), ("none", None, b""), ("file", 'a "b".jsonl', data)]
    found = parsed(boundary, [body])
    assert [(name, value) for name, _, value in found] == [(name, value) for name, _, value in whole]
    rng = random.Random(0)
    for _ in range(200):
        cuts = sorted(rng.sample(range(len(body) + 1), 6))
        assert parsed(boundary, [body[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == found
    assert parsed(boundary, [bytes([byte]) for byte in body]) == found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n",
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\nx',
        b"--b\r\nx: y\r\n\r\nx\r\n--b--",
        b"--bX\r\n",
        b"--b\r\n" + b"x" * 9000,
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 20 + b"--b--",
    ],
)
def test_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="multipart"):
        parsed(b"b", [body])


@pytest.mark.parametrize(
    "given", ["application/json", "multipart/form-data", "", "multipart/mixed; boundary=x"]
)
def test_another_type_is_refused(given: str) -> None:
    with pytest.raises(UnsupportedMedia):
        boundary_of(given)
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
