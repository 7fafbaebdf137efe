"""Access control of a group across hosts, by CURVE keys derived from the group's secret.

The engine knows the one public key of ranks, and admits no other key; a rank knows the engine's public key.
Keys are never sent and never stored in a file. So a stranger can neither join, nor pose as the engine, nor
read messages.
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
    """Key pairs of both sides, in Z85. ``repr`` shows no key."""

    engine: tuple[bytes, bytes]
    """(public, secret) of the listening side."""
    rank: tuple[bytes, bytes]

    def __repr__(self) -> str:
        return "Keys(...)"

    def guard_engine(self, socket: Any) -> None:
        """Set the keys of a listening socket. Call before ``bind``."""
        socket.curve_publickey, socket.curve_secretkey = self.engine
        socket.curve_server = True

    def guard_rank(self, socket: Any) -> None:
        """Set the keys of a connecting socket. Call before ``connect``."""
        socket.curve_publickey, socket.curve_secretkey = self.rank
        socket.curve_serverkey = self.engine[0]


def derive(secret: bytes) -> CurveKeys:
    """Return the keys of a group. Raise ConfigError for a short secret, or if zmq was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError("--group-secret: the installed libzmq has no CURVE", param="--group-secret")
    check_secret(secret)

    def pair(who: bytes) -> tuple[bytes, bytes]:
        private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"weft-" + who).digest())
        return zmq.curve_public(private), private

    return CurveKeys(pair(b"head"), pair(b"rank"))


def read_keys(file: str) -> CurveKeys:
    """Return the keys of the group with the secret stored in ``file``. Raise ConfigError."""
    return derive(read_secret(file))


def admit_ranks(context: Any, keys: CurveKeys) -> ThreadAuthenticator:
    """Make ``context`` refuse peers without the ranks' key. Return the authenticator thread.

    The caller must stop the authenticator before the end of the context.
    """

    class Callback:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == keys.rank[0]

    doorman = ThreadAuthenticator(context)
    doorman.start()
    doorman.configure_curve_callback(domain="*", credentials_provider=Callback())
    return doorman
