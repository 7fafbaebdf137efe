"""Keys of a connection between hosts: only who knows the secret of the groups can make them.

Writer and receiver each draw a nonce. Frames of each direction are numbered and carry a MAC whose key is
made of the secret, the direction and both nonces, so none can be made, changed, left out or repeated by
others, in this connection or another.
"""

from __future__ import annotations

import hashlib
import secrets

NONCE_BYTES = 32


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def keys(secret: bytes, writer_nonce: bytes, receiver_nonce: bytes) -> tuple[bytes, bytes]:
    """Keys of frames of the writer, and of the receiver, 32 bytes each."""
    base = hashlib.blake2b(secret, digest_size=32, person=b"weft-transfer").digest()

    def key(who: bytes) -> bytes:
        nonces = writer_nonce + receiver_nonce
        return hashlib.blake2b(nonces, digest_size=32, key=base, person=b"weft-" + who).digest()

    return key(b"writer"), key(b"receiver")
