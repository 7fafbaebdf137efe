"""Vocabularies as vocab.json and merges.txt: byte-level BPE of classes with a known word pattern.

Trainers that use a slow tokenizer class save these files without a tokenizer.json. The pattern is no part of
the files, so a table by class has the pattern.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.gguf.gguf_tokenizer import tokenizer_files
from weft.text.vocabularies.converted import Converted, token_text

NAME, MERGES = "vocab.json", "merges.txt"
_RULES = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
"""Tokenizer class -> rule of ``weft.gguf.gguf_tokenizer.WORDS``."""
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
"""Flags of an added token."""


def convert(
    vocabulary: bytes, merges: bytes, config: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]]
) -> Converted:
    """Return the vocabulary of both files. ``config``: tokenizer_config.json; ``added``: see ``TextFiles``.

    Raises ConfigError for a class without a known pattern, for ``add_prefix_space``, and for files of another
    form.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name not in _RULES:
        raise ConfigError(
            f"the tokenizer has {NAME} and {MERGES} only, and the pattern of tokenizer_class {name!r} is "
            f"not known; there are: {', '.join(_RULES)}. Save the tokenizer with a fast Hugging Face class",
            param="tokenizer",
        )
    if config.get("add_prefix_space"):
        raise ConfigError(
            f"add_prefix_space of a tokenizer with {NAME} and {MERGES} only is not supported. Save the "
            "tokenizer with a fast Hugging Face class",
            param="tokenizer",
        )
    try:
        ids = msgspec.json.decode(vocabulary, type=dict[str, int])
        lines = merges.decode().replace("\r\n", "\n").split("\n")
        if lines[0].startswith("#version"):
            del lines[0]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{NAME} or {MERGES} of the model: {error}", param="tokenizer") from error
    texts = {number: (text, _NORMAL) for text, number in ids.items()}
    for number, entry in added.items():
        texts[number] = entry["content"], _CONTROL if entry.get("special", False) else _USER
    if min(texts, default=-1) < 0 or max(texts) > 2 * len(texts):
        raise ConfigError(f"{NAME} of the model has no ids from 0 on", param="tokenizer")
    # An id without a text gets a name that no text can spell.
    each = [texts.get(number, (f"\0unused {number}", _UNUSED)) for number in range(max(texts) + 1)]
    keys = {
        "model": "gpt2",
        "pre": _RULES[name],
        "tokens": [text for text, _ in each],
        "token_type": [kind for _, kind in each],
        "merges": [line for line in lines if line],
        **_around(config, {text: number for number, (text, _) in texts.items()}),
    }
    made = tokenizer_files({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    data = json.loads(made["tokenizer.json"])
    for token in data["added_tokens"]:
        given = added.get(token["id"], {})
        token |= {flag: given[flag] for flag in FLAGS if isinstance(given.get(flag), bool)}
    return Converted(tokenizer_json=json.dumps(data, ensure_ascii=False), named={}, special={})


def _around(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys of GGUF for tokens around a text. ``ids``: of all texts."""
    made = dict[str, Any]()
    for role in ("bos", "eos"):
        text = token_text(config.get(f"{role}_token"))
        if config.get(f"add_{role}_token") and text is not None and text in ids:
            made |= {f"add_{role}_token": True, f"{role}_token_id": ids[text]}
    return made
