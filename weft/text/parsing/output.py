"""The output format of one model: parsers and grammars, and the effects on prompts and special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.text.parsing.call_grammars import OutputGrammars, ToolChoice
from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.parser import OutputParser, OutputSpec, PlainParser, Tool
from weft.text.parsing.parsing_engine import OutputEngine
from weft.text.parsing.scope import ContentScope
from weft.types.grammar import Grammar

_TAIL = 256
"""Characters at the end of a prompt examined for the opening tag of a reasoning block."""


class ModelOutput:
    """The output format of one model. Thread-safe."""

    def __init__(self, declared: OutputFormat | None, special: Mapping[str, int]) -> None:
        """``special`` maps the text of each special token to the token id."""
        self.declared = declared
        self._special = special
        self.visible: frozenset[int] = self._ids(frozenset() if declared is None else declared.marks())
        """Ids of special tokens used as markup. The parser must see the text of these tokens, although
        clients never do.
        """
        self.one_call = False
        """True if the chat template shows one call per message. Grammars then allow one call per output."""

    @property
    def tells_calls(self) -> bool:
        """True if tool calls can be separated from other text."""
        return self.declared is not None and self.declared.tells_calls

    @property
    def tells_reasoning(self) -> bool:
        """True if reasoning can be separated from other text."""
        return self.declared is not None and self.declared.tells_reasoning

    @property
    def reasoning_end(self) -> str:
        """The model's text between the end of reasoning and the answer; "" for a model without reasoning."""
        if self.declared is None:
            return ""
        if self.declared.channels is not None:
            used = self.declared.channels
            return used.ends[0] + used.start + used.role
        return self.declared.reasoning[0].close + "\n\n" if self.declared.reasoning else ""

    def parser(self, spec: OutputSpec) -> OutputParser:
        """Return a new parser for one choice."""
        if self.declared is None or not (spec.reasoning or spec.tool_calls):
            return PlainParser()
        return OutputEngine(self.declared, spec)

    def scope(self, spec: OutputSpec) -> ContentScope | None:
        """Return a new splitter of content and other text for one choice; None if everything is content."""
        if self.declared is None or not (spec.reasoning or spec.tool_calls):
            return None
        return ContentScope(self.declared, spec)

    def visible_for(self, spec: OutputSpec) -> frozenset[int]:
        """Return ``visible`` if a parser of ``spec`` looks for anything, else an empty set."""
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
        """Return the grammar of an output with calls of ``tools``; None if any output is allowed.

        A grammar exists if calls are required or some tool is strict. For a named tool choice, pass only that
        tool and ``required``. ``reasoning``: the output may start with reasoning. ``in_reasoning``: the
        prompt has opened the reasoning block. A model with ``one_call`` is never ``parallel``: the model has
        seen no second call of a turn. Raises InvalidRequest if the call format of the model is unknown or
        cannot express the schema.
        """
        parallel = parallel and not self.one_call
        if self.declared is None:
            return OutputGrammars(OutputFormat(name="none")).calls(
                tools, choice, parallel=parallel, reasoning=False, in_reasoning=False
            )
        return OutputGrammars(self.declared).calls(
            tools, choice, parallel=parallel, reasoning=reasoning, in_reasoning=in_reasoning
        )

    def answer_grammar(self, part: Grammar, *, reasoning: bool = True, in_reasoning: bool = False) -> Grammar:
        """Return the grammar of an output with content ``part``, behind optional reasoning."""
        if self.declared is None:
            return part
        return OutputGrammars(self.declared).answer(part, reasoning=reasoning, in_reasoning=in_reasoning)

    def in_reasoning(self, prompt: str, continued: str) -> bool:
        """Return True if the output after ``prompt`` starts inside a reasoning block.

        ``continued`` is the text of the assistant message that the output continues, or "".
        """
        if self.declared is None:
            return False
        # A block may be opened by the prompt, by the continued message, or by an implied start.
        end = prompt[-_TAIL:].rstrip()
        for reasoning in self.declared.reasoning:
            if end.endswith(reasoning.open) or continued.rfind(reasoning.open) > continued.rfind(
                reasoning.close
            ):
                return True
            if reasoning.implied and not continued and reasoning.close not in end[-len(reasoning.close) :]:
                return True
        used = self.declared.channels
        if used is None:
            return False
        return any(end.endswith(used.channel + name + used.message) for name in used.reasoning)

    def _ids(self, marks: frozenset[str]) -> frozenset[int]:
        return frozenset(
            number for text, number in self._special.items() if any(text in mark for mark in marks)
        )
