"""The output format of a model family as data: the texts around reasoning, calls and channels.

``parsing_engine.py`` executes a declaration. A call is written as

    section.head   head   arguments   tail   [section.between   head   arguments   tail]...   section.tail

A head or tail is a tuple of items. A string is exactly that text. ``BLANK`` is any white space (``LINE``:
usually a line end). ``NAME`` is the name of the tool. ``IDENTIFIER`` is an id written by the model. The first
text of a call is the *trigger*: at a trigger, a call may begin. Text before the arguments is markup only if a
whole head with a known tool stands there. Otherwise the same text is content.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Blank(msgspec.Struct, frozen=True):
    """Any white space, or none. A grammar writes ``written``."""

    written: str = ""


class Name(msgspec.Struct, frozen=True):
    """The name of a tool of the request."""


class Identifier(msgspec.Struct, frozen=True, kw_only=True):
    """An id of the call: word characters."""

    holds_name: bool = False
    """True if the id contains the name, as in ``functions.NAME:NUMBER``. The reader accepts an id without the
    prefix or the number, and with other separators.
    """
    written: bool = False
    """True if a grammar writes a number as the id. A grammar always writes an id with the name."""


BLANK = Blank()
LINE = Blank("\n")
NAME = Name()
IDENTIFIER = Identifier()
NAMING_IDENTIFIER = Identifier(holds_name=True)
WRITTEN_IDENTIFIER = Identifier(written=True)


class Optional(msgspec.Struct, frozen=True):
    """``items``, or nothing."""

    items: tuple[Item, ...]
    written: bool = False
    """True if a grammar writes the items."""


Item: TypeAlias = str | Blank | Name | Identifier | Optional
Syntax: TypeAlias = tuple[Item, ...]


class JsonArguments(_Part, frozen=True, kw_only=True):
    """The arguments are a JSON object; the name stands in the head."""


class CallObject(_Part, frozen=True, kw_only=True):
    """One JSON object holds the name and the arguments, in any order."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Accepted keys of the arguments. A grammar writes the first."""
    id: str = "id"
    ignored: tuple[str, ...] = ("type",)


class Parameters(_Part, frozen=True, kw_only=True):
    """Each argument in a tag pair of its own. Values become JSON by the types of the tool's schema.

    ``key_open KEY key_close [string_flag] value_open VALUE value_close``, then the next parameter or ``end``.
    A closing tag counts only if the next parameter or ``end`` follows. docs/outputs.md has the rules for
    missing and misspelled tags.
    """

    key_open: str
    key_close: str
    value_open: str = ""
    value_close: str
    end: str
    gap: str = "\n"
    """The text of a grammar around parameters."""
    newlines: bool = False
    """True if a line end behind ``value_open`` and before ``value_close`` belongs to the tags."""
    string_flag: str = ""
    """For formats with a type flag in each value: the text before ``true`` (a string) or ``false`` (any other
    type).
    """


class Keywords(_Part, frozen=True, kw_only=True):
    """``key=value, ...)`` with values in Python or JSON spelling."""

    assign: str = "="
    end: str = ")"
    between: str = ", "
    """The text of a grammar between two keywords. A reader accepts a comma with white space."""
    quote: str = ""
    """A text at both ends of a string, without escapes inside the string. Keys of nested objects then need no
    quotes. The quotes of Python stay valid.
    """


Arguments: TypeAlias = JsonArguments | CallObject | Parameters | Keywords


class Section(_Part, frozen=True, kw_only=True):
    """The text around all calls of an output."""

    head: Syntax = ()
    tail: Syntax = ()
    between: str = ""
    """Separator of two calls, or white space. If not empty, no other text may stand between calls."""
    required: bool = True
    """True if a call outside the section does not count as a call."""


class Call(_Part, frozen=True, kw_only=True):
    """The spelling of one call."""

    head: Syntax = ()
    arguments: Arguments
    tail: Syntax = ()
    section: Section | None = None
    gap: str = "\n"
    """The text of a grammar between two calls."""
    line_start: bool = False
    """True if the call may begin only at the start of a line (for triggers of a single bracket)."""

    @property
    def closings(self) -> tuple[str, ...]:
        """Texts behind the arguments, from the call's tail and the section's tail."""
        tails = (*self.tail, *(self.section.tail if self.section is not None else ()))
        return tuple(dict.fromkeys(texts_of(tails)))

    @property
    def own_trigger(self) -> str:
        """First text of the call inside a section; "" if the call begins with the tool's name."""
        if self.head:
            return self.head[0] if isinstance(self.head[0], str) else ""
        return "{" if isinstance(self.arguments, CallObject) else ""

    @property
    def triggers(self) -> tuple[str, ...]:
        """All texts at which the call may begin: at least one. ``check_format`` refuses an empty text."""
        own = self.own_trigger
        around = self.section.head if self.section is not None else ()
        outer = next((item for item in around if isinstance(item, str)), "")
        # Inside a required section, a call outside the section does not count.
        if not outer:
            return (own,)
        return (outer,) if self.section is None or self.section.required or not own else (outer, own)


class ReasoningMarks(_Part, frozen=True, kw_only=True):
    """The texts around a reasoning block. White space beside the tags belongs to the tags."""

    open: str
    close: str
    implied: bool = False
    """True if the output starts inside a reasoning block although neither the prompt nor the output opens the
    block.
    """


class AnswerMarks(_Part, frozen=True, kw_only=True):
    """The texts around an answer. White space beside the texts belongs to the texts.

    ``open`` counts only before any content, ``close`` only behind ``open`` and at the end of the content. In
    other places both are content.
    """

    open: str
    close: str
    gap: str = "\n"
    """The text of a grammar beside the answer."""


