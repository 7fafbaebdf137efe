"""Keys of a connection between hosts, derived from the secret of the groups.

Writer and receiver each draw a nonce. Frames of each direction are numbered and carry a MAC. The MAC key is
derived from the secret, the direction and both nonces. So no outsider can forge, change, drop or repeat a
frame, in the same connection or in another.
"""

from __future__ import annotations

import hashlib
import secrets

NONCE_BYTES = 32


def new_nonce() -> bytes:
    """Return a random nonce of ``NONCE_BYTES`` bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def keys(secret: bytes, writer_nonce: bytes, receiver_nonce: bytes) -> tuple[bytes, bytes]:
    """Return the MAC keys for frames of the writer and of the receiver, 32 bytes each."""
    base = hashlib.blake2b(secret, digest_size=32, person=b"weft-transfer").digest()

    def key(who: bytes) -> bytes:
        nonces = writer_nonce + receiver_nonce
        return hashlib.blake2b(nonces, digest_size=32, key=base, person=b"weft-" + who).digest()

    return key(b"writer"), key(b"receiver")
