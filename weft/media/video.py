"""Read and decode video files with PyAV, one frame group at a time.

Only this module imports PyAV, at first use. PyAV is an extra (``weft[video]``) and contains FFmpeg. Files are
untrusted: servers run this module in a process with limits. Containers and codecs are allow-lists. A file or
URL named inside a video file is never opened.

    header_of      counts the packets and decodes the first frame
    groups_of      decodes up to the last chosen frame, and yields the pixels of each frame group
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weft.media.decode import view
from weft.media.media_messages import Target
from weft.media.video_header import (
    LEAST_RATE,
    MOST_RATE,
    VIDEO_TOO_LARGE,
    BadVideo,
    VideoHeader,
    container_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

LIBRARY = "av"
"""PyAV."""
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "gif", "png")
"""FFmpeg's names of the permitted decoders."""
MOST_PACKETS = 100_000
"""Maximum frames of a file: 13 minutes at 120 frames per second."""
COMPLETE = 0.9
"""Share of the frames that must decode. Some encoders count frames that are never displayed."""
DEFAULT_RATE = 24.0
"""Frames per second of a file without a rate, as in the reference processors."""


def can_decode_videos() -> bool:
    """Return True if PyAV is installed. Imports nothing."""
    return importlib.util.find_spec(LIBRARY) is not None


def missing_videos() -> BadVideo:
    """Return the error of a server without PyAV."""
    return BadVideo(
        "cannot be decoded: the server has no PyAV; install weft[video] on the server, or send the frames as "
        'a list of images, {"type": "video", "video": [<URL of a frame>, ...]}',
        "no_video",
    )


def load_videos() -> Any:
    """Import PyAV and return the module. Raises BadVideo without PyAV."""
    try:
        av: Any = importlib.import_module(LIBRARY)
        importlib.import_module("av.logging")
    except ImportError:
        raise missing_videos() from None
    av.logging.set_level(None)
    return av


def header_of(data: bytes | memoryview, most_pixels: int) -> VideoHeader:
    """Return the header of a complete file. ``most_pixels``: maximum pixels of a frame.

    Every packet is read, and only the first frame is decoded. Raises BadVideo.
    """
    with _opened(data, most_pixels) as (container, stream):
        count, shown, first = 0, 0, None
        for packet in container.demux(stream):
            # The last packet is empty: it flushes the decoder.
            if packet.size:
                count += 1
                shown += not packet.is_discard
            if count > MOST_PACKETS:
                raise BadVideo(f"has more than {MOST_PACKETS} frames; send a shorter video", VIDEO_TOO_LARGE)
            if first is None:
                first = next(iter(packet.decode()), None)
        if first is None or not shown:
            raise BadVideo("has no frame that can be decoded")
        if stream.frames > count:
            raise BadVideo(f"is cut off: the file has {count} of {stream.frames} frames")
        rate = float(stream.average_rate or stream.guessed_rate or DEFAULT_RATE)
        if not LEAST_RATE <= rate <= MOST_RATE:
            raise BadVideo(f"has {rate:g} frames per second; accepted are {LEAST_RATE:g} to {MOST_RATE:g}")
        return VideoHeader(
            width=first.width, height=first.height, frames=shown, rate=rate, turn=_turn_of(first)
        )


def groups_of(
    data: bytes | memoryview,
    header: VideoHeader,
    groups: Sequence[Sequence[int]],
    target: Target,
    most_pixels: int,
) -> Iterator[bytes]:
    """Yield the pixels of each frame group: uint8 [frames, canvas height, canvas width, 3] as bytes.

    ``groups``: frame numbers of each group, in ascending order over all groups. Only one group and one frame
    of the file are in memory. Raises BadVideo, also for frames unlike ``header``.
    """
    with _opened(data, most_pixels) as (container, stream):
        frames = container.decode(stream)
        frame, at = None, -1
        pixels = b""
        for group in groups:
            made = []
            for number in group:
                fresh = False
                while at < number and (after := next(frames, None)) is not None:
                    _check(after, header)
                    frame, at, fresh = after, at + 1, True
                # A file may have fewer frames than packets. The last frame then replaces the missing frames.
                if frame is None or (at < number and at + 1 < COMPLETE * header.frames):
                    raise BadVideo(f"is damaged or cut off: only {at + 1} of {header.frames} frames decode")
                pixels = view(_upright(frame, header.turn), target) if fresh or not pixels else pixels
                made.append(pixels)
            yield b"".join(made)


