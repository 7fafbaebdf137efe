"""A tokenizer from a grammar's point of view: the bytes of each token, and the tokens without text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from weft.common.errors import ConfigError
from weft.text.tokenizer import Tokenizer

_MARKUP = re.compile(r"<.*>|\[.*\]|｜.*｜", re.DOTALL)
"""Spelling of added tokens used as markup. Some tokenizers do not mark such tokens special (``<tool_call>``,
``</think>``)."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one tokenizer, for logits of one width."""

    tokens: tuple[bytes, ...]
    """Bytes of each text token, ``size`` entries. Empty for ids without text: controls, and ids unknown to
    the tokenizer."""
    controls: dict[str, int]
    """Tokens that never occur in free text, patterns or JSON. Only a grammar that spells such a token
    allows the token."""
    end_ids: tuple[int, ...]
    """Ids at the end of a turn. Only the end of the grammar decides if these ids are allowed."""
    size: int
    """Width of the logits."""

    def spare(self) -> int:
        """Return an id that no model produces: the id behind all used ids."""
        used = max((number for number, token in enumerate(self.tokens) if token), default=-1)
        used = max(used, *self.controls.values(), *self.end_ids, -1)
        return used + 1


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of ``tokenizer``.

    Raises ConfigError for a tokenizer without bytes per token (a decoder that only reads whole texts).
    """
    if tokenizer.form.join == "whole":
        raise ConfigError(
            "this tokenizer decodes only whole texts, so grammars cannot be matched against its tokens; "
            "requests with a grammar need another tokenizer",
            param="tokenizer",
        )
    controls = dict(tokenizer.special)
    controls.update({text: number for text, number in tokenizer.added.items() if _MARKUP.fullmatch(text)})
    # Controls and end ids have no bytes, so that free text cannot contain these tokens.
    hidden = {*controls.values(), *end_ids}
    tokens = tuple(
        b"" if number in hidden else tokenizer.token_bytes(number)
        for number in range(min(vocab_size, tokenizer.vocab_size))
    )
    return Vocabulary(
        tokens=tokens + (b"",) * (vocab_size - len(tokens)),
        controls={text: number for text, number in controls.items() if number < vocab_size},
        end_ids=tuple(sorted({number for number in end_ids if number < vocab_size})),
        size=vocab_size,
    )
