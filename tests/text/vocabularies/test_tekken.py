"""Mistral's ``tekken.json`` gives the ids of mistral-common, alone and beside a tokenizer.json."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.vocabularies import KIMI, TEKKEN, Plain, folder, fuzzed, tekken_file, trained
from weft.common.errors import ConfigError, InvalidRequest
from weft.text.model import TextModel
from weft.text.tokenizer import Tokenizer

TOKENS = trained(TEKKEN)
LISTED = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "<pad>"]


def load(path: Path, file: bytes, **files: Any) -> Tokenizer:
    return Tokenizer.load(folder(path, tekken__json=file, **files))


def expected(text: str) -> list[int]:
    """Return the expected ids, including the begin token."""
    return [1, *(40 + number for number in Plain(TOKENS, TEKKEN).encode(text))]


def test_ids_are_those_of_the_plain_algorithm(tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "x", tekken_file(TOKENS, LISTED))
    texts = fuzzed(300)
    assert [tokenizer.encode(text) for text in texts] == [expected(text) for text in texts]


@pytest.mark.parametrize(
    ("listed", "texts"),
    [
        (LISTED, {7: "<pad>", 8: "<SPECIAL_8>", 39: "<SPECIAL_39>"}),
        (None, {3: "[INST]", 11: "<pad>", 19: "[TOOL_CONTENT]", 20: "<SPECIAL_20>", 39: "<SPECIAL_39>"}),
    ],
)
def test_special_tokens_stand_before_all_others(
    tmp_path: Path, listed: list[str] | None, texts: dict[int, str]
) -> None:
    tokenizer = load(tmp_path / "x", tekken_file(TOKENS, listed))
    assert {number: text for text, number in tokenizer.special.items() if number in texts} == texts
    assert sorted(tokenizer.special.values()) == list(range(40))
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.encode("</s>") == expected("</s>"), "text stays text"
    assert tokenizer.encode("[INST]a", parse_special=True, add_special_tokens=False) == [
        3,
        *expected("a")[1:],
    ]


def test_tokens_beyond_the_size_of_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "x", tekken_file(TOKENS, LISTED, default_vocab_size=700))
    plain = Plain(TOKENS[:660], TEKKEN)
    assert tokenizer.vocab_size == 700
    for text in fuzzed(50):
        assert tokenizer.encode(text)[1:] == [40 + number for number in plain.encode(text)]


def test_configured_names_win(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path / "x",
        tekken_file(TOKENS, LISTED),
        tokenizer_config__json={"eos_token": "[/INST]"},
        generation_config__json={"eos_token_id": [2, 7]},
    )
    assert tokenizer.eos_ids == (2, 4, 7)
    assert tokenizer.files.named["bos_token"] == "<s>"


def test_a_missing_chat_template_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "x", tekken__json=tekken_file(TOKENS, LISTED))
    text = TextModel.load(path)
    with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template"):
        text.chat.encode([{"role": "user", "content": "Hi"}])
    (path / "chat_template.jinja").write_text("[INST]{{ messages[0].content }}[/INST]")
    assert TextModel.load(path).chat.encode([{"role": "user", "content": "Hi"}]).ids == [
        3,
        *expected("Hi")[1:],
        4,
    ]


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"{", "tekken.json cannot be used"),
        (b'{"config": {}, "vocab": []}', "pattern"),
        (tekken_file(TOKENS, LISTED, default_vocab_size=5000), "must have the ranks 0 to 4959"),
        (tekken_file(TOKENS, [*LISTED, *(str(n) for n in range(40))]), "special tokens must have the ranks"),
        (tekken_file(TOKENS, ["<unk>"]), "no token <s>"),
        (tekken_file(TOKENS, None, version="v13"), "must list its special tokens"),
        (tekken_file(TOKENS, LISTED, pattern="("), "word pattern is not supported"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, file: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(tmp_path / "x", file)


def converted(path: Path, pattern: str = TEKKEN, **added: int) -> bytes:
    """Return a tokenizer.json of the tokens with another pattern and further or replaced special tokens."""
    data = json.loads(load(path, tekken_file(TOKENS, LISTED)).files.tokenizer_json)
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    entry = data["added_tokens"][0]
    for text, number in added.items():
        data["added_tokens"] = [e for e in data["added_tokens"] if e["content"] != text]
        data["added_tokens"].append({**entry, "content": text, "id": number})
        data["model"]["vocab"][text] = number
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("pattern", "added", "used", "warned"),
    [
        (TEKKEN, {}, "tokenizer.json", None),
        (TEKKEN, {"im_start": 940}, "tokenizer.json", None),
        (KIMI, {}, "tekken.json", "word pattern"),
        (KIMI, {"im_start": 940}, "tokenizer.json", "different word patterns"),
        (TEKKEN, {"[THINK]": 940}, "tekken.json", "the id of its special token"),
    ],
)
def test_a_wrong_tokenizer_json_beside_it_is_not_used(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
    added: dict[str, int],
    used: str,
    warned: str | None,
) -> None:
    other = converted(tmp_path / "source", pattern, **added)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="weft"):
        tokenizer = load(tmp_path / "x", tekken_file(TOKENS, LISTED), tokenizer__json=other)
    assert (tokenizer.files.tokenizer_json == other.decode()) == (used == "tokenizer.json")
    messages = [one.getMessage() for one in caplog.records if one.name.startswith("weft.text")]
    assert len(messages) == (warned is not None)
    assert all(warned in message for message in messages if warned is not None)


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
@pytest.mark.slow
def test_ids_are_those_of_mistral_common(tmp_path: Path, name: str) -> None:
    module = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    import mistral_common

    file = Path(mistral_common.__file__).parent / "data" / name
    reference = module.Tekkenizer.from_file(file)
    tokenizer = load(tmp_path / "x", file.read_bytes())
    texts = fuzzed(4000, seed=5)
    assert [tokenizer.encode(text) for text in texts] == [
        reference.encode(text, True, False) for text in texts
    ]
    assert tokenizer.vocab_size == reference.n_words
    numbers = range(reference.num_special_tokens)
    assert [tokenizer.special[reference.id_to_piece(number)] for number in numbers] == list(numbers)
    rng = random.Random(6)
    for _ in range(300):
        ids = [rng.randrange(1000, reference.n_words) for _ in range(8)]
        assert tokenizer.decode(ids) == reference.decode(ids)
