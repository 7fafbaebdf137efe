"""URLs of images: refusals before any lookup, and the definition of public addresses."""

from __future__ import annotations

import base64
import random

import pytest

from weft.media.addresses import is_public
from weft.media.media_errors import BadMedia
from weft.media.urls import WebAddress, from_base64, inline, is_web, redirected, web_address

ANY = ("*",)


@pytest.mark.requirement("F21")
@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.100.100.200",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "192.0.0.192",
        "192.0.2.1",
        "192.31.196.1",
        "192.52.193.1",
        "192.88.99.1",
        "192.175.48.1",
        "198.51.100.1",
        "198.18.0.1",
        "203.0.113.5",
        "224.0.0.1",
        "255.255.255.255",
        "168.63.129.16",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:a00:1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "2001::7f00:1",
        "2001:db8::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "100::1",
        "localhost",
        "",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.215.14", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.requirement("F21")
@pytest.mark.parametrize(
    "url",
    [
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1./",
        "http://example.org./",
        "http://0/",
        "http://1.2.3.4.5/",
        "http://[::1%25lo]/",
        "http://[::ffff:127.0.0.1/",
        "http://a@127.0.0.1/",
        "http://example.org@127.0.0.1/",
        "http://example.org:80@127.0.0.1/",
        "http://127.0.0.1\\@example.org/",
        "http://example.org\\.evil.test/",
        "http:\\\\example.org/",
        "http:/example.org/",
        "http:///example.org/",
        "http://",
        "http://?x",
        "http://exa mple.org/",
        "http://example.org/a b",
        "http://example.org/\r\nHost: x",
        "http://example.org/\t",
        "http://example.org:0/",
        "http://example.org:99999/",
        "http://example.org:port/",
        "http://example.org:/",
        "http://-a.example.org/",
        "http://a..example.org/",
        "http://ⓔxample.org/",
        "http://127。0。0。1/",
        "http://exam_ple.org/",
        "http://example.org/" + "a" * 9000,
        "http://" + "a." * 200 + "org/",
        "https://example.org:443@evil.test/",
    ],
)
def test_forms_that_are_refused(url: str) -> None:
    with pytest.raises(BadMedia) as caught:
        web_address(url, ANY)
    assert caught.value.code == "image_url_refused"
    assert "evil" not in caught.value.reason


@pytest.mark.requirement("F22")
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "../x.png",
        "ftp://h/x",
        "gopher://h",
        "blob:x",
        "x",
        "",
        "DATA",
        " data:",
    ],
)
def test_nothing_but_data_urls_brings_bytes(url: str) -> None:
    assert not is_web(url)
    with pytest.raises(BadMedia) as caught:
        inline(url, 1 << 20)
    assert caught.value.code == "image_url_refused"


def test_the_parts_of_a_url() -> None:
    assert web_address("HTTPS://Example.org/a/b?c=%20#frag", ANY) == WebAddress(
        scheme="https", host="example.org", port=443, target="/a/b?c=%20"
    )
    assert web_address("http://8.8.8.8?x", ANY).target == "/?x"
    six = web_address("http://[2606:4700:0::1111]/", ANY)
    assert (six.host, six.netloc) == ("2606:4700::1111", "[2606:4700::1111]")


@pytest.mark.requirement("F21")
def test_only_domains_that_are_named() -> None:
    def allows(entry: str, url: str) -> bool:
        try:
            web_address(url, (entry,))
        except BadMedia:
            return False
        return True

    assert allows("example.org", "https://example.org/x")
    assert allows("Example.org", "http://example.ORG/x")
    assert not allows("example.org", "https://a.example.org/x")
    assert not allows("example.org", "https://example.org.evil.test/")
    assert not allows("example.org", "https://notexample.org/")
    assert not allows("example.org", "https://example.org:8443/")
    assert allows("example.org:8443", "https://example.org:8443/")
    assert not allows("example.org:8443", "https://example.org/")
    assert allows("*.example.org", "https://a.b.example.org/")
    assert not allows("*.example.org", "https://example.org/")
    assert not allows("*.example.org", "https://badexample.org/")
    assert allows("*", "https://8.8.8.8/")
    assert not allows("*", "https://8.8.8.8:22/")
    assert allows("[2606:4700::1111]", "http://[2606:4700::1111]/")
    with pytest.raises(BadMedia, match="fetches no URLs"):
        web_address("https://example.org/", ())


@pytest.mark.requirement("F21")
def test_redirects_are_checked_like_urls() -> None:
    start = web_address("https://example.org/a/b", ("example.org", "cdn.example.org"))
    allowed = ("example.org", "cdn.example.org")
    assert redirected(start, "../c", allowed).target == "/c"
    assert redirected(start, "//cdn.example.org/x", allowed).host == "cdn.example.org"
    for location in (
        "https://evil.test/",
        "http://example.org/",
        "file:///etc/passwd",
        "gopher://example.org/",
        "https://example.org@127.0.0.1/",
        "https://127.1/",
        "data:image/png;base64,AAAA",
        "//2130706433/",
        "http://[",
        "//]/x",
    ):
        with pytest.raises(BadMedia):
            redirected(start, location, allowed)


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,",
        "DATA:;BASE64,",
        "data:image/svg+xml;charset=utf-8;base64,",
        "data:image/x;a=b;base64,",
    ],
)
def test_data_urls(head: str) -> None:
    for size in (1, 2, 3, 50, 5000):
        data = random.Random(size).randbytes(size)
        text = base64.b64encode(data).decode()
        assert inline(head + text, 5000) == data
        assert inline(head + "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)), 5000) == data
        assert from_base64(text.rstrip("="), 5000) == data
        assert from_base64(base64.urlsafe_b64encode(data).decode(), 5000) == data
        assert from_base64(base64.urlsafe_b64encode(data).decode().rstrip("="), 5000) == data
        with pytest.raises(BadMedia, match="more than"):
            inline(head + text, size - 1)


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,x",
        "data:image/png,%89PNG",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,====",
        "data:image/png;base64,AAA*",
        "data:image/png;base64,AA=A",
        "data:image/png;base64,AA.A",
        "data:image/png;base64,AAAAA",
        "data:image/png;base64,ÄÄÄÄ",
        "data:image/png;base64;x,AAAA",
        "data:" + "x" * 600 + ";base64,AAAA",
    ],
)
def test_data_urls_that_are_none(url: str) -> None:
    with pytest.raises(BadMedia):
        inline(url, 1 << 20)


def test_a_long_text_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadMedia, match="more than 1000 bytes"):
        from_base64("*" * 100_000, 1000)
