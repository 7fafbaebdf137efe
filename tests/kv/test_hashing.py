"""Prefix hashes: equal for equal content alone."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from weft.kv.hashing import HashChain, block_hash, request_root, salted_root


def chain(
    tokens: list[int], salt: str = "", media: dict[int, tuple[bytes, ...]] | None = None
) -> list[bytes]:
    return HashChain(salted_root(salt), 4, media).grow(array("i", tokens), len(tokens))


def test_one_hash_for_each_full_block() -> None:
    assert len(chain(list(range(11)))) == 2
    assert all(len(h) >= 16 for h in chain(list(range(8))))


def test_a_hash_depends_on_everything_before_it() -> None:
    a, b = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([0, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0]
    assert a[1] != b[1]
    same = chain([9] * 8)
    assert same[0] != same[1]


def test_salts_media_and_requests_separate() -> None:
    tokens = list(range(8))
    plain = chain(tokens)
    assert not set(plain) & set(chain(tokens, "a"))
    image = chain(tokens, media={1: (b"image",)})
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    assert salted_root("1") != request_root(1, "")
    assert request_root(1, "") != request_root(2, "")
    assert request_root(1, "") != request_root(1, "a")


def test_parts_are_not_run_together() -> None:
    parent = salted_root("")
    hashes = [
        block_hash(parent, b"abcd", (b"ef",)),
        block_hash(parent, b"ab", (b"cdef",)),
        block_hash(parent, b"abcd", (b"e", b"f")),
        block_hash(parent, b"abcdef"),
        block_hash(parent, b"abcd", (b"", b"ef")),
        block_hash(parent, b"abcd", (b"ef", b"")),
    ]
    assert len(dict.fromkeys(hashes)) == len(hashes)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_growing_in_parts_gives_the_same_chain(tokens: list[int], parts: list[int]) -> None:
    grown = HashChain(salted_root(""), 4)
    ids = array("i")
    for upto in sorted(parts):
        ids = array("i", tokens[:upto])
        grown.grow(ids, len(ids))
    assert grown.grow(array("i", tokens), len(tokens)) == chain(tokens)


@given(st.lists(st.integers(0, 2), max_size=16), st.lists(st.integers(0, 2), max_size=16))
def test_equal_hash_means_equal_prefix(a: list[int], b: list[int]) -> None:
    for i, h in enumerate(chain(a)):
        for j, k in enumerate(chain(b)):
            assert (h == k) == (i == j and a[: 4 * i + 4] == b[: 4 * j + 4])
