"""Byte-level BPE by ranks (tiktoken) in the form of a tokenizer.json.

tiktoken merges the neighbours with the lowest rank of the merged token first. A word that is a token stays
whole. A tokenizer.json expresses the same rules with ``ignore_merges`` and a list of merges. The list has
*every* split of every token, in the order of the tokens' ranks.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from weft.text.pieces import level_text
from weft.text.vocabularies.converted import unusable


class Special(msgspec.Struct, frozen=True):
    """An added token. Only ``control`` tokens are hidden from text in both directions."""

    text: str
    number: int
    control: bool = True


def tokenizer_json(
    name: str,
    tokens: Sequence[bytes],
    specials: Sequence[Special],
    pattern: str,
    *,
    first_id: int = 0,
    begin: str | None = None,
) -> str:
    """Return a tokenizer.json.

    ``tokens`` are in rank order; the first has the id ``first_id``.

    ``begin``: text of the special token at the start of a sequence. Raises ConfigError with the file's
    ``name`` for contradictory tokens. The same error reports bytes without a token and an unsupported
    ``pattern``.
    """
    letters = [level_text(token) for token in tokens]
    ids = {text: first_id + rank for rank, text in enumerate(letters)}
    if len(ids) != len(letters):
        raise unusable(name, "two tokens have the same bytes")
    if not all(level_text(bytes([byte])) in ids for byte in range(256)):
        raise unusable(name, "some bytes have no token")
    merges = merges_by_rank(letters)
    taken = set(ids.values())
    for special in specials:
        # A token of the same letters would take the place of the special token.
        if special.text in ids or special.number in taken:
            raise unusable(name, f"the special token {special.text!r} ({special.number}) is listed twice")
        ids[special.text] = special.number
        taken.add(special.number)
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    try:
        words = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise unusable(name, f"its word pattern is not supported ({error})") from error
    letters_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters_of])
    tokenizer.decoder = decoders.ByteLevel()
    for special in sorted(specials, key=lambda special: special.number):
        add = tokenizer.add_special_tokens if special.control else tokenizer.add_tokens
        add([AddedToken(special.text, normalized=False, special=special.control)])
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0",
            pair=f"{begin}:0 $A:0 {begin}:1 $B:1",
            special_tokens=[(begin, ids[begin])],
        )
    made: str = tokenizer.to_str(pretty=False)
    return made


def merges_by_rank(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, in the order of the made tokens' ranks."""
    rank = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        # Every split, because tiktoken does not record which merge made a token.
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [(left, right) for left, right in pairs if left in rank and right in rank]
        merges += sorted(found, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def token_bytes(name: str, text: str | bytes) -> bytes:
    """Return the bytes of a base64 text. Raises ConfigError."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise unusable(name, f"{text!r} is not base64") from error


def added_ids(specials: Sequence[Special]) -> Mapping[str, int]:
    """Return text to id."""
    return {special.text: special.number for special in specials}
