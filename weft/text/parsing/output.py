"""How a model's outputs are read: its declaration, and what follows from it for prompts and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.engine import OutputEngine
from weft.text.parsing.grammars import OutputGrammars, ToolChoice
from weft.text.parsing.parser import OutputParser, OutputSpec, PlainParser, Tool
from weft.text.parsing.scope import ContentScope
from weft.types.grammar import Grammar

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

    @property
    def thought_end(self) -> str:
        """What the model writes between the end of a thought and its answer; "" where it has no thoughts."""
        if self.declared is None:
            return ""
        if self.declared.channels is not None:
            used = self.declared.channels
            return used.ends[0] + used.start + used.role
        return self.declared.thoughts[0].close + "\n\n" if self.declared.thoughts else ""

    def parser(self, spec: OutputSpec) -> OutputParser:
        """A parser of one choice."""
        if self.declared is None or not (spec.reasoning or spec.tool_calls):
            return PlainParser()
        return OutputEngine(self.declared, spec)

    def scope(self, spec: OutputSpec) -> ContentScope | None:
        """What tells content from other text in one choice; None where everything is content."""
        if self.declared is None or not (spec.reasoning or spec.tool_calls):
            return None
        return ContentScope(self.declared, spec)

    def visible_for(self, spec: OutputSpec) -> frozenset[int]:
        """``visible``, where a parser of ``spec`` looks for anything."""
        return self.visible if spec.reasoning or spec.tool_calls else frozenset()

    def call_grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
        reasoning: bool = True,
        in_reasoning: bool = False,
    ) -> Grammar | None:
        """What an output may be when calls of ``tools`` are required, or some of them are strict; None where
        it may be anything. A named tool is the only one of ``tools``, and required.

        ``reasoning``: a thought may come first; ``in_reasoning``: the prompt has opened it. Raises
        InvalidRequest where this model's calls are not known, or cannot hold what is asked.
        """
        if self.declared is None:
            return OutputGrammars(OutputFormat(name="none")).calls(
                tools, choice, parallel=parallel, reasoning=False, in_reasoning=False
            )
        return OutputGrammars(self.declared).calls(
            tools, choice, parallel=parallel, reasoning=reasoning, in_reasoning=in_reasoning
        )

    def answer_grammar(self, part: Grammar, *, reasoning: bool = True, in_reasoning: bool = False) -> Grammar:
        """What an output may be whose content is ``part``: a thought first, where this model thinks."""
        if self.declared is None:
            return part
        return OutputGrammars(self.declared).answer(part, reasoning=reasoning, in_reasoning=in_reasoning)

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
