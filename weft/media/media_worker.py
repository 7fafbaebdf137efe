"""A process that fetches or decodes images for an API server.

    python -m weft.media.media_worker CPU_SECONDS DESCRIPTOR

Like other workers, the process reads payloads from an inherited socket and replies to each, until the other
end closes. The payload bytes are untrusted. Memory and CPU time of a task are bounded. If the process dies,
only its current image fails.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from weft.common.confine import confine
from weft.common.log import get_logger
from weft.common.priority import LONG_S, step_back
from weft.common.workers import Answer, serve
from weft.media.decode import can_decode, group_pixels, load
from weft.media.fetch import Fetcher
from weft.media.headers import ImageHeader
from weft.media.media_errors import UNREACHABLE, BadMedia
from weft.media.media_messages import Decode, Fetch, MediaDone, WorkerRules, packed, task_of
from weft.media.video import can_decode_videos, load_videos
from weft.media.video_tasks import items_reply, video_reply

log = get_logger(__name__)

T = TypeVar("T")

NICENESS = 10
"""Niceness of a worker. Workers that read requests have higher priority."""
LONG_NICENESS = 19
"""Niceness of a long decode."""
GRACE_S = 1.0
"""Seconds after a fetch's own deadline before a signal interrupts the fetch, also in a name lookup."""


def main(make: Callable[..., Fetcher] = Fetcher) -> None:
    """Run a media worker until the other end closes. ``make`` makes the fetcher."""

    def prepare(greeting: bytes) -> Answer:
        """Load Pillow if installed, and limit the process's memory. Return the function that answers a
        payload."""
        rules = msgspec.msgpack.decode(greeting, type=WorkerRules)
        if can_decode():
            load()
        if rules.videos and can_decode_videos():
            load_videos()
        confine(rules.memory)
        fetcher = make(rules.allowed, rules.most_bytes, rules.seconds)
        return lambda payload: answer_to(payload, fetcher, rules)

    serve(prepare, NICENESS, float(sys.argv[1]))


def answer_to(payload: bytes, fetcher: Fetcher, rules: WorkerRules) -> tuple[bytes, ...]:
    """Return the reply to one task, in pieces. Errors of the image, lack of memory and time-outs are replies,
    too. If possible, pixels go to shared memory instead of the reply. Raises ValueError or
    msgspec.DecodeError for an invalid payload."""
    try:
        task, data = task_of(payload)
        if isinstance(task, Decode):
            # Long decodes must not slow down the engines and other requests.
            return _lowering_priority(lambda: _decoded(task, data))
        if not isinstance(task, Fetch):
            return _lowering_priority(lambda: video_reply(task, data, rules.most_pixels))
        with _interrupted(rules.seconds + GRACE_S):
            return packed(MediaDone()), fetcher.fetch(task.url, task.most_bytes, video=task.video)
    except BadMedia as error:
        return (packed(MediaDone(reason=error.reason, code=error.code, frame=error.frame)),)
    except MemoryError:
        reason = "needs more memory than this server allows; send a smaller image"
        return (packed(MediaDone(reason=reason, code="image_too_large")),)
    except TimeoutError:
        return (packed(MediaDone(reason="took too long to fetch", code=UNREACHABLE)),)


def _lowering_priority(work: Callable[[], T]) -> T:
    """Run ``work`` in a new thread and return the result, or raise the exception of ``work``. After
    ``LONG_S`` seconds, the thread gets the lowest priority. Raises MemoryError if no thread can start."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    try:
        thread.start()
    except RuntimeError:
        raise MemoryError from None  # no memory left for the thread's stack
    thread.join(LONG_S)
    if thread.is_alive():
        step_back(thread, LONG_NICENESS)
        thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _decoded(task: Decode, data: memoryview) -> tuple[bytes, ...]:
    """Return the reply to ``task``. Raises BadMedia and MemoryError."""
    return items_reply(group_pixels(_files(task, data), task.targets), task.targets, task.into)


def _files(task: Decode, data: memoryview) -> list[tuple[bytes | memoryview, ImageHeader]]:
    """Return (bytes, header) of each file of ``task``. ``data``: the concatenated files."""
    ends = list(itertools.accumulate(file.size for file in task.files))
    cuts = zip([0, *ends], ends, task.files, strict=False)
    return [(data[begin:end], file.header) for begin, end, file in cuts]


@contextlib.contextmanager
def _interrupted(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after ``seconds``. Works only in the main thread: uses the
    process's real-time timer, and restores the handler of SIGALRM."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
