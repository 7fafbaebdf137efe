"""Incremental detokenization: one token in, the text that became certain out.

Always: all text given so far is a prefix of the final text, which is exactly what decoding all ids at once
gives. A character whose bytes are not all there yet is held back; ``finish`` gives U+FFFD for what stays
incomplete. The cost of a token does not depend on how many came before (but for a decoder that only works
on a whole text, see ``pieces``).
"""

from __future__ import annotations

import codecs
import copy
from typing import Protocol

from weft.text.pieces import DecoderForm, TextPiece

REPLACEMENT = "\ufffd"


class PieceSource(Protocol):
    """What a detokenizer needs of a tokenizer."""

    form: DecoderForm

    def piece(self, token: int) -> TextPiece | None: ...

    def is_special(self, token: int) -> bool: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one sequence. Not thread-safe.

    With ``continues`` the text goes on from other text (a prompt): its first token is no start of text, so a
    leading space that a decoder would drop there stays. Without it the result equals ``decode(ids)``.
    """

    def __init__(
        self,
        source: PieceSource,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """``visible``: special tokens that give text although special ones are skipped."""
        self._source = source
        self._visible = visible
        self._skip = skip_special_tokens
        self._join = source.form.join
        self._first = not continues
        self._strip = 0 if continues else source.form.strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        """Byte-fallback run that has not ended: text, or one U+FFFD a byte, depending on its end."""
        self._ids: list[int] = []
        """All ids, where only the whole can be decoded."""

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is certain now and was not before."""
        if self._skip and self._source.is_special(token) and token not in self._visible:
            return ""
        if self._join == "whole":
            self._ids.append(token)
            return ""
        piece = self._source.piece(token)
        if piece is None:
            return ""
        data = piece.first if self._first else piece.rest
        self._first = False
        if self._join == "level":
            return self._utf8.decode(data)
        if piece.byte:
            self._run += data
            return ""
        return self._stripped(self._end_run() + data.decode())

    def preview(self) -> str:
        """Held-back text that would follow if the sequence ended here, as far as its characters are whole.

        Later tokens may still turn it into something else.
        """
        if self._join == "whole":
            return self._source.decode(self._ids, False).rstrip(REPLACEMENT)
        if not self._run:
            return ""
        try:
            return copy.copy(self)._stripped(self._run.decode())
        except UnicodeDecodeError:
            return ""

    def finish(self) -> str:
        """The rest of the text. No token may follow."""
        if self._join == "whole":
            return self._source.decode(self._ids, False)
        if self._join == "level":
            return self._utf8.decode(b"", True)
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        """The text of the byte run, which has ended: valid as a whole, or replaced byte by byte."""
        if not self._run:
            return ""
        run = self._run
        self._run = bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """``text`` less the leading characters that the decoder drops at the start of the whole."""
        if not self._strip or not text:
            return text
        char = self._source.form.strip
        while self._strip and text.startswith(char):
            text = text[len(char) :]
            self._strip = self._strip - 1
        if text:
            self._strip = 0
        return text
