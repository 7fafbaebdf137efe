"""Prefix hashes: equal for equal content alone."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kv.hashing import (
    HashChain,
    block_hash,
    media_keys,
    prompt_hashes,
    request_root,
    root,
    salted_root,
)
from weft.types.media_item import MediaItem
from weft.types.weights import prefix_name


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


@pytest.mark.requirement("F33")
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


def test_weights_separate_and_the_first_weights_count_as_absent() -> None:
    assert salted_root("a", "b", prefix_name(0, None)) == salted_root("a", "b")
    assert [prefix_name(3, "ab"), prefix_name(3, "")] == [b"ab", b""]
    assert salted_root("a").hex() == "5113ace3e4c2863e9782471beb873105"
    names = [prefix_name(n, None) for n in range(3)]
    roots = [salted_root("a", "", n) for n in names] + [request_root(1, "a", "", n) for n in names]
    assert len(set(roots)) == 6


def test_a_chain_that_diverges_shares_no_later_hash() -> None:
    """Blocks that were complete keep their hashes, also where the chain already reached further."""
    tokens = array("i", range(18))
    whole = HashChain(salted_root(""), 4)
    due = list(whole.grow(tokens, 18))
    parts = [whole.diverged(tokens, 9, mark).grow(tokens, 18) for mark in (b"1", b"2")]
    again = whole.diverged(tokens, 9, b"1").diverged(tokens, 14, b"2").grow(tokens, 18)
    assert [one[:2] for one in (*parts, again)] == [due[:2]] * 3
    assert again[2] == parts[0][2]
    later = [*due[2:], *parts[0][2:], *parts[1][2:], again[3]]
    assert len(set(later)) == len(later) == 7
    assert whole.diverged(tokens, 2, b"1").grow(tokens, 18)[0] != due[0]
    assert whole.grow(tokens, 18) == due


@pytest.mark.requirement("F33")
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


def images(lengths: list[tuple[int, int]]) -> list[MediaItem]:
    """Return images from (gap before, tokens). The keys of the images are their tokens."""
    made, end = [], 0
    for gap, count in lengths:
        made.append(MediaItem(key=bytes([count] * 16), start=end + gap, count=count, grid=(1, 1, count)))
        end += gap + count
    return made


@pytest.mark.requirement("D28")
@given(*[st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=3)] * 2)
def test_equal_hash_means_the_same_images_in_the_same_places(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    """All tokens are placeholders; only which row of which image is where tells prompts apart."""

    def rows(lengths: list[tuple[int, int]]) -> list[tuple[bytes, int] | None]:
        made: list[tuple[bytes, int] | None] = [None] * 24
        for item in images(lengths):
            made[item.start : item.start + item.count] = [(item.key, row) for row in range(item.count)]
        return made

    one, other = (chain([7] * 24, media=media_keys(images(lengths), 4)) for lengths in (a, b))
    for number in range(6):
        alike = rows(a)[: 4 * number + 4] == rows(b)[: 4 * number + 4]
        assert (one[number] == other[number]) == alike


def test_equal_frames_with_another_lag_are_other_content() -> None:
    """Rope positions of joined frame groups depend on time; images and first groups have no lag."""
    plain = images([(0, 4), (0, 4)])
    made = [
        chain([7] * 12, media=media_keys([plain[0], msgspec.structs.replace(plain[1], lag=lag)], 4))
        for lag in (None, 0, 1, 2)
    ]
    assert len({one[0] for one in made}) == 1
    assert all(len({one[number] for one in made}) == 4 for number in (1, 2))


def test_an_image_counts_from_its_first_block_to_its_last() -> None:
    tokens = [7] * 20
    plain = chain(tokens)
    one = chain(tokens, media=media_keys(images([(5, 4)]), 4))
    assert one[0] == plain[0]
    assert not set(one[1:]) & set(plain)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=4))
def test_routers_hash_as_caches_do(lengths: list[tuple[int, int]]) -> None:
    media = images(lengths)
    tokens = array("i", range(sum(gap + count for gap, count in lengths) + 5))
    for block in (1, 4, 6):
        own = HashChain(salted_root("x"), block, media_keys(media, block)).grow(tokens, len(tokens))
        assert prompt_hashes(tokens.tobytes(), "x", block, tuple(media)) == own


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


def test_a_root_is_of_its_fields_and_nothing_else() -> None:
    """No two sets of fields share a root, wherever one field ends and the next one begins."""
    assert root() == root(salt=b"", adapter=b"") == salted_root("")
    assert salted_root("").hex() == "23788c49a6feed7b9f8ccc0ad1378d92"
    assert (
        root(salt=b"a", adapter=b"b")
        == root(adapter=b"b", salt=b"a")
        == root(adapter=b"b", salt=b"a", payer=b"")
    )
    each: list[dict[str, bytes]] = [
        {},
        {"salt": b"ab"},
        {"adapter": b"ab"},
        {"salt": b"a", "adapter": b"b"},
        {"salt": b"b", "adapter": b"a"},
        {"salt": b"ab", "adapter": b"ab"},
        {"sal": b"tab"},
        {"salta": b"b"},
        {"s": b"altab"},
        {"salt": b"a" + bytes(7)},
        {"adapter": b"b" + (4).to_bytes(8, "little") + b"salt" + (1).to_bytes(8, "little") + b"a"},
        {"request": (1).to_bytes(16, "little")},
        {"request": (1).to_bytes(16, "little"), "salt": b"ab"},
    ]
    assert len({root(**fields) for fields in each}) == len(each)


@settings(max_examples=50)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["a", "aa", "salt"]), st.binary(max_size=4), max_size=3),
        min_size=2,
        max_size=8,
    )
)
def test_roots_are_equal_where_all_fields_are(every: list[dict[str, bytes]]) -> None:
    present = [{name: value for name, value in fields.items() if value} for fields in every]
    for fields, kept in zip(every, present, strict=True):
        for other, rest in zip(every, present, strict=True):
            assert (root(**fields) == root(**other)) == (kept == rest)
