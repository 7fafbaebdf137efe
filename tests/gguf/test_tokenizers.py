"""Tokenizers inside GGUF files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.support.gguf_files import CONTROL, NORMAL, USER, texts_of
from weft.common.errors import ConfigError
from weft.config.hub import bundled_models
from weft.gguf.gguf_tokenizer import NORMALIZED, WORDS, tokenizer_files

UNKNOWN, BYTE = 2, 6
SPACE = "\u2581"


def files_of(texts: dict[str, Any]) -> dict[str, str]:
    return tokenizer_files({f"tokenizer.ggml.{key}": value for key, value in texts.items()})


def built(texts: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(files_of(texts)["tokenizer.json"])


def bundled(pre: str) -> dict[str, Any]:
    return texts_of(Path(bundled_models()["spool-text"]), pre)


@pytest.mark.parametrize("pre", WORDS)
def test_every_text_comes_back(pre: str) -> None:
    tokenizer = built(bundled(pre))
    for text in (
        "It's 12345 apples,\n\n  and DON'T  stop!\r\n\t x",
        " \u00e4\u4e16\u754c\U0001f600 e\u0301 ",
        "",
    ):
        expected = text
        if pre in NORMALIZED:
            expected = tokenizers.normalizers.NFC().normalize_str(text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "We'll pay 1234 now!", ["We", "'ll", " pay", " 1234", " now", "!"]),
        (
            "qwen2",
            "WE'LL pay 1234 now!\n\nx",
            ["WE", "'LL", " pay", " ", "1", "2", "3", "4", " now", "!\n\n", "x"],
        ),
        ("llama-bpe", "We'll pay 12345.\nx", ["We", "'ll", " pay", " ", "123", "45", ".\n", "x"]),
        ("gpt-4o", "fooBar's HTTPServer 12345", ["foo", "Bar's", " HTTPServer", " ", "123", "45"]),
    ],
)
def test_text_is_cut_into_words(pre: str, text: str, words: list[str]) -> None:
    tokenizer = built(bundled(pre))
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == words


def test_ids_are_those_of_the_tokenizer_that_it_was_made_of() -> None:
    folder = Path(bundled_models()["spool-text"])
    data = json.loads((folder / "tokenizer.json").read_text())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = WORDS["gpt-2"][0]
    expected = tokenizers.Tokenizer.from_str(json.dumps(data))
    tokenizer = built(bundled("gpt-2"))
    text = "<|im_start|>user\nTom has 12 apples, and Ann\u2019s are 7.<|im_end|>\n"
    assert tokenizer.encode(text).ids == expected.encode(text).ids
    assert 1 in tokenizer.encode(text).ids, "special tokens are read as such"
    assert tokenizer.get_vocab_size() == expected.get_vocab_size()


def test_roles_template_and_what_is_put_around_a_text() -> None:
    texts = bundled("llama-bpe") | {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0}
    files = files_of(texts | {"add_bos_token": True}) | {}
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert "chat_template.jinja" not in files
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == [1, *plain]
    assert built(texts | {"add_bos_token": True, "add_eos_token": True}).encode("hello").ids == [1, *plain, 2]
    assert built(texts).encode("hello").ids == plain
    keys = {f"tokenizer.ggml.{key}": value for key, value in texts.items()}
    files = tokenizer_files(keys | {"tokenizer.chat_template": "{{ messages }}"})
    assert files["chat_template.jinja"] == "{{ messages }}"
    both = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    files = tokenizer_files(keys | both)
    assert "chat_template.jinja" not in files
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def sentencepiece(seed: int) -> dict[str, Any]:
    """A vocabulary in which nearly every text can be merged in many ways."""
    made = random.Random(seed)
    letters = [SPACE, "a", "b", "c", "d"]
    pieces = {"".join(made.choices(letters, k=made.randint(2, 5))) for _ in range(60)}
    closed = {piece[:end] for piece in pieces for end in range(2, len(piece) + 1)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *sorted(closed)]
    scores = [0.0] * 259 + [-1e9] * len(letters) + [-float(made.randint(0, 40)) for _ in closed]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(letters) + len(closed))
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def merged(text: str, texts: dict[str, Any]) -> list[int]:
    """Return SentencePiece's ids: repeatedly merge the pair with the best token, leftmost first."""
    known = {t: i for i, t in enumerate(texts["tokens"]) if texts["token_type"][i] == NORMAL}
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        best = None
        for at in range(len(parts) - 1):
            number = known.get(parts[at] + parts[at + 1])
            if number is not None and (best is None or texts["scores"][number] > best[0]):
                best = texts["scores"][number], at
        if best is None:
            break
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [known[part]] if part in known else [3 + byte for byte in part.encode()]
    return ids


def distinct(texts: dict[str, Any]) -> dict[str, Any]:
    """Return vocabularies with distinct scores, as published ones have: a trained token's score is its
    rank.
    """
    first = texts["token_type"].index(NORMAL)
    order = sorted(range(first, len(texts["tokens"])), key=lambda i: -texts["scores"][i])
    scores = list(texts["scores"])
    for rank, number in enumerate(order):
        scores[number] = -float(rank)
    return texts | {"scores": scores}


@pytest.mark.parametrize("seed", range(6))
def test_what_has_the_best_score_is_merged_first(seed: int) -> None:
    texts = distinct(sentencepiece(seed))
    tokenizer = built(texts)
    made = random.Random(seed)
    for _ in range(200):
        text = "".join(made.choices("abcd e", k=made.randint(1, 14)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == merged(text, texts), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("ab").ids[0] == 1, "a text begins with the beginning of a sequence"


def test_what_the_user_added_is_one_token() -> None:
    texts = bundled("qwen2")
    texts["tokens"] = [*texts["tokens"], "<tool_call>"]
    texts["token_type"] = [*texts["token_type"], USER]
    tokenizer = built(texts)
    (number,) = tokenizer.encode("<tool_call>").ids
    assert tokenizer.decode([number]) == "<tool_call>", "and is no special token"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "model 'bert' is not supported; there are: gpt2, llama"),
        ({"tokens": []}, "tokens must be a list of texts"),
        ({"token_type": [1]}, "token_type has 1 entries for"),
        ({"merges": ["a b c"]}, "merges must be pairs"),
        ({"merges": ["a \u4e16"]}, "is inconsistent"),
        ({"model": "llama"}, "scores must have an entry for each token"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        files_of(bundled("qwen2") | change)
