"""How a family of models writes its output, as data: what opens and closes thoughts, calls and channels.

``engine.py`` executes a declaration. A call is written as

    section.head   head   arguments   tail   [section.between   head   arguments   tail]...   section.tail

where a head or tail is a tuple of items: a string is exactly that text, ``BLANK`` any white space (``LINE``:
usually a line end), ``NAME`` the tool's name, ``IDENTIFIER`` an id that the model gives the call. The first
text of a call is its *trigger*: where it comes up, a call may begin. All that belongs to a call before its
arguments is only markup if a whole head of a known tool stands there; otherwise it is text.
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
    """Whether the id is written as ``functions.NAME:NUMBER`` and so is also where the name stands. Prefix and
    number may be missing, or joined in other ways."""


BLANK = Blank()
LINE = Blank("\n")
NAME = Name()
IDENTIFIER = Identifier()
NAMING_IDENTIFIER = Identifier(holds_name=True)


class Optional(msgspec.Struct, frozen=True):
    """``items``, or nothing."""

    items: tuple[Item, ...]
    written: bool = False
    """Whether a grammar writes them."""


Item: TypeAlias = str | Blank | Name | Identifier | Optional
Syntax: TypeAlias = tuple[Item, ...]


class JsonArguments(_Part, frozen=True, kw_only=True):
    """The arguments are a JSON object; the name stands in the head."""


class CallObject(_Part, frozen=True, kw_only=True):
    """One JSON object holds the name and the arguments, in any order."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """The first is what a grammar writes."""
    id: str = "id"
    ignored: tuple[str, ...] = ("type",)


class Parameters(_Part, frozen=True, kw_only=True):
    """Each argument in tags of its own; values become JSON by the types that the tool's schema gives them.

    ``key_open KEY key_close [string_flag] value_open VALUE value_close``, then the next one or ``end``.
    A closing tag is only one where the next parameter or ``end`` follows it. docs/outputs.md has the rules
    for tags that are missing or misspelled.
    """

    key_open: str
    key_close: str
    value_open: str = ""
    value_close: str
    end: str
    gap: str = "\n"
    """What a grammar writes around parameters."""
    newlines: bool = False
    """Whether a line end behind ``value_open`` and one before ``value_close`` belong to the tags."""
    string_flag: str = ""
    """Where a value says itself whether it is a string: what stands before ``true`` or ``false``."""


class Keywords(_Part, frozen=True, kw_only=True):
    """``key=value, ...)`` with values as Python writes them, or JSON does."""


Arguments: TypeAlias = JsonArguments | CallObject | Parameters | Keywords


class Section(_Part, frozen=True, kw_only=True):
    """What stands around the calls of an output."""

    head: Syntax = ()
    tail: Syntax = ()
    between: str = ""
    """What separates two calls. Where there is something, no text can stand between calls."""
    required: bool = True
    """Whether a call outside of the section is none."""


class Call(_Part, frozen=True, kw_only=True):
    """How a call is written."""

    head: Syntax = ()
    arguments: Arguments
    tail: Syntax = ()
    section: Section | None = None
    gap: str = "\n"
    """What a grammar writes between two calls."""
    line_start: bool = False
    """Whether it begins a call only at the start of a line (one whose trigger is a mere bracket)."""

    @property
    def closings(self) -> tuple[str, ...]:
        """Texts behind the arguments, of the call and of its section."""
        tails = (*self.tail, *(self.section.tail if self.section is not None else ()))
        return tuple(dict.fromkeys(texts_of(tails)))

    @property
    def own_trigger(self) -> str:
        """What it begins with inside of a section; "" where that is the tool's name."""
        if self.head:
            return self.head[0] if isinstance(self.head[0], str) else ""
        return "{" if isinstance(self.arguments, CallObject) else ""

    @property
    def triggers(self) -> tuple[str, ...]:
        """What may begin one: at least one text, none of them empty."""
        own = self.own_trigger
        around = self.section.head if self.section is not None else ()
        outer = next((item for item in around if isinstance(item, str)), "")
        if not outer:
            return (own,)
        return (outer,) if self.section is None or self.section.required or not own else (outer, own)


class Thought(_Part, frozen=True, kw_only=True):
    """What a thought stands between. White space beside the tags belongs to them."""

    open: str
    close: str
    implied: bool = False
    """Whether the output begins inside a thought although neither prompt nor output opens one."""


