"""Test outputs: generated in the form of a family, and mutated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.text.parsing.families import TOOLS, Call, Calls, Family, Part, ReasoningMarks

WORDS = (
    "sunny",
    "the",
    "weather",
    "in",
    "Zürich",
    "is",
    "你好",
    "😀",
    "a < b",
    "x = {1: [2]}",
    "50%",
    "né",
    "`f()`",
)
LITERALS = (
    "use <tool_call> here",
    "say </tool_call>",
    "an [x](y)",
    'like {"name": "get"}',
    "<",
    "[TOOL_",
    "<|",
    "<th",
)
STRINGS = (
    "</tool_call>", "</parameter>", "a\nb", '"quoted"', "back\\slash", "</function", "it's", "<arg_value>",
    "]", "})", "<|call|>", "```", "tab\t", "\u2028", "a<parameter=x>", "\x7f", "</arg_value> x",
    "</｜DSML｜parameter>", " padded ", "", "null", "12", "true",
)  # fmt: skip


class Maker:
    """Makes outputs of one family from a random source."""

    def __init__(self, family: Family, source: random.Random) -> None:
        self.family = family
        self.source = source

    def text(self, *, literals: bool = True) -> str:
        """Return a text without white space at the ends and without a line that begins like a part."""
        words = WORDS + LITERALS if literals else WORDS
        count = self.source.randint(1, 6)
        return "It " + " ".join(self.source.choice(words) for _ in range(count)) + " so."

    def value(self, kind: str, depth: int = 0) -> Any:
        if kind == "string":
            return "".join(
                self.source.choice([*STRINGS, *WORDS, " "]) for _ in range(self.source.randint(0, 3))
            )
        if kind == "integer":
            return self.source.choice([0, -3, 7, 10**20, self.source.randint(-(10**6), 10**6)])
        if kind == "number":
            return self.source.choice([0.5, -2.25, 1e300, 3.0, 6.02e-23])
        if kind == "boolean":
            return self.source.random() < 0.5
        inner = ["string", "integer", "number", "boolean"] + (["array", "object"] if depth < 2 else [])
        count = self.source.randint(0, 3)
        values = [self.value(self.source.choice(inner), depth + 1) for _ in range(count)]
        if kind == "array":
            return [None, *values] if self.source.random() < 0.2 else values
        return {f"k{number}": value for number, value in enumerate(values)}

    def call(self) -> Call:
        kinds = {key: schema["type"] for key, schema in TOOLS[0].parameters["properties"].items()}
        keys = self.source.sample(list(kinds), self.source.randint(0, 4))
        return Call(self.source.choice(TOOLS).name, {key: self.value(kinds[key]) for key in keys})

    def calls(self) -> Calls:
        return Calls(tuple(self.call() for _ in range(self.source.randint(1, 3))))

    def parts(self) -> list[Part]:
        """A thought perhaps, a text perhaps, calls perhaps."""
        made: list[Part] = []
        if self.source.random() < 0.6:
            made.append(ReasoningMarks(self.text(literals=False)))
        if self.source.random() < 0.6:
            made.append(self.text())
        if self.source.random() < 0.8 or not made:
            made.append(self.calls())
        return made

    def output(self) -> str:
        return self.family.render(self.parts())

    def mutated(self, text: str) -> str:
        """Return ``text`` with one to three errors that models or limits cause."""
        marks = sorted(self.family.declared.marks())
        for _ in range(self.source.randint(1, 3)):
            at, end = sorted(self.source.randint(0, len(text)) for _ in range(2))
            end = min(end, at + 12)
            match self.source.randint(0, 5):
                case 0:
                    text = text[:at] + text[end:]
                case 1:
                    text = text[:at] + self.source.choice([*marks, *STRINGS, *LITERALS]) + text[at:]
                case 2:
                    text = text[:at]
                case 3:
                    text = text[:end] + text[at:end] + text[end:]
                case 4:
                    text = text[:at] + self.source.choice('{}[]()<>"\\,:= \n|;') + text[at + 1 :]
                case _:
                    text = text[at:] + self.output()
        return text

    def pieces(self, text: str) -> Sequence[str]:
        """``text`` cut at random."""
        longest = self.source.choice([1, 3, 9, 40])
        cut: list[str] = []
        while text:
            size = self.source.randint(1, longest)
            cut.append(text[:size])
            text = text[size:]
        return cut
