"""A process that reads large requests for the front: ``python -m weft.front.read_worker DESCRIPTOR``.

It takes payloads from the socket that it inherits and answers each, in order, until the socket's other end
is closed. The first payload is a ``Setup``, every other one the kind of a request, a zero byte, and its body.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable

import msgspec

from weft.common import signals
from weft.common.allocator import keep_heap_small, trim_heap
from weft.common.errors import ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.common.workers import HEADER, receive
from weft.front.kinds import KINDS, MADE
from weft.front.reading import Job, Reader
from weft.front.setup import Setup

log = get_logger(__name__)

NICENESS = 5
"""Steps of the engine go first where cores are short."""


class ReadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One of them is there."""

    job: Job | None = None
    made: bytes = b""
    """The answer's JSON, where no engine is needed for it."""
    error: ErrorInfo | None = None


decode_answer = msgspec.msgpack.Decoder(ReadAnswer).decode


def payload_of(kind: str, body: Iterable[bytes]) -> tuple[bytes, ...]:
    """What a worker is sent to read a body in pieces; in pieces, too."""
    return (kind.encode() + b"\0", *body)


def answer_to(reader: Reader, payload: bytes) -> ReadAnswer:
    """Reads one request; whatever goes wrong belongs to it alone."""
    kind, _, body = payload.partition(b"\0")
    try:
        name = kind.decode()
        if name in MADE:
            return ReadAnswer(made=MADE[name](reader, body))
        return ReadAnswer(job=KINDS[name](reader, body))
    except WeftError as error:
        return ReadAnswer(error=error.info())
    except Exception:
        log.exception("a request could not be read")
        return ReadAnswer(error=WeftError("the server failed to read this request").info())


def main() -> None:
    signals.ignore()  # the front ends its workers: they live as long as its socket
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with (
        contextlib.suppress(ConnectionError),  # the front is gone
        socket.socket(fileno=int(sys.argv[1])) as link,
        link.makefile("rwb") as stream,
    ):
        keep_heap_small()
        setup = msgspec.msgpack.decode(receive(stream), type=Setup)
        reader = setup.reader(setup.text.load())
        encoder = msgspec.msgpack.Encoder()
        while payload := receive(stream):
            answer = encoder.encode(answer_to(reader, payload))
            del payload
            stream.write(HEADER.pack(len(answer)))
            stream.write(answer)
            stream.flush()
            del answer
            trim_heap()


if __name__ == "__main__":
    main()
