"""Access to a group across hosts: processes that know its secret. CURVE keys are derived from the secret.

The head knows the one public key that ranks have, and admits no other; a rank knows the head's. Neither key
travels or lies in any file, so a stranger can neither join nor pose as the head, nor read what is sent.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from weft.common.errors import ConfigError
from weft.config.secret_file import check_secret, read_secret


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Both sides' keys, in Z85. ``repr`` shows none."""

    head: tuple[bytes, bytes]
    """(public, secret)."""
    rank: tuple[bytes, bytes]

    def __repr__(self) -> str:
        return "Keys(...)"

    def guard_head(self, socket: Any) -> None:
        """Before ``bind``."""
        socket.curve_publickey, socket.curve_secretkey = self.head
        socket.curve_server = True

    def guard_rank(self, socket: Any) -> None:
        """Before ``connect``."""
        socket.curve_publickey, socket.curve_secretkey = self.rank
        socket.curve_serverkey = self.head[0]


def derive(secret: bytes) -> CurveKeys:
    """The keys of a group. Raises ConfigError when zmq was built without CURVE, or for a short secret."""
    if not zmq.has("curve"):
        raise ConfigError("--group-secret: the installed libzmq has no CURVE", param="--group-secret")
    check_secret(secret)

    def pair(who: bytes) -> tuple[bytes, bytes]:
        private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"weft-" + who).digest())
        return zmq.curve_public(private), private

    return CurveKeys(pair(b"head"), pair(b"rank"))


def read_keys(file: str) -> CurveKeys:
    """The keys of the group whose secret is in ``file``. Raises ConfigError."""
    return derive(read_secret(file))


def admit_ranks(context: Any, keys: CurveKeys) -> ThreadAuthenticator:
    """Has ``context`` refuse peers without the ranks' key. Stop it before the context ends."""

    class Callback:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == keys.rank[0]

    doorman = ThreadAuthenticator(context)
    doorman.start()
    doorman.configure_curve_callback(domain="*", credentials_provider=Callback())
    return doorman
