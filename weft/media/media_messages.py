"""Messages between an API server and its media workers: a task and a reply, each followed by raw bytes.

head length (4 bytes, little-endian) | head (msgpack) | rest: file or pixels, never packed
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from weft.common.shared_bytes import SharedName
from weft.media.headers import ImageHeader
from weft.media.media_errors import BadMedia
from weft.media.video_header import BadVideo, VideoHeader

_LENGTH = struct.Struct("<I")
Side: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
Edge: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 20)]


class WorkerRules(msgspec.Struct, frozen=True, kw_only=True):
    """The greeting of a worker: the rules for all tasks."""

    most_bytes: int
    """Maximum bytes of a file."""
    memory: int
    """Bytes the process may map in addition to the memory at its start."""
    seconds: float
    """Maximum seconds of one fetch."""
    allowed: tuple[str, ...] = ()
    """Domains from which files may be fetched."""
    videos: bool = False
    """True for a worker that decodes videos."""
    most_pixels: int = 0
    """Maximum pixels of a video frame."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Size and position of the pixels of one item: an image, or a part (tile) of an image."""

    height: Side
    """Height of the resized image in pixels."""
    width: Side
    canvas: tuple[Side, Side]
    """(height, width) of all pixels. The image is in the upper left corner; the rest is black."""
    part: tuple[Edge, Edge, Side, Side] | None = None
    """(top, left, height, width) of the item on the canvas; None for the whole canvas."""
    resample: Annotated[int, Meta(ge=0, le=5)]
    """Pillow's number of the resize filter."""
    fingerprint: bytes
    """Hash of the model's processing. Equal images with different processing get different keys."""

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) of the item's pixels."""
        return self.canvas if self.part is None else self.part[2:]


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: fetch a file."""

    url: str
    video: bool = False
    """True for a video file."""
    most_bytes: int
    """Maximum bytes of the file."""


class DecodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """One of the files behind a head."""

    header: ImageHeader
    size: Annotated[int, Meta(ge=0)]
    """Size in bytes."""


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: decode the files behind the head, of an image or of a frame group, in order."""

    files: tuple[DecodeFile, ...]
    targets: tuple[Target, ...]
    """One target for each item of the image; a frame group has one item."""
    into: tuple[SharedName | None, ...]
    """Shared memory for the pixels of each item. If writing fails, the reply contains the pixels."""


class ReadVideo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: read the header of the video file behind the head."""


class DecodeVideo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: decode frame groups of the video file behind the head, in order."""

    header: VideoHeader
    groups: tuple[tuple[int, ...], ...]
    """Numbers of the frames of each group."""
    target: Target
    into: tuple[SharedName | None, ...]
    """Shared memory for the pixels of each group. If writing fails, the reply contains the pixels."""


Task: TypeAlias = Fetch | Decode | ReadVideo | DecodeVideo


class MediaDone(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a task. The file or the pixels follow, unless the pixels are in shared memory.

    Pixels are uint8 [frames, height, width, 3].
    """

    reason: str = ""
    """Reason of a failure; see ``BadMedia``."""
    code: str = ""
    frame: int = 0
    """Number of the failed frame."""
    header: VideoHeader | None = None
    """Header of a video file."""
    keys: tuple[bytes, ...] = ()
    """Cache key of each item: of an image, or of each frame group of a video file."""
    written: tuple[bool, ...] = ()
    """True for each item in shared memory. The pixels of the other items follow, in order."""


_encoder = msgspec.msgpack.Encoder()
_task: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)
_done = msgspec.msgpack.Decoder(MediaDone)


def packed(head: Task | MediaDone) -> bytes:
    """Return the bytes in front of the rest: length and head."""
    data = _encoder.encode(head)
    return _LENGTH.pack(len(data)) + data


def task_of(payload: bytes) -> tuple[Task, memoryview]:
    """Return a task and the bytes behind the task. Raises ValueError or msgspec.DecodeError."""
    head, rest = _split(payload)
    return _task.decode(head), rest


def result_of(answer: bytes | bytearray) -> tuple[MediaDone, memoryview]:
    """Return (reply, bytes behind the reply). The bytes are a view into ``answer``. Raises BadMedia for a
    reply with a failure, and ValueError or msgspec.DecodeError for an invalid reply."""
    done, rest = reply_of(answer)
    if done.reason:
        raise BadMedia(done.reason, done.code, done.frame)
    return done, rest


def video_result_of(answer: bytes | bytearray) -> tuple[MediaDone, memoryview]:
    """Return (reply to a task with a video file, bytes behind the reply). Raises BadVideo for a reply with a
    failure, and ValueError or msgspec.DecodeError for an invalid reply."""
    done, rest = reply_of(answer)
    if done.reason:
        raise BadVideo(done.reason, done.code)
    return done, rest


def reply_of(answer: bytes | bytearray) -> tuple[MediaDone, memoryview]:
    """Return a reply and the bytes behind the reply. Raises ValueError or msgspec.DecodeError."""
    head, rest = _split(answer)
    return _done.decode(head), rest


def _split(data: bytes | bytearray) -> tuple[memoryview, memoryview]:
    """Return views of the head and of the rest. Raises ValueError for a message that is too short."""
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ValueError("a message without a header")
    (size,) = _LENGTH.unpack(view[: _LENGTH.size])
    if len(view) < _LENGTH.size + size:
        raise ValueError("a message with a truncated header")
    return view[_LENGTH.size : _LENGTH.size + size], view[_LENGTH.size + size :]
