"""Process that reads large requests for the API server: ``python -m weft.front.requests.read_worker
DESCRIPTOR``.

The process takes payloads from an inherited socket and answers each, in order, until the other end is
closed. The first payload is a ``Setup``. Every other payload is the kind of a request, a zero byte, known
facts about the images and grammars, a zero byte, and the body.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.common.errors import ErrorInfo, WeftError
from weft.common.log import get_logger
from weft.common.workers import Answer, serve
from weft.front.requests.kinds import KINDS, MADE
from weft.front.requests.proofs import NeedsProof, Told, Unproved
from weft.front.requests.reading import Job, Reader
from weft.front.requests.setup import Setup
from weft.media.headers import ImageHeader
from weft.media.pictures import NeedsFiles, Wanted

log = get_logger(__name__)

NICENESS = 5
"""Nice value: engine steps go first if cores are scarce."""


class ReadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a read worker. Exactly one of the fields is set."""

    job: Job | None = None
    made: bytes = b""
    """JSON of the answer, if no engine is needed."""
    wanted: tuple[Wanted, ...] = ()
    """Files to fetch before another attempt to read."""
    unproved: Unproved | None = None
    """Grammar to compile before another attempt to read."""
    error: ErrorInfo | None = None


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a request, found by the API server after the first attempt to read."""

    files: dict[str, ImageHeader] = {}
    """URL -> header of a fetched image."""
    verdicts: dict[str, ErrorInfo | None] = {}
    """Digest of a grammar (``digest_of``) -> compile error; None for a grammar that compiles."""


decode_answer = msgspec.msgpack.Decoder(ReadAnswer).decode


_decode_known = msgspec.json.Decoder(Known).decode


def payload_of(kind: str, body: Iterable[bytes], known: Known = Known()) -> tuple[bytes, ...]:
    """Return the payload to read a body, in pieces."""
    return (kind.encode() + b"\0" + msgspec.json.encode(known) + b"\0", *body)


def read_with(reader: Reader, kind: str, body: bytes) -> ReadAnswer:
    """Read one request. Return the job, or the JSON for a kind in ``MADE``, or the missing files or the
    grammar without a verdict. Raises WeftError."""
    try:
        if kind in MADE:
            return ReadAnswer(made=MADE[kind](reader, body))
        return ReadAnswer(job=KINDS[kind](reader, body))
    except NeedsFiles as missing:
        return ReadAnswer(wanted=tuple(missing.wanted))
    except NeedsProof as missing:
        return ReadAnswer(unproved=missing.unproved)


def answer_to(reader: Reader, payload: bytes) -> ReadAnswer:
    """Read the request of one payload and return the answer. Every error becomes an answer; an unexpected
    exception is logged and becomes an internal error."""
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
    """Run a read worker: receive the ``Setup``, then answer one body after another. Returns when the other
    end is closed."""

    def prepare(greeting: bytes) -> Answer:
        """Load the text model named by the ``Setup``. Return the function that answers a payload."""
        setup = msgspec.msgpack.decode(greeting, type=Setup)
        reader = setup.reader(setup.text.load())
        encoder = msgspec.msgpack.Encoder()
        return lambda payload: (encoder.encode(answer_to(reader, payload)),)

    serve(prepare, NICENESS)


if __name__ == "__main__":
    main()
