"""Lines of a batch: format, checks, order, seeds and output records."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec

from weft.common.errors import ErrorInfo

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDPOINTS = (
    CHAT, COMPLETIONS, "/v1/embeddings", RESPONSES, "/v1/rerank", "/v1/score", "/v1/classify",
)  # fmt: skip
"""Routes that a line may name."""
SEEDED = frozenset({CHAT, COMPLETIONS, RESPONSES})
"""Routes with a parameter ``seed``."""
MOST_LINES = 50_000
MOST_BYTES = 200 << 20
"""Maximum bytes of an input file."""
MOST_ID = 512
"""Maximum characters of a ``custom_id``."""
MOST_ERRORS = 100
"""Maximum number of reported errors of a file."""
MOST_BLANK = 20
"""Maximum lines including blank lines, per allowed line: at most this factor times ``Checks.most_lines``."""
WINDOW = 2_000
"""Number of lines that are sorted together by prompt."""
_KEY_BYTES = 4096
"""Bytes of a prompt that are compared for the order."""


class BatchLine(msgspec.Struct, frozen=True):
    """One line of an input file. Unknown fields have no effect."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class LineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of an input file. ``line``: number of the line, from 1; None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Place(NamedTuple):
    """Place of a line in its input file."""

    line: int
    """Number of the line, from 0. Blank lines count."""
    start: int
    size: int
    custom_id: str
    model: str = ""
    """Model of the line."""


class Checks(NamedTuple):
    """Checks of the lines of one file."""

    endpoint: str | None
    """Route that every line must name; None for any of ``ENDPOINTS``."""
    has_model: Callable[[str], bool]
    default_model: str | None = None
    """Model of a line without ``model``; None if every line must name a model."""
    most_lines: int = MOST_LINES
    most_line: int = 1 << 30
    """Maximum bytes of a line."""


def line_of(data: bytes) -> BatchLine:
    """Return the parsed line. Raises msgspec.DecodeError (also for a wrong type), or RecursionError."""
    return msgspec.json.decode(data, type=BatchLine)


def read_places(file: BinaryIO, checks: Checks) -> tuple[list[Place], list[LineError]]:
    """Return (places in the order of the run, errors) of an input file.

    The file is read once, line by line. Reading stops after ``MOST_ERRORS`` errors. Within each window of
    ``WINDOW`` lines, lines are sorted by prompt, so that the prefix cache of the engine finds common
    prefixes. The lines of one model run together, so that no model is loaded twice. Models keep the order of
    their first lines.
    """
    places: list[Place] = []
    errors: list[LineError] = []
    window: list[tuple[bytes, Place]] = []
    known: set[str] = set()
    names: dict[str, str] = {}
    for number, (start, data) in enumerate(_lines(file, checks.most_line)):
        if number >= MOST_BLANK * checks.most_lines:
            errors.append(LineError("too_many_lines", "the file has too many blank lines"))
            break
        if data is None:
            found: BatchLine | LineError = LineError(
                "line_too_long", f"the line has more than {checks.most_line} bytes", line=number + 1
            )
        elif not data.strip():
            continue
        else:
            found = _checked(data, number + 1, checks, known)
        if isinstance(found, LineError):
            errors.append(found)
        elif data is not None:
            # ``_checked`` has checked that the line names a model, or that there is a default.
            model = str(model_of(found.body, checks.default_model or ""))
            model = names.setdefault(model, model)
            place = Place(number, start, len(data), found.custom_id, model)
            window.append((prompt_key(found.body), place))
        if len(known) > checks.most_lines:
            errors.append(LineError("too_many_lines", f"the file has more than {checks.most_lines} lines"))
        if len(errors) >= MOST_ERRORS or len(known) > checks.most_lines:
            break
        if len(window) == WINDOW:
            places += _sorted(window)
            window = []
    places += _sorted(window)
    if len(names) > 1:
        order = {name: number for number, name in enumerate(names)}
        places.sort(key=lambda place: order[place.model])
    if not places and not errors:
        errors.append(LineError("empty_file", "the file has no lines"))
    return places, errors


