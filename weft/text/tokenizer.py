"""A checkpoint's tokenizer: text to ids and back. Thread-safe.

Text from outside never becomes a special token (see ``private``). Tokens at the beginning and the end of a
sequence come only from the post-processor of tokenizer.json. transformers 5 does the same: with a
tokenizer.json, the configuration's ``add_bos_token`` is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from weft.common.errors import ConfigError, InvalidRequest
from weft.common.log import get_logger
from weft.text.pieces import DecoderForm, TextPiece, make_piece, read_decoder
from weft.text.private import build_private
from weft.text.segments import Segments
from weft.text.tokenizer_files import TextFiles, read_text_files
from weft.text.vocabularies.merges import FLAGS

log = get_logger(__name__)

LONG_CHARS = 1 << 16
"""Text longer than this, with a limit, is first checked piece by piece."""
CHARS_A_TOKEN = 8
"""Characters per token, more than in any ordinary text."""
CUT_TOKENS = 64
"""More tokens than a cut inside a text can add."""


class TooManyTokens(Exception):
    """A text exceeds the caller's token limit. ``least`` is a lower bound of the token count."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class Tokenizer:
    """A checkpoint's tokenizer: encodes and decodes. Made by ``load``."""

    def __init__(self, files: TextFiles, hidden: Sequence[int] = ()) -> None:
        """``hidden``: ids that no text may produce, even if the files do not mark the ids as special.

        Raises ConfigError if the library cannot read tokenizer.json.
        """
        try:
            self._public = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"the model's tokenizer.json cannot be read: {error}", param="tokenizer"
            ) from None
        self.files = files
        changed = _add_listed(self._public, files)
        changed = _add_named(self._public, files, hidden) or changed
        data = json.loads(self._public.to_str() if changed else files.tokenizer_json)
        added = self._public.get_added_tokens_decoder()
        self.added: dict[str, int] = {token.content: number for number, token in added.items()}
        self.special: dict[str, int] = {
            token.content: number for number, token in added.items() if token.special
        }
        """Text of each special token to its id."""
        self._special_ids = frozenset(self.special.values())
        self._private, self._names = build_private(data, self.special)
        own = [text for text, number in self.added.items() if not added[number].normalized]
        self._segments = Segments(files.segmentation, [self._names.get(text, text) for text in own])
        self._around = _around(self._private)
        self.form: DecoderForm = read_decoder(self._public.decoder)
        self._pieces: dict[int, TextPiece | None] = {}
        longest_first = sorted(self.special, key=lambda text: (-len(text), text))
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        vocab = self._public.get_vocab(with_added_tokens=True)
        self.vocab_size: int = 1 + max(vocab.values(), default=-1)
        """Every id of this tokenizer is smaller. The model's vocabulary may be larger or smaller than this
        number.
        """
        eos = self.special.get(files.named.get("eos_token", ""))
        self.eos_id: int | None = eos
        self.eos_ids: tuple[int, ...] = tuple(sorted({*files.eos_ids, *([] if eos is None else [eos])}))
        """End-of-sequence ids named by the tokenizer, the generation config and the model config."""

    @classmethod
    def load(cls, folder: str | Path, hidden: Sequence[int] = ()) -> Tokenizer:
        """Read a checkpoint's tokenizer. Raises ConfigError for a missing or unusable tokenizer."""
        return cls(read_text_files(folder), hidden)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """Return the ids of ``text``.

        ``add_special_tokens`` adds the tokens of the tokenizer's post-processor (often a
        beginning-of-sequence token). ``parse_special`` turns spelled special tokens into special tokens: only
        for text made by the server, never for a client's text. ``limit``: see ``encode_private``. Raises
        InvalidRequest for lone surrogates, TooManyTokens beyond ``limit``.
        """
        if parse_special and self._special_pattern is not None:
            text = self._special_pattern.sub(lambda match: self._names[match[0]], text)
        return self.encode_private(text, add_special_tokens=add_special_tokens, limit=limit)

    def encode_private(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Return the ids of text with special tokens written by their private names.

        With ``limit``, the work is bounded: a much longer text costs no more than about ``limit`` tokens.
        Raises TooManyTokens beyond ``limit``, InvalidRequest for lone surrogates. The library's batch call
        releases the GIL, so other threads run meanwhile.
        """
        check_text(text)
        if limit is not None and len(text) > max(LONG_CHARS, limit * CHARS_A_TOKEN):
            self._check_pieces(text, limit)
        ids: list[int]
        if self._segments.trivial:
            (encoding,) = self._private.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        else:
            # The post-processor must apply to the whole text once, not to each part.
            before, behind = self._around if add_special_tokens else ([], [])
            parts = self._private.encode_batch_fast(self._segments.split(text), add_special_tokens=False)
            ids = [*before, *(number for part in parts for number in part.ids), *behind]
        if limit is not None and len(ids) > limit:
            raise TooManyTokens(len(ids))
        return ids

    def encode_cut(self, text: str, other: str | None = None, limit: int | None = None) -> list[int]:
        """Return the ids of ``text``, or of a pair of texts in the tokenizer's own form, with special tokens.

        ``limit``: keep at most so many ids. The ids of the text end early; special tokens behind the text
        stay. With ``limit``, the work is bounded as in ``encode_private``. Raises InvalidRequest for lone
        surrogates.
        """
        check_text(text)
        if limit is not None:
            text = self.shortened(text, limit)
            other = None if other is None else self.shortened(other, limit)
        if other is None:
            ids = self.encode_private(text, add_special_tokens=True)
        elif self._segments.trivial:
            check_text(other)
            # The batch call releases the GIL.
            (encoding,) = self._private.encode_batch_fast([(text, other)], add_special_tokens=True)
            ids = encoding.ids
        else:
            before, between, behind = _around_pair(self._private)
            bare = [self.encode_private(part, add_special_tokens=False) for part in (text, other)]
            ids = [*before, *bare[0], *between, *bare[1], *behind]
        if limit is None or len(ids) <= limit:
            return ids
        behind = self._around[1][:limit]
        return [*ids[: limit - len(behind)], *behind]

    def shortened(self, text: str, limit: int) -> str:
        """Return the beginning of ``text``, with more than ``limit`` tokens if ``text`` has more.

        The first ``limit`` tokens stay the same. The work is bounded as in ``encode_private``.
        """
        if len(text) <= max(LONG_CHARS, limit * CHARS_A_TOKEN):
            return text
        least = 0
        for start in range(0, len(text), LONG_CHARS):
            (encoding,) = self._private.encode_batch_fast(
                [text[start : start + LONG_CHARS]], add_special_tokens=False
            )
            least += max(len(encoding) - CUT_TOKENS, 0)
            # The new end of the text changes fewer than CUT_TOKENS tokens, all behind the limit.
            if least > limit + CUT_TOKENS:
                return text[: start + LONG_CHARS]
        return text

    def _check_pieces(self, text: str, limit: int) -> None:
        """Raise TooManyTokens if the pieces of ``text`` prove that ``text`` exceeds ``limit``.

        A cut changes only the tokens around the cut, by fewer than ``CUT_TOKENS`` tokens.
        """
        least = 0
        for start in range(0, len(text), LONG_CHARS):
            piece = text[start : start + LONG_CHARS]
            (encoding,) = self._private.encode_batch_fast([piece], add_special_tokens=False)
            least += max(len(encoding) - CUT_TOKENS, 0)
            if least > limit:
                raise TooManyTokens(least)

    def private_name(self, special: str) -> str:
        """Return the private name of a special token for ``encode_private``. Never shown to clients. Raises
        KeyError.
        """
        return self._names[special]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Unknown ids give no text; invalid UTF-8 gives U+FFFD."""
        text: str = self._public.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token: int) -> bool:
        """Return True if ``skip_special_tokens`` drops this id."""
        return token in self._special_ids

    def piece(self, token: int) -> TextPiece | None:
        """Return a token's contribution to text, cached; None for an unknown id."""
        try:
            return self._pieces[token]
        except KeyError:
            text = self._public.id_to_token(token)
            result = None if text is None else make_piece(self.form, text)
            self._pieces[token] = result
            return result

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token inside a text. The bytes of a special token are its name."""
        piece = self.piece(token)
        return b"" if piece is None else piece.rest

    def token_text(self, token: int) -> str:
        """Return the text of one token. Incomplete UTF-8 becomes U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return (ids that the post-processor puts before a text, ids behind a text). Encodes a sample text."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a").ids
    starts = range(len(whole) - len(bare) + 1)
    start = next((at for at in starts if whole[at : at + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def _around_pair(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int], list[int]]:
    """Return (ids that the post-processor puts before a pair of texts, ids between the texts, ids behind
    them). Encodes a sample pair. Without a form for pairs, the ids around a single text are used."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a", "a").ids
    if whole == [*bare, *bare]:
        before, behind = _around(tokenizer)
        return before, [], behind
    size = len(bare)
    starts = [at for at in range(len(whole) - size + 1) if whole[at : at + size] == bare]
    first, last = (starts[0], starts[-1]) if starts else (0, 0)
    return whole[:first], whole[first + size : last], whole[last + size :]


def check_text(text: str, param: str | None = None) -> None:
    """Raise InvalidRequest for a string with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the text holds a lone surrogate, which is not valid Unicode", param=param
        ) from None


def _add_listed(tokenizer: tokenizers.Tokenizer, files: TextFiles) -> bool:
    """Add tokens, in place, that the configuration lists with ids behind the vocabulary of tokenizer.json.

    Fine-tuned models may have an old tokenizer.json beside a new configuration. Return True if any token was
    added. A token whose id would differ is not added: a warning names the token.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    known = set(vocabulary.values())
    # The library gives new tokens the ids behind the largest id of an added token and behind the model.
    end = max(tokenizer.get_vocab_size(False), 1 + max(tokenizer.get_added_tokens_decoder(), default=-1))
    found = list[AddedToken]()
    for number, entry in sorted(files.added.items()):
        if number in known or entry["content"] in vocabulary:
            continue
        if number != end + len(found):
            log.warning(
                "the configuration lists the token %r with id %d, which is not in tokenizer.json: not used",
                entry["content"],
                number,
            )
            continue
        flags = {name: entry[name] for name in FLAGS if isinstance(entry.get(name), bool)}
        found.append(AddedToken(entry["content"], **{"normalized": False, **flags}))
    if found:
        tokenizer.add_tokens(found)
    return bool(found)


def _add_named(tokenizer: tokenizers.Tokenizer, files: TextFiles, hidden: Sequence[int] = ()) -> bool:
    """Mark tokens as special, in place, that the configuration, or ``hidden``, names but tokenizer.json does
    not mark.

    Return True if any token was marked. Tokens outside the vocabulary are ignored: the model has no row for
    such tokens.
    """
    added = tokenizer.get_added_tokens_decoder()
    known = {token.content for token in added.values() if token.special}
    # Four sources: roles, extra special tokens, end ids, and ids of placeholders for images.
    names = [*files.named.values(), *files.extra]
    names += [added[number].content for number in files.eos_ids if number in added]
    names += [text for number in hidden if (text := tokenizer.id_to_token(number)) is not None]
    missing = [
        text for text in dict.fromkeys(names) if text not in known and tokenizer.token_to_id(text) is not None
    ]
    if missing:
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in missing])
    return bool(missing)
