"""Names of cached prefixes: a chain of hashes, one for each full base block.

    hash[i] = H(hash[i - 1], token ids of block i, media keys of block i)        hash[-1] = root(fields)

So equal hashes mean equal tokens (and media) from position 0, and equal fields, such as a salt. 128 bits of
BLAKE2b: an accidental collision is out of the question, and a wanted one costs 2^64 hashes. Every
variable-length part goes in with its length before it, so that no two different inputs give the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import msgspec

from weft.types.media import MediaItem

DIGEST_BYTES = 16
_NO_MEDIA = bytes(8)  # their number, 0


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


_NO_FIELDS = blake2b(b"salt" + _sized(b""), digest_size=DIGEST_BYTES).digest()


def root(**fields: bytes) -> bytes:
    """Start of the chains that are shared between all sequences of equal ``fields``.

    Empty fields are as if they were not there, so a new field changes no root that does not have the field.
    """
    named = sorted((name.encode(), value) for name, value in fields.items() if value)
    if not named:
        return _NO_FIELDS
    data = b"".join(_sized(name) + _sized(value) for name, value in named)
    return blake2b(b"root" + data, digest_size=DIGEST_BYTES).digest()


def salted_root(salt: str) -> bytes:
    """Start of the chains that are shared between all sequences of equal ``salt``."""
    return root(salt=_text(salt))


def request_root(request: int, salt: str) -> bytes:
    """Start of the chains that only sequences of one request share."""
    return root(request=request.to_bytes(16, "little", signed=True), salt=_text(salt))


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def block_hash(parent: bytes, tokens: bytes, media: Sequence[bytes] = ()) -> bytes:
    """The hash of a block after ``parent``; ``tokens`` are its ids as int32 bytes."""
    rest = len(media).to_bytes(8, "little") + b"".join(map(_sized, media)) if media else _NO_MEDIA
    data = parent + len(tokens).to_bytes(8, "little") + tokens + rest
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def media_keys(items: Iterable[MediaItem], block_size: int) -> dict[int, tuple[bytes, ...]]:
    """For each block with positions of images their keys, each with where the image begins, from the block's
    own begin: equal tokens are the same images only if these are in the same places."""
    keys: dict[int, tuple[bytes, ...]] = {}
    for item in items:
        last = (item.start + item.count - 1) // block_size
        for number in range(item.start // block_size, last + 1):
            begin = item.start - number * block_size
            keys[number] = (*keys.get(number, ()), item.key + begin.to_bytes(8, "little", signed=True))
    return keys


def salted_media(items: tuple[MediaItem, ...], salt: str) -> tuple[MediaItem, ...]:
    """``items`` by keys of their own among sequences of equal ``salt``: what was made of an image is shared
    as prefixes are, so nobody can tell by the time an answer takes that others have sent it."""
    if not salt:
        return items
    salted = _text(salt)
    return tuple(msgspec.structs.replace(item, key=root(media=item.key, salt=salted)) for item in items)


def prompt_hashes(prompt: bytes, salt: str, block_size: int, media: Iterable[MediaItem] = ()) -> list[bytes]:
    """The hashes of the full blocks of ``prompt`` (int32 ids), as caches of that block size have them.
    ``media``: its images."""
    size = 4 * block_size
    parent = salted_root(salt)
    hashes = []
    keys = media_keys(media, block_size)
    for number, begin in enumerate(range(0, len(prompt) - size + 1, size)):
        parent = block_hash(parent, prompt[begin : begin + size], keys.get(number, ()))
        hashes.append(parent)
    return hashes


class HashChain:
    """The block hashes of one sequence, each computed once, when asked for.

    ``media`` maps a block's number to what its placeholder tokens stand for; see ``media_keys``.
    """

    __slots__ = ("_block", "_media", "_root", "hashes")

    def __init__(
        self, root: bytes, block_size: int, media: Mapping[int, tuple[bytes, ...]] | None = None
    ) -> None:
        self._root = root
        self._block = block_size
        self._media = media or {}
        self.hashes: list[bytes] = []
        """Of the leading full blocks, as far as ``grow`` was asked. Only ever appended to."""

    def grow(self, tokens: array[int], upto: int) -> list[bytes]:
        """Extends the chain over the full blocks of ``tokens[:upto]`` and returns all of it.

        ``tokens`` is an int32 array that holds the sequence from its start and only ever grows.
        """
        hashes = self.hashes
        block = self._block
        media = self._media
        have = len(hashes)
        full = upto // block
        if have < full:
            parent = hashes[-1] if hashes else self._root
            for number in range(have, full):
                ids = tokens[number * block : (number + 1) * block].tobytes()
                parent = block_hash(parent, ids, media.get(number, ()) if media else ())
                hashes.append(parent)
        return hashes
