"""Lines of batches: checks with line numbers, order by prompts, seeds and records."""

from __future__ import annotations

import codecs
import io
import json
from typing import Any

import pytest

from weft.batch.lines import (
    CHAT,
    WINDOW,
    BatchAnswer,
    Checks,
    LineError,
    body_of,
    line_of,
    line_seed,
    read_places,
    record_of,
    sequences_of,
)

CHECKS = Checks(CHAT, {"m"}.__contains__)


def line(name: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": changes.pop("text", "hello")}]}
    body |= changes.pop("body", {})
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body, **changes}


def file_of(*lines: Any) -> io.BytesIO:
    return io.BytesIO(
        b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
    )


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b'{"custom_id": 1}', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("b", method="GET"), "invalid_method", "method"),
        (line("b", url="/v1/completions"), "invalid_url", "url"),
        (line("b", body={"stream": True}), "stream_not_supported", "body.stream"),
        (line("b", body={"model": "x"}), "model_not_found", "body.model"),
        (line("b", body={"model": None}), "model_not_found", "body.model"),
    ],
)
def test_a_wrong_line_is_named(bad: Any, code: str, param: str | None) -> None:
    places, errors = read_places(file_of(line("a"), b"", bad, line("c")), CHECKS)
    assert [(e.code, e.param, e.line) for e in errors] == [(code, param, 3)]
    assert [place.custom_id for place in places] == ["a", "c"]


def test_a_missing_and_an_unknown_model_are_told_apart() -> None:
    bodies: list[dict[str, Any]] = [{"model": None}, {"model": 5}, {"model": "x\n" + "y" * 1000}]
    _, errors = read_places(file_of(*(line(str(n), body=body) for n, body in enumerate(bodies))), CHECKS)
    missing = "the line must name a model of the server"
    assert [error.message for error in errors[:2]] == [missing] * 2
    assert errors[2].message == f"the server does not serve the model 'x\\n{'y' * 62}'"


def test_a_file_has_limits() -> None:
    assert read_places(file_of(b""), CHECKS)[1] == [LineError("empty_file", "the file has no lines")]
    blank = io.BytesIO(b"\n" * 61 + json.dumps(line("a")).encode())
    assert [e.code for e in read_places(blank, CHECKS._replace(most_lines=3))[1]] == ["too_many_lines"]
    many = file_of(*(line(str(n)) for n in range(4)))
    assert [e.code for e in read_places(many, CHECKS._replace(most_lines=3))[1]] == ["too_many_lines"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_has_a_limit_and_is_not_read_beyond(end: bytes) -> None:
    good = json.dumps(line("a")).encode()
    checks = CHECKS._replace(most_line=len(good))

    class Bounded(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:  # type: ignore[override]
            assert size is not None
            assert 0 < size <= 1 << 20
            return super().readline(size)

    long = json.dumps(line("b", text="x" * (3 << 20))).encode()
    data = good + b"\r\n" + long + b"\n" + json.dumps(line("c")).encode() + end
    places, errors = read_places(Bounded(data), checks)
    assert [(e.code, e.line) for e in errors] == [("line_too_long", 2)]
    assert [p.custom_id for p in places] == ["a", "c"]
    for place in places:
        assert line_of(data[place.start : place.start + place.size]).custom_id == place.custom_id


def test_a_byte_order_mark_belongs_to_no_line() -> None:
    data = codecs.BOM_UTF8 + json.dumps(line("a")).encode() + b"\n"
    places, errors = read_places(io.BytesIO(data), CHECKS)
    assert errors == []
    assert line_of(data[places[0].start :][: places[0].size]).custom_id == "a"


def test_lines_with_common_prompts_follow_each_other() -> None:
    lines = [line(f"{n}", text=f"{'abc'[n % 3] * 50} {n}") for n in range(WINDOW + 30)]
    source = file_of(*lines)
    places, errors = read_places(source, CHECKS)
    assert errors == []
    texts = [
        json.loads(source.getvalue()[p.start :][: p.size])["body"]["messages"][0]["content"][0]
        for p in places
    ]
    assert texts[:WINDOW] == sorted(texts[:WINDOW])
    assert texts[WINDOW:] == sorted(texts[WINDOW:])
    assert sorted(p.line for p in places) == list(range(WINDOW + 30))


def test_a_line_has_the_same_seed_in_every_attempt() -> None:
    made = json.loads(body_of(line_of(json.dumps(line("a")).encode()), 7))
    assert made["seed"] == line_seed(7, "a") < 2**63
    assert line_seed(7, "a") != line_seed(8, "a")
    assert line_seed(7, "a") != line_seed(7, "b")
    own = line_of(json.dumps(line("a", body={"seed": 5})).encode())
    assert json.loads(body_of(own, 7))["seed"] == 5
    embed = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["a", "b"]}}
    assert json.loads(body_of(line_of(json.dumps(embed).encode()), 7, "m")) == {
        "input": ["a", "b"],
        "model": "m",
    }
    assert sequences_of(line_of(json.dumps(embed).encode())) == 2
    assert sequences_of(line_of(json.dumps(line("a", body={"n": 3})).encode())) == 3


def test_a_record_has_openais_form() -> None:
    made = record_of("batch_1", "a", BatchAnswer(200, "req-1", b'{"x":1}'))
    assert made.endswith(b"}\n")
    found = json.loads(made)
    assert found.pop("id").startswith("batch_req_")
    assert found == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req-1", "body": {"x": 1}},
        "error": None,
    }