def _check(frame: Any, header: VideoHeader) -> None:
    """Raise BadVideo for a damaged frame, or for a frame of another size than the first."""
    if frame.is_corrupt:
        raise BadVideo("cannot be decoded: the file is damaged or cut off")
    if (frame.width, frame.height) != (header.width, header.height):
        raise BadVideo("changes its size; all frames must have the same size")


def _turn_of(frame: Any) -> int:
    """Return the counterclockwise turn of the frame's display matrix in degrees, as a multiple of 90."""
    return round(int(frame.rotation) / 90) * 90 % 360


def _upright(frame: Any, turn: int) -> Image:
    """Return a decoded frame as an RGB image, turned counterclockwise by ``turn`` degrees."""
    from PIL import Image
    from PIL.Image import Transpose

    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    way = {90: Transpose.ROTATE_90, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_270}.get(turn)
    return image if way is None else image.transpose(way)


@contextlib.contextmanager
def _opened(data: bytes | memoryview, most_pixels: int) -> Iterator[tuple[Any, Any]]:
    """Yield (container, video stream) of a file, and close the container afterwards.

    Errors of PyAV inside the block become BadVideo. Raises BadVideo for a file without a video stream, with
    another codec, or with frames above ``most_pixels``.
    """
    av = load_videos()
    # Opening a file already decodes frames of every stream, so the limit of pixels is an option here.
    options = {
        "codec_whitelist": ",".join(CODECS),
        "protocol_whitelist": "none",
        "max_pixels": str(most_pixels),
    }
    try:
        with av.open(io.BytesIO(data), format=container_of(data), options=options) as container:
            stream = _stream_of(container, most_pixels)
            context = stream.codec_context
            # One thread: the worker's limit of CPU time then also bounds the decoding seconds.
            context.thread_count = 1
            context.options = {"max_pixels": str(most_pixels)}
            yield container, stream
    except (BadVideo, GeneratorExit):
        raise
    except MemoryError:
        raise BadVideo(
            "needs more memory to decode than this server allows; send a smaller video", VIDEO_TOO_LARGE
        ) from None
    except Exception:  # FFmpeg's readers raise arbitrary errors for damaged files
        raise BadVideo("cannot be decoded: the file is damaged or cut off") from None


def _stream_of(container: Any, most_pixels: int) -> Any:
    """Return the first video stream that is not a cover picture. Raises BadVideo."""
    cover = importlib.import_module("av.stream").Disposition.attached_pic
    for stream in container.streams.video:
        if not stream.disposition & cover:
            break
    else:
        raise BadVideo("has no video stream; audio alone is not supported")
    context = stream.codec_context
    name = "this codec" if context is None else context.name
    if name not in CODECS:
        raise BadVideo(
            f"is encoded with {name}, which is not supported; use H.264, HEVC, VP8, VP9, AV1 or MPEG-4"
        )
    # FFmpeg reports size 0 for frames that it refused to decode.
    if not context.width * context.height:
        raise BadVideo(
            f"has frames without a size, or of more than {most_pixels} pixels (--max-image-pixels); send a "
            "smaller video",
            VIDEO_TOO_LARGE,
        )
    if context.width * context.height > most_pixels:
        raise BadVideo(
            f"has {context.width} x {context.height} pixels; the limit is {most_pixels} "
            "(--max-image-pixels); send a smaller video",
            VIDEO_TOO_LARGE,
        )
    return stream
