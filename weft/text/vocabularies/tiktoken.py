"""``tiktoken.model``: one line ``base64 rank`` per token. Everything else is in the model's own Python code.

The model's code is not run. A table has the facts of that code, by the class name of the tokenizer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.gguf.word_rules import HAN, KIMI_LIMITS
from weft.text.segments import Segmentation
from weft.text.vocabularies.byte_level import Special, added_ids, token_bytes, tokenizer_json
from weft.text.vocabularies.converted import Converted, unusable

NAME = "tiktoken.model"


class _Rules(msgspec.Struct, frozen=True):
    """The facts that a tokenizer's class adds to the ranks."""

    pattern: str
    specials: int
    """Number of special tokens behind the ranks. Tokens not named by tokenizer_config.json are reserved."""
    segmentation: Segmentation


_CLASSES = {
    # Moonlight, Kimi K2, K2.5, Kimi Linear and later. The limits come from the model's ``encode``: cuts at
    # special tokens, then every 400,000 characters, then in runs of 25,000.
    "TikTokenTokenizer": _Rules(HAN, 256, msgspec.convert(KIMI_LIMITS, Segmentation)),
}
_RESERVED = "<|reserved_token_{}|>"


def known(config: dict[str, Any]) -> bool:
    """Return True if tokenizer_config.json names a class of the table."""
    return _class(config) in _CLASSES


def convert(source: bytes, config: dict[str, Any]) -> Converted:
    """Return the converted vocabulary. Raises ConfigError.

    ``source``: content of tiktoken.model. ``config``: content of tokenizer_config.json.
    """
    if not config:
        raise unusable(NAME, "it needs the model's tokenizer_config.json, which names the special tokens")
    rules = _CLASSES.get(_class(config))
    if rules is None:
        raise unusable(
            NAME,
            f"the word pattern of the class {_class(config)!r} in tokenizer_config.json is unknown; known "
            f"classes: {', '.join(_CLASSES)}",
        )
    tokens = _tokens(source)
    specials = _specials(config, len(tokens), rules.specials)
    return Converted(
        tokenizer_json=tokenizer_json(NAME, tokens, specials, rules.pattern),
        named={},
        special=dict(added_ids(specials)),
        pattern=rules.pattern,
        segmentation=rules.segmentation,
    )


def _class(config: dict[str, Any]) -> str:
    """Return the class named by tokenizer_config.json, without the module. The model's own class comes
    first.
    """
    own = config.get("auto_map")
    named = own.get("AutoTokenizer") if isinstance(own, dict) else None
    slow = named[0] if isinstance(named, list) and named else named
    return str(slow or config.get("tokenizer_class") or "").rpartition(".")[2]


def _tokens(source: bytes) -> list[bytes]:
    """Return the tokens in rank order. Raises ConfigError unless the ranks are 0, 1, and so on."""
    ranks: dict[int, bytes] = {}
    for line in source.splitlines():
        if line.strip():
            text, _, rank = line.partition(b" ")
            if not rank.strip().isdigit():
                raise unusable(NAME, f"a line does not have a token and a rank: {line[:40]!r}")
            ranks[int(rank)] = token_bytes(NAME, text)
    if sorted(ranks) != list(range(len(ranks))):
        raise unusable(NAME, "its ranks are not 0, 1, 2 and so on")
    return [ranks[rank] for rank in range(len(ranks))]


def _specials(config: dict[str, Any], first: int, count: int) -> list[Special]:
    """Return ``count`` special tokens from the id ``first`` on, named by ``added_tokens_decoder``.

    An id without a name keeps its place under a reserved name. Numbering only the named tokens consecutively
    would give wrong ids. Raises ConfigError for a named token with any other id.
    """
    named = config.get("added_tokens_decoder") or {}
    # Reserve all ids first, then replace the named ids.
    result = {number: Special(_RESERVED.format(number), number) for number in range(first, first + count)}
    for key, entry in named.items():
        number = int(key) if key.isdigit() else -1
        if number not in result or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise unusable(
                NAME,
                f"tokenizer_config.json has the special token {key}; the ids of special tokens are {first} "
                f"to {first + count - 1}",
            )
        result[number] = Special(entry["content"], number, bool(entry.get("special", True)))
    return list(result.values())
