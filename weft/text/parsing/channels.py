"""Read the headers of channel messages and route the bodies to reasoning, content or a call."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weft.text.parsing.calls import CallReader
from weft.text.parsing.declaration import Channels
from weft.text.parsing.tape import Reading, Tape

MAX_HEADER = 256
MAX_UNKNOWN = 3
"""Unknown words allowed in a header. A header with more unknown words is text."""
Body: TypeAlias = Literal["content", "reasoning"]


class ChannelHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed header, and the position of the recipient in the text."""

    channel: str
    recipient: str
    recipient_at: int


class ChannelReader:
    """The channels of one output. Between messages ``body`` is None, and only a header can follow."""

    def __init__(
        self, tape: Tape, declared: Channels, reader: CallReader, *, reasoning: bool, calls: bool
    ) -> None:
        """Without ``reasoning``, reasoning channels become content.

        Without ``calls``, messages to tools are no calls.
        """
        self.body: Body | None = None
        self._tape = tape
        self._declared = declared
        self._calls = reader
        self._tells_reasoning = reasoning
        self._tells_calls = calls

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts at the start of a header. Between messages, a header may be empty."""
        used = self._declared
        return (
            (used.start, used.channel) if self.body is not None else (used.start, used.channel, used.message)
        )

    @property
    def endings(self) -> tuple[str, ...]:
        """Texts at the end of a message, with or without a header."""
        return self._declared.ends

    def begin(self, *, in_reasoning: bool) -> Reading[None]:
        """Read the start of the output and set ``body``.

        The prompt ends either behind the role or inside a reasoning block (``in_reasoning``).
        """
        if in_reasoning:
            self.body = "reasoning"
            return
        tape = self._tape
        if (yield from tape.literal(" to=", "to=")) is not None:
            tape.at = 0
            if not (yield from self.header(0)):
                tape.at = 0

    def end(self) -> None:
        """End the open message."""
        self.body = None
        self._tape.begin_part()

    def header(self, start: int) -> Reading[bool]:
        """Read the header at ``start``, and the body too if the message is a call. Set ``body`` and return
        True.

        Return False if no header stands there: the cursor is back at ``start``. Return False also if a call
        does not begin: the cursor is then behind the header. With False, ``body`` is unchanged and nothing is
        given out.
        """
        tape = self._tape
        read = yield from self._until_message(start)
        header = None if read is None else self._parsed(read, start)
        bare = not read and not tape.line_blank  # an empty header is allowed only at the start of a message
        if read is None or header is None or bare:
            tape.at = start
            return False
        behind = start + len(read) + len(self._declared.message)
        if header.recipient:
            tape.at = behind
            return (yield from self._call(header, behind))
        reasoning = header.channel in self._declared.reasoning and self._tells_reasoning
        tape.skip(behind)
        self.body = "reasoning" if reasoning else "content"
        tape.begin_part()
        return True

    def _until_message(self, start: int) -> Reading[str | None]:
        """Return the text of the header without the mark at the end; None if no header ends within
        ``MAX_HEADER`` characters.

        Waits for more text. The cursor does not move.
        """
        tape = self._tape
        used = self._declared
        while True:
            text = tape.slice(start, min(tape.end, start + MAX_HEADER))
            header, found, _ = text.partition(used.message)
            # An end mark inside means that the message has no header.
            if any(mark in header for mark in used.ends):
                return None
            if found:
                return header
            if len(text) == MAX_HEADER or not (yield from tape.more()):
                return None

    def _parsed(self, text: str, start: int) -> ChannelHeader | None:
        """Return the meaning of a header, or None for text without a header.

        Models write headers twice, leave the channel out and invent words. The last channel counts. Unknown
        words are markup, with two exceptions. More than ``MAX_UNKNOWN`` unknown words look like a sentence.
        Unknown words before a second header may be a message without its mark.
        """
        used = self._declared
        if not all(piece.startswith(used.role) for piece in text.split(used.start)[1:]):
            return None
        spaced = text.replace(used.start + used.role, " ").replace(used.constrain, " ")
        before, _, after = spaced.rpartition(used.channel)
        earlier, words = before.replace(used.channel, " ").split(), after.split()
        # A recipient may stand before or behind the channel; the last recipient counts.
        recipients = [word for word in (*earlier, *words) if word.startswith("to=")]
        known = {*used.reasoning, *used.texts, *used.kinds, *recipients}
        if not known.issuperset(earlier) or len([word for word in words if word not in known]) > MAX_UNKNOWN:
            return None
        name = words[0] if words and used.channel in text else ""
        channels = (*used.reasoning, *used.texts)
        channel = next((one for one in channels if name.startswith(one)), used.texts[0])
        recipient = recipients[-1].removeprefix("to=") if recipients else ""
        if recipient in used.nobody:
            recipient = ""
        place = start + text.rfind("to=" + recipient) + len("to=") if recipient else start
        return ChannelHeader(channel=channel, recipient=recipient, recipient_at=place)

    def _call(self, header: ChannelHeader, behind: int) -> Reading[bool]:
        """Read the arguments of a message to a tool: the body of the message.

        Set ``body``: None behind an end mark, else "content". Return False if no call begins.
        """
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
