"""Events put together from a template equal the encoded chunks, byte by byte."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.front.test_chat_shape import Spelled
from weft.front.http import answers
from weft.front.http.streaming import HOLE
from weft.front.openai.chat_route import ChatShape
from weft.front.openai.completions import CompletionShape
from weft.front.protocol.conversation import AnswerOptions
from weft.text.choice import TextDelta
from weft.text.logprobs import Logprob
from weft.text.parsing.events import CallBegin, Content, OutputEvent
from weft.text.pieces import DecoderForm, TextPiece

CHOICES = 4
ESCAPED = ['"', "\\", "/", "\n", "\x00", "\x7f", "\u2028", "\ufffd", "\N{PILE OF POO}", "</script>", "é"]
MARKED = ["c", "t", "tc", "c(a", "(b)"]
"""Texts with a meaning for the parser."""
WHOLE = ["", HOLE, f'"{HOLE}"', HOLE[:16], *MARKED]
FLAGS = ["usage_in_stream", "include_reasoning", "echo", "usage_in_chunks", "return_token_ids"]


class Parser(Spelled):
    """As ``Spelled`` for the texts of ``MARKED``. All other text is content."""

    def feed(self, text: str) -> list[OutputEvent]:
        if text not in MARKED:
            return [Content(text)]
        return [
            msgspec.structs.replace(event, id=f"call {event.call}") if isinstance(event, CallBegin) else event
            for event in super().feed(text)
        ]


class Tokenizer:
    form = DecoderForm("level")

    def piece(self, token: int) -> TextPiece:
        return TextPiece(b"x", b"x")

    def is_special(self, token: int) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return b"x"

    def token_text(self, token: int) -> str:
        return "x"


def text(rng: random.Random) -> str:
    """Return a whole text of the lists above, or random characters, with characters that JSON escapes."""
    if rng.random() < 0.5:
        return rng.choice(WHOLE)
    letters = [rng.choice(ESCAPED), chr(rng.randrange(0x300)), chr(rng.randrange(0xE000, 0x110000))]
    return "".join(rng.choices(letters, k=rng.randrange(6)))


def deltas(rng: random.Random, top: int | None) -> list[TextDelta]:
    """Return deltas of several choices in turn, with an end for some choices."""
    open_choices = list(range(CHOICES))
    made: list[TextDelta] = []
    while open_choices and len(made) < 24:
        index = rng.choice(open_choices)
        finish: Any = rng.choice([None] * 8 + ["stop", "length"])
        ids = tuple(rng.choices(range(4), k=rng.randrange(3)))
        logprobs: Any = None if top is None else [{token: Logprob(-0.5, 1, "x")} for token in ids]
        found = {"token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
        made.append(TextDelta(index=index, text=text(rng), **found))
        if finish is not None:
            open_choices.remove(index)
    return made


def shape(cls: Any, options: dict[str, Any]) -> Any:
    tokenizer, prompt = Tokenizer(), SimpleNamespace(text=f"p{HOLE}", ids=[1])
    asked = AnswerOptions(model='m"\\', stream=True, **options)
    job = SimpleNamespace(asked=asked, prompts=[prompt], params=SimpleNamespace(n=CHOICES))
    generation: Any = SimpleNamespace(job=job, tokenizer=tokenizer, parser=Parser, named=str)
    generation.choices = [SimpleNamespace(index=index, prompt_logprobs=None) for index in range(CHOICES)]
    generation.prompt_of = lambda index: prompt
    generation.show_weights = lambda *_: None
    generation.usage = lambda: answers.make_usage(1, 2, 0)
    made = cls(generation)
    made._created = 1
    return made


@pytest.mark.parametrize("cls", [ChatShape, CompletionShape])
def test_templates_equal_the_encoder(cls: Any) -> None:
    rng = random.Random(0)
    for _ in range(200):
        top = rng.choice([None, None, 1])
        options = {"top": top} | {name: rng.random() < 0.3 for name in FLAGS}
        short, general = shape(cls, options), shape(cls, options)
        for delta in deltas(rng, top):
            expected = [general.form.event(chunk) for chunk in general.chunks(delta)]
            assert short.events(delta) == expected


def test_templates_are_used() -> None:
    """Otherwise the test above compares the encoder with the encoder."""
    for cls, name in ((ChatShape, "_contents"), (CompletionShape, "_texts")):
        made = shape(cls, {})
        for _ in range(2):
            made.events(TextDelta(index=2, text="c"))
        assert list(getattr(made, name)) == [2]
