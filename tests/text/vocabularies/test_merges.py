"""vocab.json and merges.txt without a tokenizer.json: the ids of transformers, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from weft.common.errors import ConfigError
from weft.text.tokenizer import Tokenizer

TEXTS = ["the fox, isn't it 12345?", "Straße\n\n  naïve 你好\t", "fox<call>fox<|end|>", " a  b   c 1 22 333 "]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _save(folder: Path, **config: Any) -> Path:
    """Write the files of a slow tokenizer class, with two added tokens behind the vocabulary."""
    trained = Library(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(TEXTS * 2, trainer)
    trained.model.save(str(folder))
    end = trained.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(end): {"content": "<|endoftext|>", "special": True, **flags},
        str(end + 1): {"content": "<call>", "special": False, **flags},
    }
    roles = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps({**roles, **config}))
    return folder


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = _save(tmp_path, tokenizer_class=name)
    theirs = getattr(transformers, name).from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.eos_id == theirs.eos_token_id
    assert Tokenizer.load(folder).encode(TEXTS[0]) == ours.encode(TEXTS[0]), "from the cache"


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_flags_and_tokens_around_a_text(name: str, tmp_path: Path) -> None:
    """Added tokens take spaces beside them, or are searched in normalized text. Texts begin and end with
    tokens."""
    transformers = pytest.importorskip("transformers")
    folder = _save(tmp_path, tokenizer_class=name, bos_token="<call>", add_bos_token=True, add_eos_token=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    end = max(map(int, config["added_tokens_decoder"]))
    for number, (text, flag) in enumerate((("<strip>", "lstrip"), ("<\u00e9>", "normalized"))):
        entry = {**config["added_tokens_decoder"][str(end)], "content": text, flag: True}
        config["added_tokens_decoder"][str(end + 1 + number)] = entry
    file.write_text(json.dumps(config))
    theirs = getattr(transformers, name).from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in ("a  <strip> b", "a<\u00e9>b<e\u0301>c", "e\u0301 don't, Привет 12345", ""):
        assert ours.encode(text) == theirs(text)["input_ids"], text
    _save(tmp_path, tokenizer_class=name, add_prefix_space=True)
    with pytest.raises(ConfigError, match="add_prefix_space of a tokenizer with"):
        Tokenizer.load(folder)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path, tokenizer_class="CodeGenTokenizer")
    with pytest.raises(ConfigError, match="the pattern of tokenizer_class 'CodeGenTokenizer' is not known"):
        Tokenizer.load(folder)
    _save(tmp_path, tokenizer_class="Qwen2Tokenizer")
    (tmp_path / "vocab.json").write_text('{"a": "b"}')
    with pytest.raises(ConfigError, match=r"vocab\.json or merges\.txt of the model"):
        Tokenizer.load(folder)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ConfigError, match=r"vocab\.json without merges\.txt"):
        Tokenizer.load(folder)
