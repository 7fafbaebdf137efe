"""Video files decode to the frames of the reference; damaged and foreign files are refused."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import read_video_pyav

from tests.support.films import CODECS, film, pictures, sound_file
from tests.support.pictures import image_file
from weft.config.parts.video_frames import VideoFacts
from weft.media import video
from weft.media.media_errors import BadMedia
from weft.media.media_messages import Target
from weft.media.urls import inline
from weft.media.video import groups_of, header_of
from weft.media.video_header import BadVideo, VideoHeader

MOST = 1 << 20
FACTS = VideoFacts(min_pixels=1, max_pixels=1)


def target(width: int = 64, height: int = 48) -> Target:
    return Target(height=height, width=width, canvas=(height, width), resample=3, fingerprint=b"")


def decoded(file: bytes, numbers: list[int], size: Target | None = None) -> np.ndarray:
    """Return the frames with these numbers, one group each: uint8 [frames, height, width, 3]."""
    header = header_of(file, MOST)
    size = size or target(*reversed(header.shown))
    made = [
        np.frombuffer(pixels, np.uint8).reshape(*size.canvas, 3)
        for pixels in groups_of(file, header, [[number] for number in numbers], size, MOST)
    ]
    return np.stack(made)


@pytest.mark.parametrize("codec", CODECS)
def test_frames_are_those_of_the_reference(codec: str) -> None:
    """Numbers and pixels of the chosen frames equal those of transformers' reader with PyAV."""
    file = film(23, codec, rate=10, audio=codec == "h264")
    header = header_of(file, MOST)
    assert (header.width, header.height, header.frames) == (64, 48, 23)
    assert header.rate == pytest.approx(10, rel=0.02)
    numbers = FACTS.chosen(header.frames, header.rate, 768, fps=3)
    if codec in ("h264", "hevc", "mpeg4", "gif"):  # other containers do not name the number of frames
        theirs, found = read_video_pyav(
            io.BytesIO(file), lambda metadata: np.linspace(0, 22, len(numbers)).round().astype(int)
        )
        assert found.total_num_frames == header.frames
        assert found.fps == pytest.approx(header.rate)
    else:
        theirs = np.stack([np.asarray(one) for one in _all(file)])[numbers]
    assert (decoded(file, numbers) == theirs).all()
    assert 3 < len(numbers) < 23


