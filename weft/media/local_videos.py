"""Video files of callers in this process (``LLM``), fetched and decoded here."""

from __future__ import annotations

from collections.abc import Sequence

from weft.media.fetch import Fetcher
from weft.media.media_errors import BadMedia
from weft.media.media_items import item_of
from weft.media.pictures import FileToFetch, NeedsFiles, Picture, Pictures
from weft.media.video import groups_of, header_of
from weft.media.video_choice import VideoSource, choosing
from weft.media.video_header import BadVideo, Header, VideoHeader, of_video
from weft.types.media_item import MediaItem
from weft.types.video_clip import VideoClip


class LocalVideos:
    """The video files of one request."""

    def __init__(self, pictures: Pictures, fetcher: Fetcher) -> None:
        self._pictures = pictures
        self._fetcher = fetcher
        self._files: dict[str, memoryview] = {}
        self.headers: dict[str, Header] = {}
        """Headers by name of the file."""

    def choose(self, files: Sequence[VideoSource], most: int) -> list[VideoClip]:
        """Return the chosen frames of each file. Fetches and reads files here. ``most``: maximum frames of a
        file. Raises InvalidRequest with the part."""
        chosen = choosing(self._pictures, self.headers)
        assert chosen is not None
        try:
            return chosen(files, most)
        except NeedsFiles as needs:
            for wanted in needs.wanted:
                self._read(wanted)
        return chosen(files, most)

    def _read(self, wanted: FileToFetch) -> None:
        """Fetch one file if necessary, and read its header. Raises InvalidRequest with the part."""
        section = self._pictures.section
        try:
            data = wanted.data
            if wanted.address:
                data = memoryview(self._fetcher.fetch(wanted.address, section.max_video_bytes, video=True))
            self.headers[wanted.url] = header_of(data, section.max_image_pixels)
            self._files[wanted.url] = data
        except BadVideo as error:
            raise error.at(wanted.where) from None
        except BadMedia as error:
            raise of_video(error).at(wanted.where) from None

    def items(self, groups: Sequence[Picture]) -> list[MediaItem]:
        """Return one item per frame group of one file, in order, each at position 0, with pixels. Raises
        InvalidRequest with the part."""
        first = groups[0].frames[0]
        assert isinstance(first.header, VideoHeader)
        numbers = [[frame.number for frame in group.frames] for group in groups]
        target, most = groups[0].target, self._pictures.section.max_image_pixels
        try:
            return [
                item_of(group, pixels)
                for group, pixels in zip(
                    groups,
                    groups_of(self._files[first.url], first.header, numbers, target, most),
                    strict=True,
                )
            ]
        except BadVideo as error:
            raise error.at(groups[0].where) from None
