"""Pixels of a Submit on the wire: raw frames behind the message, so nobody copies megabytes to pack them.

One frame for each image of ``Submit.media``, in order, or none at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.common.errors import InvalidRequest
from weft.types.messages import MAX_FRAME, Submit, ToHead, decode_to_head, encode

MAX_ATTACHED = 1 << 30
"""Bytes of all attachments of a message; of each one ``MAX_FRAME``."""


def encode_parts(message: ToHead) -> tuple[bytes, ...]:
    """The message's frames, the attached ones as they are. Raises InvalidRequest over a size limit."""
    if not isinstance(message, Submit) or not any(len(item.pixels) for item in message.media):
        return (encode(message),)
    attached = tuple(item.pixels for item in message.media)
    if max(map(len, attached)) > MAX_FRAME or sum(map(len, attached)) > MAX_ATTACHED:
        raise InvalidRequest("the request's images are too large for one message")
    bare = tuple(msgspec.structs.replace(item, pixels=b"") for item in message.media)
    return (encode(msgspec.structs.replace(message, media=bare)), *attached)


def decode_parts(frame: bytes, attached: Sequence[bytes] = ()) -> ToHead:
    """A front's message. ``attached``: the frames behind the first one, which may be views.

    Raises msgspec.DecodeError (or its ValidationError) or ValueError.
    """
    message = decode_to_head(frame)
    if not attached:
        return message
    if not isinstance(message, Submit) or len(attached) != len(message.media):
        raise ValueError("frames that belong to no image")
    if any(item.pixels for item in message.media) or sum(map(len, attached)) > MAX_ATTACHED:
        raise ValueError("pixels twice, or over the size limit")
    pairs = zip(message.media, attached, strict=True)
    media = tuple(msgspec.structs.replace(item, pixels=pixels) for item, pixels in pairs)
    return msgspec.structs.replace(message, media=media)