class Channels(_Part, frozen=True, kw_only=True):
    """Messages with headers, as GPT-OSS writes them.

    ``[start ROLE] [to=RECIPIENT] channel NAME [to=RECIPIENT] [constrain TYPE] message BODY end``
    """

    start: str
    role: str
    channel: str
    constrain: str
    message: str
    ends: tuple[str, ...]
    """End a body: of any message, the last one, a call (in this order, for what a grammar writes)."""
    thoughts: tuple[str, ...]
    """Channels whose text is a thought."""
    texts: tuple[str, ...]
    """Channels whose text is for the user; the first is that of answers."""
    kinds: tuple[str, ...]
    """What a body may be said to be."""
    calls: str
    """The channel a grammar writes calls into."""
    prefix: str
    """What stands before a tool's name in a recipient."""
    nobody: tuple[str, ...] = ("assistant", "user", "all")
    """Recipients that are no tools."""


class OutputFormat(_Part, frozen=True, kw_only=True):
    """One declaration: what is told apart in an output. An empty one tells nothing apart."""

    name: str
    thoughts: tuple[Thought, ...] = ()
    calls: tuple[Call, ...] = ()
    channels: Channels | None = None
    channel_thoughts: bool = True
    """Whether thoughts of channels are told apart; otherwise they are content."""
    channel_calls: bool = True

    @property
    def tells_thoughts(self) -> bool:
        return bool(self.thoughts) or (self.channels is not None and self.channel_thoughts)

    @property
    def tells_calls(self) -> bool:
        return bool(self.calls) or (self.channels is not None and self.channel_calls)

    def ways(self, *, strict: bool) -> tuple[Call, ...]:
        """How calls may be written. A grammar cannot keep a text from beginning a line with a bracket, so
        where arguments are held to a schema this is no way beside one with tags."""
        kept = tuple(call for call in self.calls if not call.line_start)
        return self.calls if not strict or self.calls[:1] != kept[:1] else kept

    def openings(self) -> tuple[str, ...]:
        """Texts that begin a call and are more than a bracket. Where one stands, the last call has ended."""
        found = (text for call in self.calls for text in (*call.triggers, call.own_trigger) if len(text) > 1)
        return tuple(dict.fromkeys(found))

    def marks(self) -> frozenset[str]:
        """Every text of it that may be a token of its own."""
        return frozenset(text for text in self._texts() if text)

    def _texts(self) -> Iterator[str]:
        for thought in self.thoughts:
            yield from (thought.open, thought.close)
        for call in self.calls:
            section = call.section or Section()
            yield from texts_of((*section.head, *call.head, *call.tail, *section.tail))
            if isinstance(call.arguments, Parameters):
                spelled = call.arguments
                yield from (spelled.key_open, spelled.key_close, spelled.value_open)
                yield from (spelled.value_close, spelled.end)
        if self.channels is not None:
            used = self.channels
            yield from (used.start, used.channel, used.constrain, used.message, *used.ends)


def texts_of(items: Syntax) -> Iterator[str]:
    """The exact texts among items, at any depth."""
    for item in items:
        if isinstance(item, str):
            yield item
        elif isinstance(item, Optional):
            yield from texts_of(item.items)


def combined(thinking: OutputFormat | None, calling: OutputFormat | None) -> OutputFormat | None:
    """One declaration with the thoughts of the first and the calls of the second; None for nothing at all.

    Raises ValueError when what begins a call also begins another part.
    """
    if thinking is None and calling is None:
        return None
    parts = [part for part in (thinking, calling) if part is not None]
    channels = next((part.channels for part in parts if part.channels is not None), None)
    made = OutputFormat(
        name="+".join(dict.fromkeys(part.name for part in parts)),
        thoughts=() if thinking is None else thinking.thoughts,
        calls=() if calling is None else calling.calls,
        channels=channels,
        channel_thoughts=thinking is not None and thinking.channels is not None,
        channel_calls=calling is not None and calling.channels is not None,
    )
    check_format(made)
    return made


def check_format(declared: OutputFormat) -> None:
    """Raises ValueError unless every beginning is distinct: none is a prefix of another, none is empty."""
    begins = list({trigger for call in declared.calls for trigger in call.triggers})
    begins += [thought.open for thought in declared.thoughts]
    if declared.channels is not None:
        begins += [declared.channels.start, declared.channels.channel]
    if "" in begins:
        raise ValueError(f"{declared.name}: something begins with nothing")
    for first, second in itertools.pairwise(sorted(begins)):
        if second.startswith(first):
            raise ValueError(f"{declared.name}: {first} is how {second} begins")


Kind: TypeAlias = Literal["content", "reasoning", "name", "id", "argument", "markup"]
"""What a generated character is."""
