"""Names of cached prefixes: a chain of hashes, one for each full base block.

    hash[i] = H(hash[i - 1], token ids of block i, media keys of block i)        hash[-1] = root(fields)

So equal hashes mean equal tokens and media from position 0, and equal fields, such as a salt. The hash is 128
bits of BLAKE2b: an accidental collision is negligible, and an attack costs 2^64 hashes. Every part of
variable length is hashed after the length, so two different inputs never give the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import msgspec

from weft.types.media_item import MediaItem

DIGEST_BYTES = 16
_NO_MEDIA = bytes(8)  # number of media keys: 0


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


_NO_FIELDS = blake2b(b"salt" + _sized(b""), digest_size=DIGEST_BYTES).digest()


def root(**fields: bytes) -> bytes:
    """Return the root hash shared by all sequences with equal ``fields``.

    Empty fields count as absent. So a new field does not change the roots of sequences without the field.
    """
    named = sorted((name.encode(), value) for name, value in fields.items() if value)
    if not named:
        return _NO_FIELDS
    data = b"".join(_sized(name) + _sized(value) for name, value in named)
    return blake2b(b"root" + data, digest_size=DIGEST_BYTES).digest()


def salted_root(salt: str, adapter: str = "", weights: bytes = b"") -> bytes:
    """Return the root hash shared by all sequences with equal ``salt``, ``adapter`` and ``weights``.

    ``adapter``: digest of the LoRA adapter; "" for the model alone, with the root of the salt alone.
    ``weights``: see ``weft.types.weights.prefix_name``; b"" for the weights of the start.
    """
    return root(salt=_text(salt), adapter=_text(adapter), weights=weights)


def request_root(request: int, salt: str, adapter: str = "", weights: bytes = b"") -> bytes:
    """Return a root hash shared only by sequences of one prompt (``request``), salt, ``adapter`` and
    ``weights``."""
    number = request.to_bytes(16, "little", signed=True)
    return root(request=number, salt=_text(salt), adapter=_text(adapter), weights=weights)


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def block_hash(parent: bytes, tokens: bytes, media: Sequence[bytes] = ()) -> bytes:
    """Return the hash of a block after ``parent``. ``tokens``: the token ids as int32 bytes."""
    rest = len(media).to_bytes(8, "little") + b"".join(map(_sized, media)) if media else _NO_MEDIA
    data = parent + len(tokens).to_bytes(8, "little") + tokens + rest
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def media_keys(items: Iterable[MediaItem], block_size: int) -> dict[int, tuple[bytes, ...]]:
    """Return the image keys of each block with image positions.

    Each key includes the position of the image relative to the block: equal tokens are the same content only
    if the same images are in the same places. The key of a group of frames includes ``MediaItem.lag``:
    equal frames at another rate have other rope positions, and so are other content.
    """
    keys: dict[int, tuple[bytes, ...]] = {}
    for item in items:
        last = (item.start + item.count - 1) // block_size
        # Never 0: ``block_events`` pads the name with zeros.
        name = item.key if item.lag is None else item.key + (item.lag + 1).to_bytes(8, "little", signed=True)
        for number in range(item.start // block_size, last + 1):
            begin = item.start - number * block_size
            keys[number] = (*keys.get(number, ()), name + begin.to_bytes(8, "little", signed=True))
    return keys


def salted_media(items: tuple[MediaItem, ...], salt: str) -> tuple[MediaItem, ...]:
    """Return ``items`` with keys shared only among sequences of equal ``salt``.

    Embeddings are shared like prefixes. Without the salt, response times would reveal images of other
    clients.
    """
    if not salt:
        return items
    salted = _text(salt)
    return tuple(msgspec.structs.replace(item, key=root(media=item.key, salt=salted)) for item in items)


def prompt_hashes(
    prompt: bytes,
    salt: str,
    block_size: int,
    media: Iterable[MediaItem] = (),
    adapter: str = "",
    weights: bytes = b"",
) -> list[bytes]:
    """Return the hashes of the full blocks of ``prompt`` (int32 ids), equal to the hashes in caches of the
    same block size.

    ``media``: the images of the prompt. ``adapter`` and ``weights``: see ``salted_root``.
    """
    size = 4 * block_size
    parent = salted_root(salt, adapter, weights)
    hashes = []
    keys = media_keys(media, block_size)
    for number, begin in enumerate(range(0, len(prompt) - size + 1, size)):
        parent = block_hash(parent, prompt[begin : begin + size], keys.get(number, ()))
        hashes.append(parent)
    return hashes


class HashChain:
    """The block hashes of one sequence. Each hash is computed once, on demand.

    ``media`` maps the number of a block to the image keys of the block, see ``media_keys``.
    """

    __slots__ = ("_block", "_media", "_root", "_start", "hashes")

    def __init__(
        self, root: bytes, block_size: int, media: Mapping[int, tuple[bytes, ...]] | None = None
    ) -> None:
        self._root = root
        self._block = block_size
        self._media = media or {}
        self._start = (0, root)
        """Number of a block, and the parent of the hash of this block."""
        self.hashes: list[bytes] = []
        """Hashes of the leading full blocks, as far as ``grow`` has computed. Append-only."""

    def diverged(self, tokens: array[int], computed: int, mark: bytes) -> HashChain:
        """Return a chain with the hashes of this chain over the full blocks of ``tokens[:computed]``. Later
        hashes differ from the hashes of every chain without this ``mark``."""
        full = computed // self._block
        hashes = self.grow(tokens, computed)[:full]
        parent = hashes[-1] if hashes else self._root
        made = HashChain(self._root, self._block, self._media)
        made.hashes, made._start = hashes, (full, root(parent=parent, mark=mark))
        return made

    def grow(self, tokens: array[int], upto: int) -> list[bytes]:
        """Extend the chain over the full blocks of ``tokens[:upto]`` and return the complete chain.

        ``tokens``: int32 array with the whole sequence; must only ever grow.
        """
        hashes = self.hashes
        block = self._block
        media = self._media
        have = len(hashes)
        full = upto // block
        if have < full:
            first, begin = self._start
            parent = begin if have == first else hashes[-1]
            for number in range(have, full):
                ids = tokens[number * block : (number + 1) * block].tobytes()
                parent = block_hash(parent, ids, media.get(number, ()) if media else ())
                hashes.append(parent)
        return hashes
