"""How a model's outputs are read: its declaration, and what follows from it for prompts and tokens."""

from __future__ import annotations

from collections.abc import Mapping

from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.engine import OutputEngine
from weft.text.parsing.parser import OutputParser, OutputSpec, PlainParser

_TAIL = 256
"""Characters at the end of a prompt in which a thought's closing tag shows that none is implied."""


class ModelOutput:
    """How the outputs of one model are read. Thread-safe."""

    def __init__(self, declared: OutputFormat | None, special: Mapping[str, int]) -> None:
        """``special``: text of each special token, to its id."""
        self.declared = declared
        self._special = special
        self.visible: frozenset[int] = self._ids(frozenset() if declared is None else declared.marks())
        """Special tokens that are markup: the parser must see them although they are no text for clients."""

    @property
    def tells_calls(self) -> bool:
        """Whether tool calls can be told from other text."""
        return self.declared is not None and self.declared.tells_calls

    @property
    def tells_thoughts(self) -> bool:
        return self.declared is not None and self.declared.tells_thoughts

    def parser(self, spec: OutputSpec) -> OutputParser:
        """A parser of one choice."""
        if self.declared is None or not (spec.reasoning or spec.tool_calls):
            return PlainParser()
        return OutputEngine(self.declared, spec)

    def visible_for(self, spec: OutputSpec) -> frozenset[int]:
        """``visible``, where a parser of ``spec`` looks for anything."""
        return self.visible if spec.reasoning or spec.tool_calls else frozenset()

    def in_thought(self, prompt: str, continued: str) -> bool:
        """Whether an output after ``prompt`` begins inside a thought. ``continued`` is the part of a message
        of the assistant that it goes on with, if it does."""
        if self.declared is None:
            return False
        end = prompt[-_TAIL:].rstrip()
        for thought in self.declared.thoughts:
            if end.endswith(thought.open) or continued.rfind(thought.open) > continued.rfind(thought.close):
                return True
            if thought.implied and not continued and thought.close not in end[-len(thought.close) :]:
                return True
        used = self.declared.channels
        if used is None:
            return False
        return any(end.endswith(used.channel + name + used.message) for name in used.thoughts)

    def _ids(self, marks: frozenset[str]) -> frozenset[int]:
        return frozenset(
            number for text, number in self._special.items() if any(text in mark for mark in marks)
        )
