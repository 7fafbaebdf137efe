"""Reads the headers of messages in channels, and routes their bodies: to thoughts, content or a call."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weft.text.parsing.calls import CallReader
from weft.text.parsing.declaration import Channels
from weft.text.parsing.tape import Reading, Tape

MAX_HEADER = 256
Body: TypeAlias = Literal["content", "reasoning"]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a header says, and where its recipient stands in the text."""

    channel: str
    recipient: str
    recipient_at: int


class ChannelReader:
    """The channels of one output. Between messages ``body`` is None, and only a header can follow."""

    def __init__(
        self, tape: Tape, declared: Channels, reader: CallReader, *, thoughts: bool, calls: bool
    ) -> None:
        self.body: Body | None = None
        self._tape = tape
        self._declared = declared
        self._calls = reader
        self._tells_thoughts = thoughts
        self._tells_calls = calls

    @property
    def openings(self) -> tuple[str, ...]:
        """What a header may begin with."""
        return (self._declared.start, self._declared.channel)

    @property
    def endings(self) -> tuple[str, ...]:
        """What ends the message that is open."""
        return () if self.body is None else self._declared.ends

    def begin(self, *, in_thought: bool) -> Reading[None]:
        """At the output's start: the prompt ends behind the role, or inside a thought."""
        if in_thought:
            self.body = "reasoning"
            return
        tape = self._tape
        if (yield from tape.literal(" to=", "to=")) is not None:
            tape.at = 0
            if not (yield from self.header(0)):
                tape.at = 0

    def end(self) -> None:
        """The message that was open has ended."""
        self.body = None
        self._tape.begin_part()

    def header(self, start: int) -> Reading[bool]:
        """Reads the header at ``start`` and, of a call, the body too. False where there is none."""
        tape = self._tape
        read = yield from self._until_message(start)
        header = None if read is None else self._parsed(read, start)
        if read is None or header is None:
            tape.at = start
            return False
        behind = start + len(read) + len(self._declared.message)
        if header.channel not in (*self._declared.thoughts, *self._declared.texts):
            return False
        if header.recipient:
            tape.at = behind
            return (yield from self._call(header, behind))
        thought = header.channel in self._declared.thoughts and self._tells_thoughts
        tape.skip(behind)
        self.body = "reasoning" if thought else "content"
        tape.begin_part()
        return True

    def _until_message(self, start: int) -> Reading[str | None]:
        """The header's text, without the mark that ends it."""
        tape = self._tape
        used = self._declared
        while True:
            text = tape.slice(start, min(tape.end, start + MAX_HEADER))
            header, found, _ = text.partition(used.message)
            again = used.start in header[1:] or used.channel in header.partition(used.channel)[2]
            if again or any(mark in header for mark in used.ends):
                return None
            if found:
                return header
            if len(text) == MAX_HEADER or not (yield from tape.more()):
                return None

    def _parsed(self, text: str, start: int) -> Header | None:
        """What a header says; None for text that is none."""
        used = self._declared
        rest = text
        if rest.startswith(used.start):
            rest = rest[len(used.start) :]
            if not rest.startswith(used.role):
                return None
            rest = rest[len(used.role) :]
        before, found, after = rest.partition(used.channel)
        after, constrained, kind = after.partition(used.constrain)
        words = after.split()
        if not found or not words or after[:1].isspace() or (constrained and not kind.strip()):
            return None
        other = [*before.split(), *words[1:]]
        recipients = [word for word in other if word.startswith("to=")]
        kinds = [*kind.split(), *(word for word in other if word not in recipients)]
        if len(recipients) > 1 or len(kinds) > 1 or not set(kinds) <= set(used.kinds):
            return None
        recipient = recipients[0].removeprefix("to=") if recipients else ""
        place = start + text.find("to=" + recipient) + len("to=") if recipients else start
        return Header(channel=words[0], recipient=recipient, recipient_at=place)

    def _call(self, header: Header, behind: int) -> Reading[bool]:
        """A message to a tool. Its body is the arguments."""
        name = header.recipient.removeprefix(self._declared.prefix)
        if not self._tells_calls:
            return False
        start = header.recipient_at + len(header.recipient) - len(name)
        if not (yield from self._calls.arguments_of(name, start, self._declared.ends)):
            return False
        if (yield from self._calls.ending(self._declared.ends)):
            self.end()
        else:
            self.body = "content"
        return True
