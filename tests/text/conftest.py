"""Small tokenizers of every decoder form, built here, saved as checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again.",
    "Straße, naïve café; 你好世界 and 😀 smile",
    "one two three four five; one two three",
]
CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def _special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def _pieces() -> list[str]:
    words = {"▁" + word[:cut] for line in CORPUS for word in line.split() for cut in range(1, len(word) + 1)}
    chars = {char for line in CORPUS for char in line if ord(char) < 128 and char != " "}
    return sorted(words | chars | {"▁", "<", ">", "/", "s"})


def unigram() -> tokenizers.Tokenizer:
    """Like sentencepiece's unigram with byte fallback: ``</s>`` is a piece of the vocabulary."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [(piece, -3.0 - 1.0 / len(piece)) for piece in _pieces()]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def fallback_bpe() -> tokenizers.Tokenizer:
    """Return a BPE in the form of a converted sentencepiece model: normalizer, byte fallback, merges that
    spell ``<s>``.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + [
        "▁",
        "<",
        "s",
        ">",
        "<s",
        "t",
        "h",
        "e",
        "th",
        "the",
        "▁the",
    ]:
        vocab.setdefault(piece, len(vocab))
    merges = [("<", "s"), ("<s", ">"), ("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    tokenizer = unigram()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=160, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words() -> tokenizers.Tokenizer:
    """No decoder at all."""
    vocab = {word: number for number, word in enumerate(sorted({w for line in CORPUS for w in line.split()}))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel({**vocab, "[UNK]": len(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def suffix_bpe() -> tokenizers.Tokenizer:
    """Return a tokenizer whose decoder needs the whole text, because the last token is decoded
    differently.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "unigram": unigram,
    "fallback_bpe": fallback_bpe,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "words": words,
    "suffix_bpe": suffix_bpe,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "byte_level": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML},
    "unigram": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": BRACKETS},
    "fallback_bpe": {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "add_bos_token": True,
    },
}


def save(folder: Path, name: str, **files: Any) -> Path:
    """Write a folder in the form of a checkpoint; ``files`` are further JSON files by stem. Return the
    folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    BUILDERS[name]().save(str(folder / "tokenizer.json"))
    files.setdefault("tokenizer_config", CONFIGS.get(name, {}))
    for stem, data in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: save(root / name, name) for name in BUILDERS}


@pytest.fixture(scope="session")
def all_tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session", params=list(BUILDERS))
def tokenizer(request: pytest.FixtureRequest, all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers[request.param]
