"""A tokenizer as grammars see it: the bytes of each token, and which tokens are no text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from weft.common.errors import ConfigError
from weft.text.tokenizer import Tokenizer

_MARKUP = re.compile(r"<.*>|\[.*\]|｜.*｜", re.DOTALL)
"""How added tokens look that are markup, whether their tokenizer calls them special or not
(``<tool_call>`` and ``</think>`` often are not)."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one tokenizer, for logits of one width."""

    tokens: tuple[bytes, ...]
    """Bytes of each text token, ``size`` of them; empty for ids that are no text: controls, ids that the
    tokenizer does not know."""
    controls: dict[str, int]
    """Tokens that are never part of free text, patterns or JSON: only a grammar that spells one allows it."""
    end_ids: tuple[int, ...]
    """Ids that end a turn. Whether a grammar may end decides over them, and nothing else."""
    size: int
    """Width of the logits."""

    def spare(self) -> int:
        """An id that no model produces: one behind the tokenizer's, else ``size``."""
        used = max((number for number, token in enumerate(self.tokens) if token), default=-1)
        used = max(used, *self.controls.values(), *self.end_ids, -1)
        return used + 1


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of ``tokenizer``. Raises ConfigError for a tokenizer whose tokens have no bytes of
    their own (a decoder that only reads whole texts).
    """
    if tokenizer.form.join == "whole":
        raise ConfigError(
            "this tokenizer decodes only whole texts, so grammars cannot be matched against its tokens; "
            "requests with a grammar need another tokenizer",
            param="tokenizer",
        )
    controls = dict(tokenizer.special)
    controls.update({text: number for text, number in tokenizer.added.items() if _MARKUP.fullmatch(text)})
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
