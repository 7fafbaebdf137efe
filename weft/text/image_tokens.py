"""Tokens of images in a prompt: the text around an image, and one token for each row of the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from weft.config.media import MediaFacts
from weft.text.chat_messages import Shows
from weft.text.tokenizer import Tokenizer


class ImageRules(NamedTuple):
    """The tokens of a model for images and videos in a conversation."""

    placeholder: int
    """The template's token for an image."""
    shows: Shows
    video: int = 0
    """The placeholder of a frame group; 0 for a model without videos."""
    shown_video: int = 0
    """The template's token for a video."""
    video_text: str = ""
    """The template's text for a video, instead of a token; see ``VideoFacts.shown``."""
    start: int = 0
    end: int = 0
    """``start`` and ``end`` are the tokens around each frame group."""
    fps: float = 2.0
    """Frames per second of a video without a rate of its own."""
    text: str = "seconds"
    """Text in front of a frame group; see ``VideoFacts``."""
    shown: int | None = None
    around: str = ""
    """The template's token for an image, and the text around the placeholder; see ``MediaFacts``."""


def image_rules(facts: MediaFacts | None, most: int) -> tuple[ImageRules | None, list[int]]:
    """Return the image rules for ``ChatFormat`` (None without images), and the token ids forbidden to text:
    the placeholders and the tokens around, in and between images."""
    if facts is None:
        return None, []
    hidden = list(dict.fromkeys(facts.texts))
    rules = ImageRules(
        facts.placeholder,
        Shows(most, no_videos=facts.no_videos),
        start=facts.start or 0,
        end=facts.end or 0,
        shown=facts.shown,
        around=facts.around,
    )
    if facts.frames is None or facts.video is None or facts.start is None or facts.end is None:
        return rules, hidden
    videos = rules._replace(
        shows=Shows(most, facts.group, facts.temporal),
        video=facts.video,
        shown_video=facts.video if facts.shown_video is None else facts.shown_video,
        video_text=facts.frames.shown,
        fps=facts.frames.fps,
        text=facts.frames.text,
    )
    return videos, hidden


def with_images(rendered: str, rules: ImageRules | None, tokenizer: Tokenizer) -> str:
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
    """An item with its tokens (``weft.media.pictures.Picture``): an image, a part of an image or a frame
    group."""

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
