"""Pixels of a Submit on the wire: raw frames after the message, to avoid copies of megabytes.

There is one frame for each image of ``Submit.media``, in order, or no frame at all. For an engine process on
the same host, an image may be sent as the name of shared memory. Then the frame of the image is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.common.errors import InvalidRequest
from weft.types.messages import MAX_FRAME, Submit, ToHead, decode_to_head, encode

MAX_ATTACHED = 1 << 30
"""Maximum bytes of all attachments of a message. A single attachment is limited to ``MAX_FRAME``."""


def encode_parts(message: ToHead, by_name: bool = False) -> tuple[bytes, ...]:
    """Return the frames of the message; attached frames are not copied. ``by_name``: True if the engine
    process can open shared memory of the local process. Raises InvalidRequest over a size limit.
    """
    if not isinstance(message, Submit) or not any(len(item.pixels) for item in message.media):
        return (encode(message),)
    bare = []
    attached: list[bytes] = []
    for item in message.media:
        shared = item.shared if by_name else None
        bare.append(msgspec.structs.replace(item, pixels=b"", shared=shared))
        attached.append(item.pixels if shared is None else b"")
    if max(map(len, attached)) > MAX_FRAME or sum(map(len, attached)) > MAX_ATTACHED:
        raise InvalidRequest("the request's images are too large for one message")
    frame = encode(msgspec.structs.replace(message, media=tuple(bare)))
    # An empty frame marks a named image; no frames at all if every image is named.
    return (frame, *attached) if any(map(len, attached)) else (frame,)


def decode_parts(frame: bytes, attached: Sequence[bytes] = ()) -> ToHead:
    """Return the message of an API server. ``attached``: the frames after the first frame, possibly views.

    Items with ``shared`` have no pixels yet. Raises msgspec.DecodeError (or the subclass ValidationError) or
    ValueError.
    """
    message = decode_to_head(frame)
    if not attached:
        return message
    if not isinstance(message, Submit) or len(attached) != len(message.media):
        raise ValueError("frames that belong to no image")
    pairs = list(zip(message.media, attached, strict=True))
    # The pixels of an image are in one place: inline, in a frame, or in shared memory (with an empty frame).
    twice = any(item.pixels or (item.shared is not None and len(pixels)) for item, pixels in pairs)
    if twice or sum(map(len, attached)) > MAX_ATTACHED:
        raise ValueError("pixels twice, or over the size limit")
    media = tuple(msgspec.structs.replace(item, pixels=pixels) for item, pixels in pairs)
    return msgspec.structs.replace(message, media=media)
