"""Run a media worker that may fetch from loopback, for tests of success."""

from __future__ import annotations

import functools

from weft.media.fetch import Fetcher
from weft.media.media_worker import main

if __name__ == "__main__":
    main(functools.partial(Fetcher, permits=lambda address: address == "127.0.0.1"))
