"""What a front and its media workers say to each other: a task and its answer, each with bytes behind it.

A message is the length of its head (4 bytes, little-endian), the head (msgpack) and the rest: the bytes of a
file, or pixels, which nobody packs or unpacks.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from weft.common.shared_bytes import SharedName
from weft.media.errors import BadMedia
from weft.media.headers import ImageHeader

_LENGTH = struct.Struct("<I")
Side: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]


class WorkerRules(msgspec.Struct, frozen=True, kw_only=True):
    """The greeting of a worker: what holds for all of its tasks."""

    most_bytes: int
    """Of a file."""
    memory: int
    """Bytes that the process may map beside what it has when it starts."""
    seconds: float
    """For one fetch."""
    allowed: tuple[str, ...] = ()
    """Domains that may be fetched from."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The pixels that a model wants of one image."""

    height: Side
    """Of the image, resized."""
    width: Side
    canvas: tuple[Side, Side]
    """(height, width) of the pixels: the image is in their upper left corner, the rest is black."""
    resample: Annotated[int, Meta(ge=0, le=5)]
    """Pillow's number of the filter."""
    fingerprint: bytes
    """Of how the model goes on with the pixels: equal images under unlike processing have unlike keys."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The task of fetching a file."""

    url: str


class DecodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """One of the files behind a head."""

    header: ImageHeader
    size: Annotated[int, Meta(ge=0)]
    """Bytes."""


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make pixels of the files behind the head: of an image, or of a group of a video's frames, in order."""

    files: tuple[DecodeFile, ...]
    target: Target
    into: SharedName | None = None
    """Where the pixels are to be written; what cannot be written there is in the answer."""


Task: TypeAlias = Fetch | Decode


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The task is done: behind it are the file, or the pixels (uint8 [frames, height, width, 3]), if these
    were not written elsewhere."""

    key: bytes = b""
    """Of pixels."""
    reason: str = ""
    """Why there are none; see ``BadMedia``."""
    code: str = ""
    frame: int = 0
    """Of which frame that is said."""


_encoder = msgspec.msgpack.Encoder()
_task: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)
_done = msgspec.msgpack.Decoder(Done)


def packed(head: Task | Done) -> bytes:
    """The bytes before the rest."""
    data = _encoder.encode(head)
    return _LENGTH.pack(len(data)) + data


def task_of(payload: bytes) -> tuple[Task, memoryview]:
    """A task and the bytes behind it. Raises ValueError or msgspec.DecodeError."""
    head, rest = _split(payload)
    return _task.decode(head), rest


def result_of(answer: bytes | bytearray) -> tuple[bytes, memoryview]:
    """(key, the bytes behind the answer). Raises BadMedia, or ValueError or msgspec.DecodeError."""
    head, rest = _split(answer)
    done = _done.decode(head)
    if done.reason:
        raise BadMedia(done.reason, done.code, done.frame)
    return done.key, rest


def _split(data: bytes | bytearray) -> tuple[memoryview, memoryview]:
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ValueError("a message without a head")
    (size,) = _LENGTH.unpack(view[: _LENGTH.size])
    if len(view) < _LENGTH.size + size:
        raise ValueError("a message whose head is cut off")
    return view[_LENGTH.size : _LENGTH.size + size], view[_LENGTH.size + size :]
