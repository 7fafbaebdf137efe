"""The contribution of one token to text: a tokenizer's decoder in parts.

A decoder maps the tokens of a sequence to text. Nearly all decoders work token by token and then join bytes
or strings. ``read_decoder`` recognizes these forms. Text then grows by one token at constant cost and still
equals the decode of the whole. A decoder of any other form is applied to the whole sequence each time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from tokenizers import decoders

Join = Literal["level", "fallback", "plain", "whole"]
"""How pieces become text. level: a UTF-8 byte stream, with invalid parts replaced. fallback: strings, and
runs of single bytes that are text only if the whole run is valid. plain: strings. whole: only the decoder
itself can join.
"""


class TextPiece(msgspec.Struct, frozen=True):
    """One token's part. ``first`` is for the first token of a decode, ``rest`` for all others."""

    first: bytes
    rest: bytes
    byte: bool = False
    """True for a byte token of a byte-fallback vocabulary. ``rest`` is then a single byte."""
    text: str | None = None
    """``rest`` of a byte-level vocabulary as text, if ``rest`` is whole characters; else None."""


class DecoderForm(msgspec.Struct, frozen=True):
    """The recognized form of a decoder."""

    join: Join
    maps: tuple[Callable[[str, bool], str], ...] = ()
    """Functions (token text, is first) -> text, applied in order."""
    strip: str = ""
    """Character removed from the start of the whole text."""
    strip_count: int = 0
    """Maximum number of removed ``strip`` characters."""


_WHOLE = DecoderForm("whole")


def read_decoder(decoder: Any) -> DecoderForm:
    """Return the form of a ``tokenizers`` decoder, or of None.

    An unknown decoder gives the form "whole", which decodes only complete texts.
    """
    spec = None if decoder is None else json.loads(decoder.__getstate__())
    if spec is None:
        return DecoderForm("plain", (lambda text, first: text if first else " " + text,))
    # Per-token stages come first, then at most one joining form. Anything else is "whole".
    stages = _flatten(spec)
    maps: list[Callable[[str, bool], str]] = []
    while stages and (found := _token_map(stages[0])) is not None:
        maps.append(found)
        stages = stages[1:]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return DecoderForm("level", tuple(maps))
    join: Join = "plain"
    if kinds[:1] == ["ByteFallback"]:
        join = "fallback"
        kinds = kinds[1:]
        stages = stages[1:]
    if kinds == []:
        return DecoderForm(join, tuple(maps))
    if kinds == ["Fuse"]:
        return DecoderForm(join, tuple(maps))
    if kinds == ["Fuse", "Strip"] and stages[1]["stop"] == 0:
        return DecoderForm(join, tuple(maps), stages[1]["content"], stages[1]["start"])
    return _WHOLE


def _flatten(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] == "Sequence":
        return [stage for inner in spec["decoders"] for stage in _flatten(inner)]
    return [spec]


def _token_map(spec: dict[str, Any]) -> Callable[[str, bool], str] | None:
    """Return the stage as a function (text of a token, is first) -> text; None for any other stage."""
    kind = spec["type"]
    if kind == "Replace" and "String" in spec["pattern"]:
        old = spec["pattern"]["String"]
        new = spec["content"]
        return lambda text, first: text.replace(old, new)
    if kind == "Metaspace":
        space = spec["replacement"]
        never = spec.get("prepend_scheme", "always") == "never"
        return lambda text, first: text.replace(space, "" if first and not never else " ")
    if kind == "WordPiece":
        later = decoders.WordPiece(prefix=spec["prefix"], cleanup=spec["cleanup"])
        # Behind an empty token, the decoder gives a token the form used inside a text.
        return lambda text, first: later.decode([text] if first else ["", text])
    if kind == "Strip":
        content = spec["content"]
        start = spec["start"]
        stop = spec["stop"]
        strip = decoders.Strip(content=content, left=start, right=stop)
        return lambda text, first: strip.decode([text]) if len(text) >= stop else text
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: character to byte.

    Printable Latin-1 bytes are written as themselves, the other bytes, in order, as the characters from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return table


_ALPHABET = _byte_alphabet()
_LETTERS = {byte: char for char, byte in _ALPHABET.items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def level_bytes(text: str) -> bytes:
    """Return the bytes of a token in a byte-level vocabulary; text outside the alphabet as UTF-8."""
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def level_text(data: bytes) -> str:
    """Return the token for ``data`` in a byte-level vocabulary: the inverse of ``level_bytes``."""
    return "".join([_LETTERS[byte] for byte in data])


def fallback_byte(text: str) -> bytes | None:
    """Return the byte of a token such as ``<0xE4>``, or None for any other token."""
    found = _BYTE_TOKEN.fullmatch(text)
    return None if found is None else bytes([int(found[1], 16)])


def _whole_text(data: bytes) -> str | None:
    """Return the text of ``data``; None for bytes that are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def make_piece(form: DecoderForm, text: str) -> TextPiece:
    """Return the piece of a token with the text ``text``: its bytes at the start of a text and elsewhere."""
    first = text
    rest = text
    for apply in form.maps:
        first = apply(first, True)
        rest = apply(rest, False)
    if form.join == "level":
        data = level_bytes(rest)
        return TextPiece(level_bytes(first), data, text=_whole_text(data))
    if form.join == "fallback" and (byte := fallback_byte(rest)) is not None:
        return TextPiece(byte, byte, True)
    return TextPiece(first.encode(), rest.encode())
