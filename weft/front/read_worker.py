"""A process that reads large requests for the front: ``python -m weft.front.read_worker DESCRIPTOR``.

It takes payloads from the socket that it inherits and answers each, in order, until the socket's other end
is closed. The first payload is a ``Setup``, every other one the kind of a request, a zero byte, what is
known of its images and grammars, another one, and its body.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.common.errors import ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.common.workers import Answer, serve
from weft.front.kinds import KINDS, MADE
from weft.front.proofs import NeedsProof, Told, Unproved
from weft.front.reading import Job, Reader
from weft.front.setup import Setup
from weft.media.headers import ImageHeader
from weft.media.pictures import NeedsFiles, Wanted

log = get_logger(__name__)

NICENESS = 5
"""Steps of the engine go first where cores are short."""


class ReadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A read worker's answer; exactly one of the fields is there."""

    job: Job | None = None
    made: bytes = b""
    """The answer's JSON, where no engine is needed for it."""
    wanted: tuple[Wanted, ...] = ()
    """Files that have to be fetched before it can be read."""
    unproved: Unproved | None = None
    """A grammar that has to be compiled before."""
    error: ErrorInfo | None = None


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the front has found out about a request since it was read first."""

    files: dict[str, ImageHeader] = {}
    """Headers of images that were fetched, by their URLs."""
    verdicts: dict[str, ErrorInfo | None] = {}
    """Why grammars do not compile, or None, by ``digest_of``."""


decode_answer = msgspec.msgpack.Decoder(ReadAnswer).decode


_decode_known = msgspec.json.Decoder(Known).decode


def payload_of(kind: str, body: Iterable[bytes], known: Known = Known()) -> tuple[bytes, ...]:
    """What a worker is sent to read a body in pieces; in pieces, too."""
    return (kind.encode() + b"\0" + msgspec.json.encode(known) + b"\0", *body)


def read_with(reader: Reader, kind: str, body: bytes) -> ReadAnswer:
    """Reads one request. Raises WeftError, Compiling."""
    try:
        if kind in MADE:
            return ReadAnswer(made=MADE[kind](reader, body))
        return ReadAnswer(job=KINDS[kind](reader, body))
    except NeedsFiles as missing:
        return ReadAnswer(wanted=tuple(missing.wanted))
    except NeedsProof as missing:
        return ReadAnswer(unproved=missing.unproved)


def answer_to(reader: Reader, payload: bytes) -> ReadAnswer:
    """Reads one request; whatever goes wrong belongs to it alone."""
    kind, data, body = payload.split(b"\0", 2)
    try:
        known = _decode_known(data)
        return read_with(reader.knowing(known.files, grammars=Told(known.verdicts)), kind.decode(), body)
    except WeftError as error:
        return ReadAnswer(error=error.info())
    except Exception:
        log.exception("a request could not be read")
        return ReadAnswer(error=WeftError("the server failed to read this request").info())


def main() -> None:
    """Runs a read worker: greeted with its ``Setup``, it answers one body after another."""

    def prepare(greeting: bytes) -> Answer:
        setup = msgspec.msgpack.decode(greeting, type=Setup)
        reader = setup.reader(setup.text.load())
        encoder = msgspec.msgpack.Encoder()
        return lambda payload: (encoder.encode(answer_to(reader, payload)),)

    serve(prepare, NICENESS)


if __name__ == "__main__":
    main()
