"""Tokens of images in a prompt: the text around an image, and one token for each row of the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.config.media import MediaFacts
from weft.text.tokenizer import Tokenizer


class AroundRules(Protocol):
    """The part of ``ImageRules`` for the text around an image."""

    @property
    def placeholder(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def shown(self) -> int | None: ...

    @property
    def around(self) -> str: ...


def with_images(rendered: str, rules: AroundRules | None, tokenizer: Tokenizer) -> str:
    """Return ``rendered`` with the text around the placeholder of each image, as the model's processor
    writes."""
    if rules is None or not rules.around:
        return rendered
    placeholder, start, end = (
        tokenizer.token_text(one) or "" for one in (rules.placeholder, rules.start, rules.end)
    )
    shown = placeholder if rules.shown is None else tokenizer.token_text(rules.shown)
    lines = "\n\n" if rules.around == "lines" else ""
    # User text cannot contain the token: its special tokens have marks inside.
    return rendered.replace(shown, f"{lines}{start}{placeholder}{end}{lines}") if shown else rendered


class Counted(Protocol):
    """An item with its tokens: an image, a part of an image, or a frame group (``weft.media.Picture``)."""

    @property
    def count(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...

    @property
    def number(self) -> int:
        """Number of the part within its image."""

    @property
    def front(self) -> tuple[int, ...]:
        """Tokens of text in front of the part."""


def expanded(ids: Sequence[int], facts: MediaFacts, items: Sequence[Counted]) -> tuple[list[int], list[int]]:
    """Return (``ids`` with all tokens of each image in place of its placeholder, start of each item).

    The n-th placeholder stands for the n-th image or frame group, with all its parts. Missing items raise
    IndexError.
    """
    made: list[int] = []
    starts: list[int] = []
    for token in ids:
        if token not in facts.placeholders:
            made.append(token)
            continue
        first = len(starts)
        while len(starts) == first or (len(starts) < len(items) and items[len(starts)].number):
            item = items[len(starts)]
            made.extend(item.front)
            starts.append(len(made))
            made.extend(facts.tokens_of(token, item.count, item.grid))
    return made, starts
