"""Vocabularies made or read by the libraries of their makers give the same ids in Weft.

SentencePiece trains small models here. A library that is not installed is the reason of a skip.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.vocabularies import (
    KIMI,
    TEKKEN,
    WORDS,
    folder,
    fuzzed,
    tekken_file,
    tiktoken_file,
    trained,
)
from weft.common.errors import ConfigError
from weft.text.tokenizer import Tokenizer
from weft.text.vocabularies.sentencepiece import read_model

EXACT = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
}
READ: dict[str, dict[str, Any]] = {
    "plain": {},
    "no space before a text": {"add_dummy_prefix": False},
    "no bytes": {"byte_fallback": False},
    "digits alone": {"split_digits": True},
    "pieces across words": {"split_by_whitespace": False},
    "pieces of spaces": {"allow_whitespace_only_pieces": True},
    "scripts together": {"split_by_unicode_script": False, "split_by_number": False},
    "control pieces": {"control_symbols": ["[INST]", "<x>"]},
    "no ids around a text": {"bos_id": -1, "eos_id": -1},
    "other ids": {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
    "other names": {"unk_piece": "[UNK]", "bos_piece": "[BOS]", "eos_piece": "[EOS]"},
    "user-defined pieces": {
        "user_defined_symbols": ["<sep>", "<s", "ep>", "of", "\u2581the", "\u2581\u2581", "\n"]
    },
    "user-defined pieces with plain spaces": {"user_defined_symbols": ["a b", "  ", " the"]},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unigram": ({"model_type": "unigram"}, "unigram"),
    "the default normalizer": ({"normalization_rule_name": "nmt_nfkc"}, "normalizer 'nmt_nfkc'"),
    "spaces removed": ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    "spaces behind words": ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
}
AROUND = [
    "",
    " ",
    "  ",
    "   ",
    "a b",
    "xa b a b",
    "of  of",
    " the the",
    "<sep> <sep>a",
    "<x>[INST]<s></s><unk>",
    "\u2581",
]
LISTED = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "<pad>"]


def _trained(options: dict[str, Any]) -> bytes:
    """Return a tokenizer.model trained by SentencePiece."""
    library = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    texts = [text for text in fuzzed(400, seed=1) if text and "\0" not in text]
    texts += [" ".join(random.Random(seed).choices(WORDS, k=20)) for seed in range(50)]
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        **{"vocab_size": 700, "hard_vocab_limit": False, "minloglevel": 2, **EXACT, **options},
    )
    return model.getvalue()


def _differences(file: bytes, path: Path, texts: list[str]) -> list[str]:
    """Return the texts with other ids, or with another decoded text, than in the library."""
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_proto=file)
    tokenizer = Tokenizer.load(folder(path, tokenizer__model=file))
    assert tokenizer.vocab_size == library.vocab_size()
    wrong = []
    for text in texts:
        ids = library.encode(text, add_bos=library.bos_id() >= 0)
        # Weft shows no special token, and the library writes a mark for an unknown piece.
        decodes = library.unk_id() in ids or tokenizer.decode(ids) == library.decode(ids)
        if tokenizer.encode(text) != ids or not decodes:
            wrong.append(text)
    return wrong


@pytest.mark.parametrize("kind", READ)
def test_a_model_that_sentencepiece_trains_gives_its_ids(tmp_path: Path, kind: str) -> None:
    assert not _differences(_trained(READ[kind]), tmp_path / "x", [*fuzzed(200, seed=3), *AROUND])


def test_a_piece_with_a_plain_space_that_the_configuration_names_is_found(tmp_path: Path) -> None:
    file = _trained(READ["user-defined pieces with plain spaces"])
    number = [piece.text for piece in read_model(file).pieces].index("a b")
    named = {"added_tokens_decoder": {str(number): {"content": "a b", "special": False}}}
    path = folder(tmp_path / "x", tokenizer__model=file, tokenizer_config__json=json.dumps(named).encode())
    assert number in Tokenizer.load(path).encode("xa b")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_exact_is_refused(tmp_path: Path, kind: str) -> None:
    options, why = REFUSED[kind]
    with pytest.raises(ConfigError, match=f"tokenizer.model cannot be used: .*{why}"):
        Tokenizer.load(folder(tmp_path / "x", tokenizer__model=_trained(options)))


@pytest.mark.parametrize("seed", range(8))
def test_any_user_defined_pieces_are_cut_as_by_sentencepiece(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    alphabet = "ab\u2581<>oftheé你\n\t"
    users = {"".join(rng.choices(alphabet, k=rng.randint(1, 4))) for _ in range(12)}
    control = {"".join(rng.choices("ab<>[]éx", k=rng.randint(2, 4))) for _ in range(4)} - users
    file = _trained(
        {
            "user_defined_symbols": sorted(users),
            "control_symbols": sorted(control),
            "add_dummy_prefix": bool(seed % 2),
            "byte_fallback": bool(seed % 3),
        }
    )
    texts = ["".join(rng.choices(alphabet + " ", k=rng.randint(1, 40))) for _ in range(200)]
    assert not _differences(file, tmp_path / "x", texts)


@pytest.mark.parametrize(
    ("version", "listed"), [("v3", None), ("v7", None), ("v7", LISTED), ("v11", LISTED), ("v13", LISTED)]
)
@pytest.mark.parametrize("sizes", [{}, {"default_vocab_size": 900, "default_num_special_tokens": 100}])
def test_small_tekken_files_are_read_as_by_mistral_common(
    tmp_path: Path, version: str, listed: list[str] | None, sizes: dict[str, int]
) -> None:
    module = pytest.importorskip(
        "mistral_common.tokens.tokenizers.tekken", reason="needs the package mistral-common"
    )
    path = folder(tmp_path / "x", tekken__json=tekken_file(trained(TEKKEN), listed, version=version, **sizes))
    reference = module.Tekkenizer.from_file(path / "tekken.json")
    tokenizer = Tokenizer.load(path)
    assert tokenizer.vocab_size == reference.n_words
    for number in range(reference.num_special_tokens):
        assert tokenizer.special[reference.id_to_piece(number)] == number
    for text in fuzzed(100, seed=4):
        ids = reference.encode(text, True, False)
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_ranks_of_a_file_are_those_that_tiktoken_reads(tmp_path: Path) -> None:
    load = pytest.importorskip("tiktoken.load", reason="needs the package tiktoken")
    tokens = trained(KIMI)
    path = folder(tmp_path / "x", tiktoken__model=tiktoken_file(tokens)) / "tiktoken.model"
    assert load.load_tiktoken_bpe(str(path)) == {token: rank for rank, token in enumerate(tokens)}
