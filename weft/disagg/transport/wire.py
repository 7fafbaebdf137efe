"""Frames between two ranks: the socket protocol except the payload.

    length   u32     of the body, at most MOST_BODY
    payload  u32     bytes behind the body, at most MOST_PAYLOAD
    mac      16 B    keyed BLAKE2b of the frame's number on this connection, both lengths and the body
    body             one of the structs below, msgpack
    payload          the spans of a Write, back to back; the digests are in the body

The key belongs to one connection: derived from the secret and from random nonces of both ends
(``weft.disagg.transport.connection_keys``). On one host there is no key. The payload is covered by digests
only: digests find faults, but give neither secrecy nor protection against an attacker between two hosts.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from weft.common.errors import ErrorInfo, WeftError
from weft.types.transfer import U64, TransferKey

VERSION = 1
MOST_BODY = 1 << 20
MOST_PAYLOAD = 4 << 20
MOST_OFFER = 64 << 10
"""Maximum bytes of ``MemoryOffer.data``."""
HEADER = struct.Struct("<II16s")
NO_KEY = b""
_COUNT = struct.Struct("<QII")


class BadFrame(WeftError):
    """Bytes that form no valid frame, or a frame from a peer without the secret."""

    code, blame = "bad_transfer_frame", "peer"


class _WireFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    pass


class PeerHello(_WireFrame, frozen=True):
    """First frame of a connection, in both directions: identity of the sending rank."""

    version: int
    transport: str
    incarnation: U64
    """Incarnation of the frame's sender."""
    wanted: U64
    """From a writer: expected incarnation of the receiving rank. From a receiver: 0."""
    rank: U64
    """Rank of the frame's sender within its group."""
    nonce: Annotated[bytes, Meta(max_length=32)] = b""
    regions: Annotated[tuple[U64, ...], Meta(max_length=4096)] = ()
    """From a writer with shared memory: bytes of each region. The descriptors come with the frame."""


class KeyProof(_WireFrame, frozen=True):
    """Proof of the secret, first from the writer, then from the receiver. The MAC is the proof. Only with a
    secret."""


class SpansFrame(_WireFrame, frozen=True):
    """Spans from one region to one region."""

    source: U64
    target: U64
    spans: bytes
    """int64 [n, 3], little-endian: offset in the source, offset in the target, length."""


class WriteFrame(_WireFrame, frozen=True):
    """Writer to receiver: take these spans."""

    key: TransferKey
    number: U64
    parts: Annotated[tuple[SpansFrame, ...], Meta(max_length=4096)]
    digests: bytes
    """uint64, one per span, in order."""


class MemoryOffer(_WireFrame, frozen=True):
    """Writer to receiver, once, after the proof and before the first write: how an engine of the receiver
    reads the writer's memory. Only with a transport whose receivers read."""

    data: Annotated[bytes, Meta(max_length=MOST_OFFER)]
    """Opaque here: the transport decodes the bytes."""


class AnswerFrame(_WireFrame, frozen=True):
    """Receiver to writer: result of a write."""

    key: TransferKey
    number: U64
    error: ErrorInfo | None


Frame = PeerHello | KeyProof | MemoryOffer | WriteFrame | AnswerFrame

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def pack(frame: Frame, number: int, key: bytes, payload: int = 0) -> bytes:
    """Return header and body of the ``number``-th frame of a direction. Raises BadFrame for a frame over a
    limit."""
    body = _encoder.encode(frame)
    check_sizes(len(body), payload)
    return HEADER.pack(len(body), payload, _mac(key, number, len(body), payload, body)) + body


def unpack(body: bytes | bytearray | memoryview, mac: bytes, number: int, key: bytes, payload: int) -> Frame:
    """Return the frame of ``body``. Raises BadFrame for a wrong MAC or an invalid body."""
    if not hmac.compare_digest(mac, _mac(key, number, len(body), payload, body)):
        raise BadFrame("a frame was made with another key, or was changed in transit")
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, UnicodeDecodeError) as error:
        raise BadFrame(f"not a frame of version {VERSION}: {error}") from None


def check_sizes(body: int, payload: int) -> None:
    """Raise BadFrame for sizes over the limits."""
    if body > MOST_BODY or payload > MOST_PAYLOAD:
        raise BadFrame(f"a frame of {body} bytes and {payload} bytes of payload is over the limits")


def spans_of(part: SpansFrame) -> np.ndarray:
    """Return int64 [n, 3]. Raises BadFrame for a wrong size."""
    if len(part.spans) % 24:
        raise BadFrame("spans are not a whole number of three int64")
    return np.frombuffer(part.spans, "<i8").reshape(-1, 3).copy()


def digests_of(frame: WriteFrame, spans: int) -> np.ndarray:
    """Return uint64 [spans]. Raises BadFrame for a wrong size."""
    if len(frame.digests) != 8 * spans:
        raise BadFrame("the number of digests differs from the number of spans")
    return np.frombuffer(frame.digests, "<u8")


def _mac(
    key: bytes, number: int, body_size: int, payload: int, body: bytes | bytearray | memoryview
) -> bytes:
    made = hashlib.blake2b(_COUNT.pack(number, body_size, payload), digest_size=16, key=key)
    made.update(body)
    return made.digest()