class Channels(_Part, frozen=True, kw_only=True):
    """Messages with headers, in the spelling of GPT-OSS.

    ``[start ROLE] [to=RECIPIENT] channel NAME [to=RECIPIENT] [constrain TYPE] message BODY end``
    """

    start: str
    role: str
    channel: str
    constrain: str
    message: str
    ends: tuple[str, ...]
    """End texts in this order: of any message, of the last message, of a call. A grammar writes the first."""
    reasoning: tuple[str, ...]
    """Channels of reasoning."""
    texts: tuple[str, ...]
    """Channels of text for the user. A grammar writes answers into the first."""
    kinds: tuple[str, ...]
    """Accepted content types of a body."""
    calls: str
    """The channel of calls in a grammar."""
    prefix: str
    """The text before a tool's name in a recipient."""
    nobody: tuple[str, ...] = ("assistant", "user", "all")
    """Recipients that are not tools."""


class OutputFormat(_Part, frozen=True, kw_only=True):
    """One declaration: the parts to separate in an output. An empty declaration separates nothing."""

    name: str
    reasoning: tuple[ReasoningMarks, ...] = ()
    answer: tuple[AnswerMarks, ...] = ()
    """Spellings of the texts around an answer. An answer may also lack these texts."""
    calls: tuple[Call, ...] = ()
    channels: Channels | None = None
    channel_reasoning: bool = True
    """True if reasoning channels are separated. If False, their text is content."""
    channel_calls: bool = True
    """True if calls in channels are read."""

    @property
    def tells_reasoning(self) -> bool:
        """True if the format separates reasoning."""
        return bool(self.reasoning) or (self.channels is not None and self.channel_reasoning)

    @property
    def tells_calls(self) -> bool:
        """True if the format has calls."""
        return bool(self.calls) or (self.channels is not None and self.channel_calls)

    def ways(self, *, strict: bool) -> tuple[Call, ...]:
        """Return the accepted spellings of a call.

        With ``strict``, the spellings that a grammar of free text with calls cannot forbid are dropped: a
        bracket at the start of a line, except the bracket of the first spelling, and, if the first spelling
        begins with a bracket, tags inside a line.
        """
        if not strict or not self.calls:
            return self.calls
        first = self.calls[0]
        return tuple(
            call
            for call in self.calls
            if (call.triggers == first.triggers if first.line_start else not call.line_start)
        )

    def openings(self) -> tuple[str, ...]:
        """Return the texts at the start of a call, except single brackets. Such a text also ends the previous
        call.
        """
        found = (text for call in self.calls for text in (*call.triggers, call.own_trigger) if len(text) > 1)
        return tuple(dict.fromkeys(found))

    def marks(self) -> frozenset[str]:
        """Return every text of the format: each may be a special token."""
        return frozenset(text for text in self._texts() if text)

    def _texts(self) -> Iterator[str]:
        """Yield all exact texts of the declaration, possibly "" and with repetitions."""
        for reasoning in self.reasoning:
            yield from (reasoning.open, reasoning.close)
        for answer in self.answer:
            yield from (answer.open, answer.close)
        for call in self.calls:
            section = call.section or Section()
            yield from texts_of((*section.head, *call.head, *call.tail, *section.tail))
            if isinstance(call.arguments, Parameters):
                spelled = call.arguments
                yield from (spelled.key_open, spelled.key_close, spelled.value_open)
                yield from (spelled.value_close, spelled.end)
            elif isinstance(call.arguments, Keywords):
                yield call.arguments.quote
        if self.channels is not None:
            used = self.channels
            yield from (used.start, used.channel, used.constrain, used.message, *used.ends)


def texts_of(items: Syntax) -> Iterator[str]:
    """Yield the exact texts among ``items``, at any depth."""
    for item in items:
        if isinstance(item, str):
            yield item
        elif isinstance(item, Optional):
            yield from texts_of(item.items)


def combined(thinking: OutputFormat | None, calling: OutputFormat | None) -> OutputFormat | None:
    """Return one declaration with the reasoning of the first and the calls of the second; None if both are
    None.

    Raises ValueError if one opening text is a prefix of another.
    """
    if thinking is None and calling is None:
        return None
    parts = [part for part in (thinking, calling) if part is not None]
    channels = next((part.channels for part in parts if part.channels is not None), None)
    # A format with channels reads reasoning and calls only for the flag that named that format.
    made = OutputFormat(
        name="+".join(dict.fromkeys(part.name for part in parts)),
        reasoning=() if thinking is None else thinking.reasoning,
        answer=() if thinking is None else thinking.answer,
        calls=() if calling is None else calling.calls,
        channels=channels,
        channel_reasoning=thinking is not None and thinking.channels is not None,
        channel_calls=calling is not None and calling.channels is not None,
    )
    check_format(made)
    return made


def check_format(declared: OutputFormat) -> None:
    """Raise ValueError if an opening text is empty or is a prefix of another opening text."""
    begins = list({trigger for call in declared.calls for trigger in call.triggers})
    begins += [reasoning.open for reasoning in declared.reasoning]
    begins += [answer.open for answer in declared.answer]
    if declared.channels is not None:
        begins += [declared.channels.start, declared.channels.channel]
    if "" in begins:
        raise ValueError(f"{declared.name}: an opening text is empty")
    # In sorted order, a prefix stands directly before a longer text.
    for first, second in itertools.pairwise(sorted(begins)):
        if second.startswith(first):
            raise ValueError(
                f"{declared.name}: the opening text {first} is a prefix of the opening text {second}"
            )


TextUse: TypeAlias = Literal["content", "reasoning", "name", "id", "argument", "markup"]
"""The use of a generated character."""