def _all(file: bytes) -> list[Image.Image]:
    import av

    with av.open(io.BytesIO(file)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


def test_groups_are_resized_and_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is ready before later frames are decoded."""
    file = film(12, g="3", bf="0")
    header = header_of(file, MOST)
    seen: list[int] = []
    monkeypatch.setattr(video, "_check", lambda frame, header: seen.append(1))
    size = target(30, 20)
    groups = groups_of(file, header, [[0, 1], [5, 7], [11]], size, MOST)
    first = next(groups)
    assert len(first) == 2 * 20 * 30 * 3
    assert len(seen) == 2
    rest = list(groups)
    assert [len(one) for one in rest] == [2 * 20 * 30 * 3, 20 * 30 * 3]
    assert len(seen) == 12
    whole = decoded(file, [5])[0]
    expected = np.asarray(Image.fromarray(whole).resize((30, 20), Image.Resampling.BICUBIC))
    assert (np.frombuffer(rest[0], np.uint8)[: expected.size] == expected.ravel()).all()


@pytest.mark.parametrize("turn", [90, 180, -90])
def test_turned_videos_are_upright(turn: int) -> None:
    file = film(4, turn=turn)
    header = header_of(file, MOST)
    assert header.turn == turn % 360
    assert header.shown == ((64, 48) if turn != 180 else (48, 64))
    plain = decoded(film(4), [2])[0]
    assert (decoded(file, [2])[0] == np.rot90(plain, turn // 90)).all()


def test_times_of_a_variable_rate_are_those_of_the_mean_rate() -> None:
    file = film(8, rate=30, times=[0, 1, 2, 3, 30, 60, 61, 90])
    header = header_of(file, MOST)
    assert header.frames == 8
    _, found = read_video_pyav(io.BytesIO(file), lambda metadata: np.arange(8))
    assert header.rate == pytest.approx(found.fps)
    assert 2 < header.rate < 5
    assert len(decoded(file, list(range(8)))) == 8


def test_a_number_may_stand_twice() -> None:
    made = decoded(film(3), [0, 0, 1, 2, 2])
    assert (made[0] == made[1]).all()
    assert (made[3] == made[4]).all()
    assert not (made[1] == made[2]).all()


def cut(file: bytes) -> bytes:
    return file[: len(file) * 2 // 3]


def broken(file: bytes) -> bytes:
    """Return ``file`` with noise over the frames."""
    data = bytearray(file)
    at = data.index(b"mdat") + 4
    noise = np.random.default_rng(1).integers(0, 256, len(data) - at, np.uint8)
    data[at + 60 :] = noise.tobytes()[: len(data) - at - 60]
    return bytes(data)


def start_first() -> bytes:
    """Return a file with the index at the start, of which the end is cut off."""
    import av

    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        options = {"movflags": "faststart"}
        with av.open(io.BytesIO(film(30))) as given, av.open(file.name, "w", options=options) as output:
            stream = output.add_stream_from_template(given.streams.video[0])
            for packet in given.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    output.mux(packet)
        return Path(file.name).read_bytes()[:-600]


HOSTILE = {
    "nothing": (b"", "no bytes|unsupported format"),
    "text": (b"hello " * 100, "unsupported format"),
    "an image": (image_file(), "unsupported format"),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "unsupported format"),
    "a list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "unsupported format"),
    "audio alone": (sound_file(), "no video stream"),
    "a head alone": (film()[:32], "damaged or cut off"),
    "no index": (cut(film(20, "mpeg4")), "no video stream|damaged"),
    "the frames cut off": (start_first(), "cut off"),
    "zeros": (b"\0\0\0\x18ftypisom" + bytes(4000), "damaged or cut off"),
    "a head of WebM": (b"\x1aE\xdf\xa3" + bytes(500), "damaged or cut off"),
    "a head of GIF": (b"GIF89a\x10\0\x10\0\0\0\0;", "damaged or cut off|no frame|no video"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_are_refused(name: str) -> None:
    file, words = HOSTILE[name]
    with pytest.raises(BadVideo, match=words) as caught:
        header_of(file, MOST)
    assert caught.value.code == "invalid_video"


def test_noise_inside_is_refused_where_it_stands() -> None:
    file = broken(film(20))
    with pytest.raises(BadVideo, match=r"damaged or cut off|no frame"):
        decoded(file, [0, 19])


def test_large_frames_are_refused_before_decoding() -> None:
    file = film(3, size=(256, 128))
    with pytest.raises(
        BadVideo, match=r"256 x 128 pixels; the limit is 20000 \(--max-image-pixels\)"
    ) as caught:
        header_of(file, 20000)
    assert caught.value.code == "video_too_large"
    # A container that names a small size does not help: the size inside the stream counts.
    at = file.index(b"avc1", file.index(b"stsd")) + 4 + 24
    assert int.from_bytes(file[at : at + 2], "big") == 256
    lie = file[:at] + b"\0\x10\0\x10" + file[at + 4 :]
    with pytest.raises(BadVideo):
        header_of(lie, 20000)


def test_too_many_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MOST_PACKETS", 10)
    with pytest.raises(BadVideo, match="more than 10 frames") as caught:
        header_of(film(11), MOST)
    assert caught.value.code == "video_too_large"
    assert header_of(film(10), MOST).frames == 10


def test_other_codecs_are_named() -> None:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("ffv1", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        output.mux(stream.encode(av.VideoFrame.from_ndarray(pictures(1)[0], format="rgb24")))
        output.mux(stream.encode())
    with pytest.raises(BadVideo, match=r"encoded with ffv1.*use H\.264"):
        header_of(file.getvalue(), MOST)


def test_a_size_that_changes_is_refused() -> None:
    file = film(6)
    header = header_of(file, MOST)
    other = VideoHeader(width=32, height=48, frames=6, rate=header.rate)
    with pytest.raises(BadVideo, match="changes its size"):
        list(groups_of(file, other, [[0, 3]], target(), MOST))


def test_a_file_may_be_short_of_some_frames() -> None:
    """Some encoders count frames that are never shown; the last frame then stands for these."""
    file = film(20)
    header = header_of(file, MOST)
    more = VideoHeader(width=64, height=48, frames=21, rate=header.rate)
    (pixels,) = groups_of(file, more, [[19, 20]], target(), MOST)
    assert pixels[: len(pixels) // 2] == pixels[len(pixels) // 2 :]
    many = VideoHeader(width=64, height=48, frames=30, rate=header.rate)
    with pytest.raises(BadVideo, match="only 20 of 30 frames decode"):
        list(groups_of(file, many, [[0, 29]], target(), MOST))


@pytest.mark.parametrize("rate", [Fraction(24000, 1001), Fraction(30)])
def test_rates_are_exact(rate: Fraction) -> None:
    assert header_of(film(9, rate=rate), MOST).rate == pytest.approx(float(rate))


@pytest.mark.slow
def test_random_damage_never_escapes() -> None:
    """Any change of bytes gives frames or BadVideo."""
    source = np.random.default_rng(7)
    files = [film(8, codec, size=(32, 32)) for codec in CODECS]
    refused = 0
    for number in range(1500):
        data = bytearray(files[number % len(files)])
        for _ in range(source.integers(1, 8)):
            data[source.integers(8, len(data))] = source.integers(256)
        file = bytes(data[: source.integers(len(data) // 2, len(data) + 1)])
        try:
            header = header_of(file, 1 << 16)
            last = header.frames - 1
            list(groups_of(file, header, [[0, last]], target(32, 32), 1 << 16))
        except BadVideo:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    "head", ["video/mp4", "", "video/webm;codecs=vp8,opus", 'video/mp4;codecs="avc1.42E01E, mp4a.40.2"']
)
def test_data_urls_of_browsers_are_read(head: str) -> None:
    assert inline(f"data:{head};BASE64,AAAA", 100, video=True) == bytes(3)


@pytest.mark.parametrize("url", ["data:video/mp4,AAAA", "data:;a,b,c", "data:video/webm;codecs=a,b,AAAA"])
def test_other_data_urls_get_the_form_of_a_video(url: str) -> None:
    with pytest.raises(BadMedia, match=r"data:video/mp4;base64,\.\.\."):
        inline(url, 100, video=True)
