"""An encoder that text from outside cannot talk into producing special tokens.

Every special token is *renamed*, in the added tokens and in the model's vocabulary, to a random number of
forty digits that exists only in this process. Ids, flags and the rest of the pipeline stay. So text that
spells ``<|im_end|>`` or ``</s>`` meets no special token, neither among the added tokens nor as a piece of the
vocabulary (a unigram model would otherwise find ``</s>`` there by itself); and whoever may emit special
tokens, which is the chat template, writes the private name.

Limit: added tokens that the checkpoint itself does not call special (``<think>`` of some families) are
ordinary vocabulary, and text that spells them gets them, as in every other engine.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import tokenizers

from weft.common.errors import ConfigError

_DIGITS = 40


def secret_digits() -> str:
    """A random string of digits that clients cannot guess, of a fixed length (so no such string begins
    another).

    Digits survive every normalizer, ``upper``, ``lower``, ``trim`` and JSON escaping.
    """
    return str(secrets.randbelow(9 * 10 ** (_DIGITS - 1)) + 10 ** (_DIGITS - 1))


def build_private(
    data: dict[str, Any], special: dict[str, int]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """(encoder, private name of each special token's text).

    ``data`` is a parsed tokenizer.json, which is changed; ``special`` maps the special tokens' texts to their
    ids. Raises ConfigError when the renamed tokenizer would give other ids, which no known tokenizer does.
    """
    names = {text: secret_digits() for text in special}
    for entry in data.get("added_tokens", ()):
        entry["content"] = names.get(entry["content"], entry["content"])
    _rename_model(data["model"], names)
    private = tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
    private.no_truncation()
    private.no_padding()
    for text, token in special.items():
        if private.token_to_id(names[text]) != token:
            raise ConfigError(
                "the tokenizer's special tokens cannot be told from its text", param="tokenizer"
            )
    return private, names


def _rename_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Renames pieces in the model part of a tokenizer.json, in place, and drops merges that made them."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        for text, name in names.items():
            if text in vocab:
                vocab[name] = vocab.pop(text)
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    merges = model.get("merges")
    if merges:
        skip = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [merge for merge in merges if not _touches(merge, names, skip)]


def _touches(merge: Any, names: dict[str, str], skip: int) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right[skip:] in names
