"""Incremental detokenization: one token in, the newly certain text out.

Invariant: all text given out so far is a prefix of the final text, and the final text equals decoding all ids
at once. A character with missing bytes is held back. ``finish`` gives U+FFFD for incomplete characters. The
cost of a token does not depend on the number of earlier tokens, except for a decoder of the form "whole" (see
``pieces``).
"""

from __future__ import annotations

import codecs
import copy
from typing import Protocol

from weft.text.pieces import DecoderForm, TextPiece

REPLACEMENT = "\ufffd"


class PieceSource(Protocol):
    """The interface of a tokenizer for a detokenizer."""

    form: DecoderForm

    def piece(self, token: int) -> TextPiece | None: ...

    def is_special(self, token: int) -> bool: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one sequence. Not thread-safe.

    With ``continues``, the text continues other text (a prompt). The first token is then not the start of a
    text, and a leading space is kept. Without ``continues``, the result equals ``decode(ids)``.
    """

    def __init__(
        self,
        source: PieceSource,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """``visible``: special tokens whose text is shown although special tokens are skipped."""
        self._source = source
        self._visible = visible
        self._skip = skip_special_tokens
        self._join = source.form.join
        self._first = not continues
        self._strip = 0 if continues else source.form.strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        """Byte tokens of an unfinished byte-fallback run. The end of the run decides: valid text, or one
        U+FFFD per byte.
        """
        self._ids: list[int] = []
        """All ids, for a decoder that only decodes the whole."""

    def push(self, token: int) -> str:
        """Add the next token and return the newly certain text.

        Return "" for a skipped or unknown token, and while the text is held back.
        """
        if self._skip and self._source.is_special(token) and token not in self._visible:
            return ""
        if self._join == "whole":
            self._ids.append(token)
            return ""
        piece = self._source.piece(token)
        if piece is None:
            return ""
        # Decoders treat the first token of a text differently (for example the leading space).
        data = piece.first if self._first else piece.rest
        self._first = False
        if self._join == "level":
            return self._utf8.decode(data)
        # The text of a byte run is known only at the end of the run.
        if piece.byte:
            self._run += data
            return ""
        return self._stripped(self._end_run() + data.decode())

    def preview(self) -> str:
        """Return the held-back text in case the sequence ended here: complete characters only.

        The detokenizer does not change. Later tokens may still change this text.
        """
        if self._join == "whole":
            return self._source.decode(self._ids, False).rstrip(REPLACEMENT)
        if not self._run:
            return ""
        try:
            # A copy, because ``_stripped`` counts the removed characters.
            return copy.copy(self)._stripped(self._run.decode())
        except UnicodeDecodeError:
            return ""

    def finish(self) -> str:
        """Return the rest of the text; incomplete bytes become U+FFFD. No token may follow."""
        if self._join == "whole":
            return self._source.decode(self._ids, False)
        if self._join == "level":
            return self._utf8.decode(b"", True)
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        """End the byte run and return its text: valid UTF-8 as a whole, or one U+FFFD per byte."""
        if not self._run:
            return ""
        run = self._run
        self._run = bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Return ``text`` without the leading characters dropped by the decoder at the start of a text.

        The count of characters left to drop is updated.
        """
        if not self._strip or not text:
            return text
        char = self._source.form.strip
        while self._strip and text.startswith(char):
            text = text[len(char) :]
            self._strip = self._strip - 1
        if text:
            self._strip = 0
        return text
