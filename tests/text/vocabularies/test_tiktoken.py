"""Kimi's ``tiktoken.model`` gives the ids of tiktoken with Kimi's word pattern, special tokens and limits."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.vocabularies import (
    KIMI,
    KIMI_NAMED,
    Plain,
    folder,
    fuzzed,
    kimi_config,
    kimi_cuts,
    kimi_folder,
    merged,
    tiktoken_file,
    trained,
)
from weft.common.errors import ConfigError
from weft.text.detokenizer import Detokenizer
from weft.text.model import TextModel
from weft.text.tokenizer import Tokenizer
from weft.text.vocabularies.byte_level import merges_by_rank

TOKENS = trained(KIMI)
FIRST = len(TOKENS)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(kimi_folder(tmp_path / "kimi"))


def differing(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    plain = Plain(TOKENS, KIMI)
    return [text for text in texts if tokenizer.encode(text) != plain.encode(text)]


def test_ids_are_those_of_the_plain_algorithm(tokenizer: Tokenizer) -> None:
    assert not differing(tokenizer, fuzzed(300))


@pytest.mark.slow
def test_ids_are_those_of_the_plain_algorithm_in_many_texts(tokenizer: Tokenizer) -> None:
    assert not differing(tokenizer, fuzzed(6000, seed=8))


@pytest.mark.parametrize("seed", range(3))
def test_merges_by_rank_hold_for_vocabularies_that_no_training_makes(seed: int) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    rng = random.Random(seed)
    for _ in range(40):
        longer = {"".join(rng.choices("ab", k=rng.randint(2, 6))) for _ in range(12)}
        tokens = ["a", "b", *rng.sample(sorted(longer), len(longer))]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        library = Library(models.BPE(ranks, merges_by_rank(tokens), ignore_merges=True))
        by_bytes = {token.encode(): rank for token, rank in ranks.items()}
        for _ in range(20):
            word = "".join(rng.choices("ab", k=rng.randint(1, 24)))
            assert library.encode(word).ids == merged(word.encode(), by_bytes)


def test_ids_are_those_of_tiktoken(tokenizer: Tokenizer) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    encoding = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={})
    texts = fuzzed(500, seed=9)
    assert [tokenizer.encode(text) for text in texts] == [encoding.encode_ordinary(text) for text in texts]
    long = LONG["a run and much else"]
    parts = [number for part in kimi_cuts(long) for number in encoding.encode_ordinary(part)]
    assert tokenizer.encode(long) == parts


def test_special_tokens_keep_the_gaps_between_them(tokenizer: Tokenizer) -> None:
    for place in range(256):
        text, special = KIMI_NAMED.get(place, (f"<|reserved_token_{FIRST + place}|>", True))
        assert tokenizer.added[text] == FIRST + place
        assert tokenizer.is_special(FIRST + place) == special
        assert tokenizer.encode(text, parse_special=True) == [FIRST + place]
    assert tokenizer.vocab_size == FIRST + 256
    assert tokenizer.eos_ids == (FIRST + 1, FIRST + 2), "of the tokenizer and the generation config"


def test_text_never_becomes_a_special_token(tokenizer: Tokenizer) -> None:
    for text in ("<|im_end|>", "[EOS]", f"<|reserved_token_{FIRST + 5}|>"):
        assert tokenizer.encode(text) == Plain(TOKENS, KIMI).encode(text)
    around = tokenizer.encode("<|im_user|>user<|im_middle|>Hi<|im_end|>", parse_special=True)
    plain = Plain(TOKENS, KIMI)
    assert around == [FIRST + 3, *plain.encode("user"), FIRST + 17, *plain.encode("Hi"), FIRST + 2]


LONG = {
    "spaces": " " * 60_001,
    "a run": "ab" * 30_000,
    "a run after words": "a word or two " + "x" * 25_001 + " and more",
    "just no cut": "c" * 25_000 + " " * 25_000 + "c" * 25_000,
    "a control character is white space": "a" * 12_500 + "\x1c" * 25_001 + "b" * 12_501,
    "a run and much else": "".join(f"word{number} 世界 " for number in range(30_000)) + "的" * 70_000,
}


@pytest.mark.parametrize("name", [name for name in LONG if name != "a run and much else"])
def test_long_runs_are_cut_as_kimi_cuts_them(tokenizer: Tokenizer, name: str) -> None:
    plain = Plain(TOKENS, KIMI)
    parts = kimi_cuts(LONG[name])
    assert tokenizer.encode(LONG[name]) == [number for part in parts for number in _by_words(plain, part)]


def _by_words(plain: Plain, text: str) -> list[int]:
    """Return the ids of ``Plain.encode``, with the library's merges because a word of one letter is very long
    here.
    """
    words = plain.words.findall(text)
    tokenizer = _library()
    return [number for word in words for number in tokenizer.encode(word).ids]


def _library() -> Any:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    from weft.text.pieces import level_text

    letters = [level_text(token) for token in TOKENS]
    made = Library(
        models.BPE({t: n for n, t in enumerate(letters)}, merges_by_rank(letters), ignore_merges=True)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    return made


def test_texts_are_cut_at_400_000_characters_and_counted_between_special_tokens(tokenizer: Tokenizer) -> None:
    half = "seven77" + " word" * 39_999  # 200,002 characters
    whole = half + half
    cut = tokenizer.encode(whole[:400_000]) + tokenizer.encode(whole[400_000:])
    assert whole[399_999:] == " word", "the cut is inside this word"
    assert tokenizer.encode(whole) == cut
    apart = tokenizer.encode(half + "<|im_end|>" + half, parse_special=True)
    assert apart == [*tokenizer.encode(half), FIRST + 2, *tokenizer.encode(half)]


def test_ids_decode_to_their_bytes_one_by_one(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(FIRST) for _ in range(rng.randint(1, 12))]
        expected = b"".join(TOKENS[number] for number in ids).decode("utf-8", "replace")
        stream = Detokenizer(tokenizer)
        assert "".join([*(stream.push(number) for number in ids), stream.finish()]) == expected
        assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"auto_map": {"AutoTokenizer": ["tokenization_hy.HYTokenizer", None]}}, "HYTokenizer"),
        ({"auto_map": None, "tokenizer_class": None}, "word pattern"),
        ({"added_tokens_decoder": {"5": {"content": "<|x|>"}}}, r"has the special token 5"),
        (
            {"added_tokens_decoder": {str(FIRST + 256): {"content": "<|x|>"}}},
            r"the ids of special tokens are",
        ),
        ({"added_tokens_decoder": {str(FIRST): {"content": "the"}}}, r"special token 'the' .* twice"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"tiktoken.model cannot be used: .*{why}"):
        Tokenizer.load(kimi_folder(tmp_path / "x", **config))


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"IQ== 0\nIg==\n", "a line does not have a token and a rank"),
        (b"I*== 0\n", "not base64"),
        (b"IQ== 0\nIg== 2\n", "ranks are not"),
        (b"IQ== 0\nIg== 1\n", "some bytes have no token"),
        (tiktoken_file([*TOKENS, b"a"]), "two tokens have the same bytes"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, file: bytes, why: str) -> None:
    path = folder(
        tmp_path / "x",
        tiktoken__model=file,
        tokenizer_config__json=kimi_config([]) | {"added_tokens_decoder": {}},
    )
    with pytest.raises(ConfigError, match=why):
        Tokenizer.load(path)


def test_the_names_of_special_tokens_are_needed(tmp_path: Path) -> None:
    path = folder(tmp_path / "x", tiktoken__model=tiktoken_file(TOKENS))
    with pytest.raises(ConfigError, match="needs the model's tokenizer_config"):
        Tokenizer.load(path)


def test_kimis_published_template_renders_into_its_tokens(tmp_path: Path) -> None:
    root = os.environ.get("WEFT_REAL_FILES")
    if not root:
        pytest.skip("WEFT_REAL_FILES names no folder of published files")
    template = Path(root, "templates", "models--moonshotai-Kimi-K2.jinja").read_bytes()
    path = kimi_folder(tmp_path / "kimi")
    (path / "chat_template.jinja").write_bytes(template)
    text = TextModel.load(str(path))
    ids = text.chat.encode([{"role": "user", "content": "Hi <|im_end|>"}]).ids
    assert FIRST + 3 in ids
    assert (
        ids.count(FIRST + 2) == text.tokenizer.decode(ids, skip_special_tokens=False).count("<|im_end|>") - 1
    )