def _lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (offset, bytes without the line end) of each line; None for the bytes of a line of more than
    ``most`` bytes. A byte order mark at the beginning belongs to no line."""
    start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    file.seek(start)
    while data := file.readline(most + 2):
        size = len(data)
        if whole := data.endswith(b"\n") or size <= most:
            yield start, data.rstrip(b"\r\n")
        while not whole:
            data = file.readline(1 << 20)
            size += len(data)
            if whole := not data or data.endswith(b"\n"):
                yield start, None
        start += size


def model_of(body: dict[str, Any], default: Any) -> Any:
    """Return ``model`` of a body; ``default`` if missing or null."""
    model = body.get("model")
    return default if model is None else model


def _sorted(window: Sequence[tuple[bytes, Place]]) -> list[Place]:
    return [place for _, place in sorted(window)]


def prompt_key(body: dict[str, Any]) -> bytes:
    """Return the beginning of the prompt as bytes, a sort key: prompts with a common prefix sort together."""
    parts = [body.get(name) for name in ("tools", "instructions", "messages", "prompt", "input", "query")]
    return msgspec.json.encode([part for part in parts if part is not None])[:_KEY_BYTES]


def _checked(data: bytes, number: int, checks: Checks, known: set[str]) -> BatchLine | LineError:
    """Return the line, or the first error. Adds the id of a valid line to ``known``.

    Of the body, only ``stream`` and ``model`` are checked. The route checks the rest when the line runs.
    """
    # Checks from the outside in, so that the first error is the first to correct: JSON, id, route, body.
    try:
        line = line_of(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError("invalid_json_line", f"the line is not a valid request: {error}", line=number)

    def wrong(code: str, message: str, param: str) -> LineError:
        return LineError(code, message, param, number)

    if not 0 < len(line.custom_id) <= MOST_ID:
        return wrong("invalid_custom_id", f"custom_id must have 1 to {MOST_ID} characters", "custom_id")
    if line.custom_id in known:
        return wrong("duplicate_custom_id", "another line has this custom_id", "custom_id")
    if line.method != "POST":
        return wrong("invalid_method", "method must be POST", "method")
    allowed = ENDPOINTS if checks.endpoint is None else (checks.endpoint,)
    if line.url not in allowed:
        return wrong("invalid_url", f"url must be {' or '.join(allowed)}", "url")
    if line.body.get("stream"):
        return wrong("stream_not_supported", "stream must be false in a batch", "body.stream")
    model = model_of(line.body, checks.default_model)
    if not isinstance(model, str):
        return wrong("model_not_found", "the line must name a model of the server", "body.model")
    if not checks.has_model(model):
        return wrong("model_not_found", f"the server does not serve the model {model[:64]!r}", "body.model")
    known.add(line.custom_id)
    return line


def line_seed(seed: int, custom_id: str) -> int:
    """Return the seed of a line, below 2**63. Every attempt gets the same seed."""
    digest = hashlib.blake2b(custom_id.encode(), key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def body_of(line: BatchLine, seed: int, default_model: str | None = None) -> bytes:
    """Return the body of the request of a line.

    A line without a seed gets ``line_seed``, so that every attempt has the same output. ``store`` of the
    Responses API is false by default.
    """
    body = dict(line.body)
    if line.url in SEEDED and body.get("seed") is None:
        body["seed"] = line_seed(seed, line.custom_id)
    if line.url == RESPONSES:
        body.setdefault("store", False)
    if default_model is not None:
        body["model"] = model_of(body, default_model)
    return msgspec.json.encode(body)


def sequences_of(line: BatchLine) -> int:
    """Return an estimate of the sequences of a line: at least 1."""
    n = line.body.get("n")
    prompts = line.body.get("prompt", line.body.get("input"))
    many = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int | dict)
    return (n if type(n) is int and n > 0 else 1) * (len(prompts) if many and prompts else 1)


class BatchAnswer(msgspec.Struct, frozen=True):
    """HTTP answer of a line."""

    status: int
    request_id: str
    body: bytes
    """JSON."""


RECORD_BEGIN = b'{"id":"batch_req_'
"""First bytes of every output record."""


def record_id(batch: str, custom_id: str) -> str:
    """Return the id of an output record."""
    return "batch_req_" + hashlib.blake2b(f"{batch}/{custom_id}".encode(), digest_size=12).hexdigest()


def record_of(batch: str, custom_id: str, answer: BatchAnswer) -> bytes:
    """Return the output record of an answered line, with a line end."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": msgspec.Raw(answer.body),
    }
    return _record(batch, custom_id, response, None)


def undone_record(batch: str, custom_id: str, error: ErrorInfo) -> bytes:
    """Return the record of a line without an answer, with a line end."""
    return _record(batch, custom_id, None, {"code": error.code, "message": error.message})


def _record(batch: str, custom_id: str, response: Any, error: Any) -> bytes:
    record = {
        "id": record_id(batch, custom_id),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(record) + b"\n"
