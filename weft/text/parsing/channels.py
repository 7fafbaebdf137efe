"""Reads the headers of messages in channels, and routes their bodies: to thoughts, content or a call."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weft.text.parsing.calls import CallReader
from weft.text.parsing.declaration import Channels
from weft.text.parsing.tape import Reading, Tape

MAX_HEADER = 256
MAX_UNKNOWN = 3
"""Words of a header that mean nothing known. A header with more is text."""
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
        """What a header may begin with. Between messages a header may be empty."""
        used = self._declared
        return (
            (used.start, used.channel) if self.body is not None else (used.start, used.channel, used.message)
        )

    @property
    def endings(self) -> tuple[str, ...]:
        """What ends a message, also one that came without a header."""
        return self._declared.ends

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
        bare = not read and not tape.line_blank  # an empty header stands only where a message begins
        if read is None or header is None or bare:
            tape.at = start
            return False
        behind = start + len(read) + len(self._declared.message)
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
            if any(mark in header for mark in used.ends):
                return None
            if found:
                return header
            if len(text) == MAX_HEADER or not (yield from tape.more()):
                return None

    def _parsed(self, text: str, start: int) -> Header | None:
        """The meaning of a header; None for text that is none.

        Models write headers twice, leave the channel out and invent words. The last channel counts. Words
        that mean nothing are markup, unless they are so many that they look like a sentence, or stand
        before a second header, where they may be a message that lacks its mark.
        """
        used = self._declared
        if not all(piece.startswith(used.role) for piece in text.split(used.start)[1:]):
            return None
        spaced = text.replace(used.start + used.role, " ").replace(used.constrain, " ")
        before, _, after = spaced.rpartition(used.channel)
        earlier, words = before.replace(used.channel, " ").split(), after.split()
        recipients = [word for word in (*earlier, *words) if word.startswith("to=")]
        known = {*used.thoughts, *used.texts, *used.kinds, *recipients}
        if not known.issuperset(earlier) or len([word for word in words if word not in known]) > MAX_UNKNOWN:
            return None
        name = words[0] if words and used.channel in text else ""
        channels = (*used.thoughts, *used.texts)
        channel = next((one for one in channels if name.startswith(one)), used.texts[0])
        recipient = recipients[-1].removeprefix("to=") if recipients else ""
        if recipient in used.nobody:
            recipient = ""
        place = start + text.rfind("to=" + recipient) + len("to=") if recipient else start
        return Header(channel=channel, recipient=recipient, recipient_at=place)

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
