"""Growing text token by token equals decoding the whole, and never takes anything back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.text.detokenizer import Detokenizer
from weft.text.tokenizer import Tokenizer

TEXT = st.text(max_size=30).filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text))


def grow(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()]


@settings(max_examples=80, deadline=None)
@given(text=TEXT, skip=st.booleans())
def test_text_equals_the_whole_decode(all_tokenizers: dict[str, Tokenizer], text: str, skip: bool) -> None:
    for name, tokenizer in all_tokenizers.items():
        ids = tokenizer.encode(text)
        assert "".join(grow(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip), name


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_equal_the_whole_decode(
    all_tokenizers: dict[str, Tokenizer], data: st.DataObject, skip: bool
) -> None:
    """Ids a model could make: invalid UTF-8, special tokens and unknown ids anywhere."""
    name = data.draw(st.sampled_from(sorted(all_tokenizers)))
    tokenizer = all_tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    if name in ("unigram", "fallback_bpe"):  # mostly byte tokens, so that some characters complete
        encoded = tokenizer.encode(data.draw(TEXT), add_special_tokens=False)
        at = data.draw(st.integers(0, len(ids)))
        ids = ids[:at] + encoded[data.draw(st.integers(0, 2)) :] + ids[at:]
    pieces = grow(tokenizer, ids, skip=skip)
    whole = tokenizer.decode(ids, skip)
    assert "".join(pieces) == whole
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert whole.startswith(so_far)


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_a_preview_is_what_an_end_would_give(all_tokenizers: dict[str, Tokenizer], text: str) -> None:
    for name in ("unigram", "fallback_bpe", "byte_level"):
        tokenizer = all_tokenizers[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer, so_far = Detokenizer(tokenizer), ""
        for count, token in enumerate(ids, 1):
            so_far += detokenizer.push(token)
            preview = detokenizer.preview()
            if preview:
                assert so_far + preview == tokenizer.decode(ids[:count])


@pytest.mark.requirement("F63")
@pytest.mark.parametrize("name", ["byte_level", "unigram"])
def test_characters_are_never_split(all_tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = all_tokenizers[name]
    ids = tokenizer.encode("🦊 the 猫", add_special_tokens=False)
    pieces = grow(tokenizer, ids)
    assert "".join(pieces).lstrip(" ") == "🦊 the 猫"
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("") >= 4, "bytes of one character were held back"


def test_an_incomplete_tail_is_flushed_as_a_replacement(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    ids = tokenizer.encode("a🦊", add_special_tokens=False)[:-1]
    pieces = grow(tokenizer, ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd"


def test_continuing_text_keeps_its_leading_space(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["unigram"]
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    fresh, later = Detokenizer(tokenizer), Detokenizer(tokenizer, continues=True)
    assert "".join(map(fresh.push, ids)) + fresh.finish() == "the fox"
    assert "".join(map(later.push, ids)) + later.finish() == " the fox"


def test_the_cost_of_a_token_does_not_grow(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    ids = tokenizer.encode("the quick brown fox 你好 ", add_special_tokens=False) * 4000
    detokenizer = Detokenizer(tokenizer)
    half = len(ids) // 2
    began = time.process_time()
    for token in ids[:half]:
        detokenizer.push(token)
    middle = time.process_time()
    for token in ids[half:]:
        detokenizer.push(token)
    assert time.process_time() - middle < 5 * (middle - began)
