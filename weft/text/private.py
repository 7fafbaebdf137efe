"""An encoder that never produces special tokens from outside text.

Every special token is *renamed*, in the added tokens and in the model's vocabulary. The new name is a random
number of forty digits, known only to this process. Ids, flags and the rest of the pipeline stay. Text with
``<|im_end|>`` or ``</s>`` then matches no special token, neither among the added tokens nor in the vocabulary
(a unigram model would find ``</s>`` in the vocabulary). Only the chat template may emit special tokens: the
server writes the private names for the template's tokens.

Limit: some added tokens are not marked special by the checkpoint (``<think>`` in some families). Such tokens
are ordinary vocabulary, and text with their spelling produces them, as in every other engine.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from weft.common.errors import ConfigError
from weft.text.marks import secret_digits


def build_private(
    data: dict[str, Any], special: dict[str, int]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return (encoder, private name of each special token's text).

    The encoder knows special tokens only by random names, so user text cannot spell a special token. ``data``
    is a parsed tokenizer.json and is changed. ``special`` maps each special token's text to its id. Raises
    ConfigError if the renamed tokenizer gives other ids. No known tokenizer does.
    """
    names = {text: secret_digits() for text in special}
    for entry in data.get("added_tokens", ()):
        if entry["content"] in names:
            # The server writes a special token everywhere, also inside a word.
            entry |= {"content": names[entry["content"]], "single_word": False}
    _rename_model(data["model"], names)
    private = tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
    normal = private.normalizer
    if normal is not None and any(normal.normalize_str(name) != name for name in names.values()):
        # A space before every text would stand before the names, too: no name would be found inside a text.
        private = tokenizers.Tokenizer.from_str(json.dumps(_not_normalized(data, names), ensure_ascii=False))
    private.no_truncation()
    private.no_padding()
    for text, token in special.items():
        if private.token_to_id(names[text]) != token:
            raise ConfigError(
                "the tokenizer's special tokens cannot be separated from its text tokens", param="tokenizer"
            )
    return private, names


def _not_normalized(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return ``data`` after a change: special tokens are searched before normalization."""
    private = set(names.values())
    for entry in data.get("added_tokens", ()):
        if entry["content"] in private:
            entry["normalized"] = False
    return data


def _rename_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename pieces in the model part of a tokenizer.json, in place. Drop merges with a renamed piece."""
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
        # A merge drops the prefix of its right side, so the result must be compared without that prefix.
        skip = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [merge for merge in merges if not _touches(merge, names, skip)]


def _touches(merge: Any, names: dict[str, str], skip: int) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right[skip:] in names
