"""SentencePiece's ``tokenizer.model`` gives the library's ids, or is refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.vocabularies import (
    NORMAL,
    UNUSED,
    USER,
    PlainPieces,
    folder,
    fuzzed,
    pieces,
    sentencepiece_file,
)
from weft.common.errors import ConfigError
from weft.text.tokenizer import Tokenizer

PIECES = pieces()
PLAIN = PlainPieces(PIECES)
AROUND_USER_DEFINED = [
    "[REF]",
    "[REF] a",
    "a [REF]b",
    "[REF][REF]s[REF]",
    " [REF]ss",
    "[REF",
    "[INST]",
    "<s>",
    "</s>a",
    "<0x41>",
    "\u2581a",
    *(" " * count + tail for count in range(40) for tail in ("", "the", "\n")),
]


def load(path: Path, file: bytes, **files: Any) -> Tokenizer:
    return Tokenizer.load(folder(path, tokenizer__model=file, **files))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load(tmp_path / "x", sentencepiece_file(PIECES))


def test_ids_are_those_of_the_plain_algorithm(tokenizer: Tokenizer) -> None:
    for text in [*fuzzed(300), *AROUND_USER_DEFINED]:
        assert tokenizer.encode(text) == [1, *PLAIN.encode(text)], repr(text)


def test_named_tokens_are_those_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.files.named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.special == {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3}
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == len(PIECES)


def test_ids_decode_to_text_without_the_space_before(tokenizer: Tokenizer) -> None:
    for text in fuzzed(100):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        ({}, True, True),
        ({"legacy": True}, True, True),
        ({"legacy": False}, True, False),
        ({"add_prefix_space": False}, False, False),
    ],
)
def test_texts_between_special_tokens_begin_as_configured(
    tmp_path: Path, config: dict[str, Any], first: bool, second: bool
) -> None:
    tokenizer = load(tmp_path / "x", sentencepiece_file(PIECES), tokenizer_config__json=config)
    bare = PlainPieces(PIECES, prefix=False)
    before, behind = (PLAIN if wanted else bare for wanted in (first, second))
    ids = tokenizer.encode("the[INST] foo", parse_special=True)
    assert ids == [1, *before.encode("the"), 3, *behind.encode(" foo")]


def test_what_stands_around_a_text_is_configured(tmp_path: Path) -> None:
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": {"content": "[INST]"}}
    tokenizer = load(tmp_path / "x", sentencepiece_file(PIECES), tokenizer_config__json=config)
    assert tokenizer.encode("the") == [*PLAIN.encode("the"), 3]
    assert tokenizer.eos_ids == (3,)


def test_the_files_beside_it_add_tokens(tmp_path: Path) -> None:
    size = len(PIECES)
    tokenizer = load(
        tmp_path / "x",
        sentencepiece_file(PIECES),
        added_tokens__json={"<|im_start|>": size, "<tool>": size + 3},
        tokenizer_config__json={
            "added_tokens_decoder": {
                "1": {"content": "<s>", "special": True},
                str(size): {"content": "<|im_start|>", "special": True},
            }
        },
    )
    assert tokenizer.added["<|im_start|>"] == size
    assert tokenizer.is_special(size)
    assert tokenizer.encode("<tool>", add_special_tokens=False)[-1] == size + 3
    assert tokenizer.vocab_size == size + 4
    with pytest.raises(ConfigError, match="token 1 is '<s>' in the model and '<b>' in the files"):
        load(tmp_path / "y", sentencepiece_file(PIECES), added_tokens__json={"<b>": 1})


def test_a_model_without_a_space_before_finds_user_defined_spaces(tmp_path: Path) -> None:
    entries = [*PIECES, ("\u2581\u2581", 0.0, USER), ("\u2581\u2581\u2581", 0.0, USER)]
    tokenizer = load(tmp_path / "x", sentencepiece_file(entries, normalizer={3: 0}))
    plain = PlainPieces(entries, prefix=False)
    for text in [*fuzzed(100), *AROUND_USER_DEFINED]:
        assert tokenizer.encode(text) == [1, *plain.encode(text)], repr(text)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (sentencepiece_file(PIECES, {3: 1}), "algorithm is unigram"),
        (sentencepiece_file(PIECES, {3: 4}), "algorithm is characters"),
        (sentencepiece_file(PIECES, {24: 1}), "treat_whitespace_as_suffix"),
        (sentencepiece_file(PIECES, {}, {1: b"nmt_nfkc", 2: b"\0\1"}), "normalizer 'nmt_nfkc'"),
        (sentencepiece_file(PIECES, {}, {2: b"\0\1"}), "normalizer 'identity'"),
        (sentencepiece_file(PIECES, {}, {4: 1}), "remove_extra_whitespaces"),
        (sentencepiece_file(PIECES, {}, {5: 0}), "escape_whitespaces"),
        (sentencepiece_file([*PIECES, ("zz", 1.0, UNUSED)]), "unused pieces"),
        (sentencepiece_file([*PIECES, ("aaa", 3.0, NORMAL), ("aa", 3.0, NORMAL)]), "equal scores"),
        (b"IQ== 0\nIg== 1\n", "a tiktoken list of ranks"),
        (b"\x0a\xff", "not a SentencePiece model"),
        (b"", "not a SentencePiece model"),
    ],
)
def test_models_that_would_not_be_exact_are_refused_by_name(tmp_path: Path, file: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.model cannot be used: .*{why}"):
        load(tmp_path / "x", file)


@pytest.mark.parametrize(
    ("lengths", "read"), [((2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11), True), ((2, 3), False)]
)
def test_runs_of_spaces_of_one_score_are_read_where_the_order_is_certain(
    tmp_path: Path, lengths: tuple[int, ...], read: bool
) -> None:
    runs = [("\u2581" * length, -1e9, NORMAL) for length in lengths]
    entries = [*(piece for piece in PIECES if piece[0].strip("\u2581") or len(piece[0]) < 2), *runs]
    if not read:
        with pytest.raises(ConfigError, match="equal scores"):
            load(tmp_path / "x", sentencepiece_file(entries))
        return
    tokenizer = load(tmp_path / "x", sentencepiece_file(entries))
    plain = PlainPieces(entries)
    for text in AROUND_USER_DEFINED:
        assert tokenizer.encode(text)[1:] == plain.encode(text), repr(text)


FILES = [
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_ids_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    mistral_common = pytest.importorskip("mistral_common")
    file = Path(mistral_common.__file__).parent / "data" / name
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    tokenizer = load(tmp_path / "x", file.read_bytes())
    rng = random.Random(4)
    marks = ["[REFERENCE_DOC_3]", "[/REF]", "a", " [REF]", "[REF", "<s>", "\u2581", "[INST]", " "]
    texts = [*fuzzed(4000, seed=5), *AROUND_USER_DEFINED]
    texts += ["".join(rng.choices(marks, k=5)) for _ in range(1000)]
    for text in texts:
        assert tokenizer.encode(text) == [1, *library.encode(text)], repr(text)
    plain = [number for number in range(tokenizer.vocab_size) if not tokenizer.is_special(number)]
    for _ in range(300):
        ids = rng.choices(plain, k=8)
        assert tokenizer.decode(ids) == library.decode(ids)


def test_small_vocabularies_give_the_librarys_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "x" / "tokenizer.model"))
    for text in [*fuzzed(300), *AROUND_USER_DEFINED]:
        assert tokenizer.encode(text) == [1, *library.encode(text)], repr(text)
