"""Pixels follow their message as separate frames, and only where needed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from weft.common.errors import InvalidRequest
from weft.common.shared_bytes import SharedName
from weft.engine.server.listener import Listener
from weft.types import messages
from weft.types import messages as m
from weft.types.media_item import MediaItem
from weft.types.messages import decode_parts, encode_parts
from weft.types.sampling import TokenParams


def item(start: int, pixels: bytes) -> MediaItem:
    return MediaItem(key=bytes([start]) * 16, start=start, count=4, grid=(1, 4, 4), pixels=pixels)


def submit(*media: MediaItem, **more: Any) -> m.Submit:
    params = TokenParams(max_tokens=1)
    return m.Submit(sequence=1, request=2, seed=3, prompt_ids=bytes(400), params=params, media=media, **more)


IMAGES = submit(item(0, b"abc" * 16), item(10, bytes(1 << 20)), trace="t")


def test_pixels_are_frames_behind_the_message() -> None:
    frame, *attached = encode_parts(IMAGES)
    assert len(frame) < 1000
    assert attached[1] is IMAGES.media[1].pixels
    assert decode_parts(frame, attached) == IMAGES
    bare = decode_parts(frame)
    assert isinstance(bare, m.Submit)
    assert [one.pixels for one in bare.media] == [b"", b""]


def test_what_has_no_pixels_is_one_frame() -> None:
    for message in (submit(), submit(item(0, b"")), m.Finish(sequence=1)):
        (frame,) = encode_parts(message)
        assert decode_parts(frame) == message


def test_frames_that_belong_nowhere_are_refused() -> None:
    frame, *attached = encode_parts(IMAGES)
    for more in (attached[:1], [*attached, b"x"]):
        with pytest.raises(ValueError):
            decode_parts(frame, more)
    with pytest.raises(ValueError):
        decode_parts(m.encode(m.Finish(sequence=1)), [b"x"])
    with pytest.raises(ValueError):
        decode_parts(m.encode(IMAGES), attached)


def test_what_is_shown_is_named() -> None:
    """Named pixels go to an engine that can open the memory; other pixels are sent as bytes."""
    name = SharedName(pid=1, fd=2, size=48, mark=bytes(16))
    both = submit(msgspec.structs.replace(item(0, b"abc" * 16), shared=name), item(10, b"xyz"))
    frame, *attached = encode_parts(both, by_name=True)
    assert attached == [b"", b"xyz"]
    found = decode_parts(frame, attached)
    assert isinstance(found, m.Submit)
    assert [(one.pixels, one.shared) for one in found.media] == [(b"", name), (b"xyz", None)]
    (frame,) = encode_parts(submit(*both.media[:1]), by_name=True)
    assert decode_parts(frame) == submit(msgspec.structs.replace(item(0, b""), shared=name))
    frame, *attached = encode_parts(both)
    assert attached == [b"abc" * 16, b"xyz"]
    assert decode_parts(frame, attached) == submit(item(0, b"abc" * 16), item(10, b"xyz"))
    with pytest.raises(ValueError):
        decode_parts(encode_parts(both, by_name=True)[0], attached)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    frame, *attached = encode_parts(IMAGES)
    monkeypatch.setattr(messages, "MAX_ATTACHED", 1 << 20)
    with pytest.raises(InvalidRequest):
        encode_parts(IMAGES)
    with pytest.raises(ValueError):
        decode_parts(frame, attached)
    monkeypatch.setattr(messages, "MAX_ATTACHED", 1 << 30)
    monkeypatch.setattr(messages, "MAX_FRAME", 1 << 19)
    with pytest.raises(InvalidRequest):
        encode_parts(IMAGES)


def test_a_head_takes_them_as_views() -> None:
    listener = Listener("tcp://127.0.0.1:*")
    context = zmq.Context()
    with context.socket(zmq.DEALER) as front:
        front.connect(listener.address)
        front.send_multipart(encode_parts(IMAGES), copy=False)
        front.send(m.encode(m.Finish(sequence=7)))
        assert listener.socket.poll(10_000)
        name, body, *attached = listener.receive()
        assert [type(one) for one in (body, *attached)] == [bytes, memoryview, memoryview]
        found = decode_parts(body, attached)
        assert isinstance(found, m.Submit)
        assert [bytes(one.pixels) for one in found.media] == [one.pixels for one in IMAGES.media]
        # It goes on from there: to another process, for example.
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=m.Submit) == IMAGES
        assert listener.socket.poll(10_000)
        assert listener.receive() == [name, m.encode(m.Finish(sequence=7))]
        with pytest.raises(zmq.Again):
            listener.receive()
    listener.close()
    context.term()
