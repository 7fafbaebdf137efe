"""/v1/files and /v1/batches of a real server, with the client of OpenAI."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message

from tests.support.processes import commands, with_role
from tests.support.servers import Running
from tests.support.slowness import deadline
from weft.batch.lines import CHAT
from weft.front.batches import file_routes
from weft.front.batches.service import room_of

Start = Any


def lines(count: int, bad: int | None = 2, url: str = CHAT, **changes: Any) -> bytes:
    """Return an input file. Line ``bad`` has a body that the route refuses."""
    made = []
    for n in range(count):
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": f"n{n}"}],
            "max_tokens": 8,
            **changes,
        }
        if n == bad:
            body["temperature"] = -1
        made.append({"custom_id": f"c{n}", "method": "POST", "url": url, "body": body})
    return "".join(json.dumps(one) + "\n" for one in made).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches") / "dir"


@pytest.fixture(scope="module")
def server(start_fake: Start, folder: Path) -> Running:
    return start_fake(  # type: ignore[no-any-return]
        batch_dir=str(folder),
        batch_max_bytes="1M",
        max_num_seqs=8,
        api_key=["one", "two", "three"],
        batch_max_open=3,
        batch_max_files=12,
        batch_max_lines=50,
    )


def client_of(server: Running, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=deadline(20))


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


ENDS = ("completed", "failed", "expired", "cancelled")


def ended(client: openai.OpenAI, batch: str, seconds: float = 20) -> Any:
    until = time.monotonic() + deadline(seconds)
    while (found := client.batches.retrieve(batch)).status not in (
        "completed",
        "failed",
        "expired",
        "cancelled",
    ):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def records(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    found = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def test_a_batch_from_its_upload_to_its_output(server: Running, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines(20)), purpose="batch")
    assert (file.purpose, file.filename, file.bytes) == ("batch", "in.jsonl", len(lines(20)))
    assert client.files.content(file.id).content == lines(20)
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"name": "x"}
    )
    assert (made.status, made.metadata, made.input_file_id) == ("validating", {"name": "x"}, file.id)
    batch = ended(client, made.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 19, 1)
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert sorted(good) == sorted(f"c{n}" for n in range(20) if n != 2)
    assert good["c7"]["response"]["body"]["choices"][0]["message"]["content"] == "user\nn7"
    assert bad["c2"]["response"]["status_code"] == 400
    assert bad["c2"]["response"]["body"]["error"]["param"] == "temperature"
    assert made.id in [one.id for one in client.batches.list(limit=1)]
    shown = server.http.get("/metrics", headers={"authorization": "Bearer one"}).text
    assert 'weft:batch_lines_total{model_name="fake",outcome="completed"}' in shown
    assert 'weft:batches{model_name="fake",status="completed"}' in shown
    assert 'weft:batch_seconds_behind{model_name="fake"}' in shown
    # The latencies of online requests do not contain lines.
    assert 'weft:time_to_first_token_seconds_count{model_name="fake"} 0.0' in shown
    for name in (file.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_errors_of_a_file_name_the_lines(client: openai.OpenAI) -> None:
    data = lines(2, None) + b"{\n" + lines(1, None) + lines(5, None, stream=True)[-200:].split(b"\n", 1)[1]
    file = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    found = ended(client, batch.id)
    assert found.status == "failed"
    codes = {error.line: error.code for error in found.errors.data}
    assert codes[3] == "invalid_json_line"
    assert codes[4] == "duplicate_custom_id"
    assert found.output_file_id is None
    many = client.files.create(file=lines(51), purpose="batch")
    batch = client.batches.create(input_file_id=many.id, endpoint=CHAT, completion_window="24h")
    assert ended(client, batch.id).errors.data[0].code == "token_limit_exceeded"


def test_a_key_sees_its_own_files_alone(server: Running, client: openai.OpenAI) -> None:
    other = client_of(server, "two")
    file = client.files.create(file=lines(1, None), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert list(other.files.list()) == list(other.batches.list()) == []
    for attempt in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    ended(client, batch.id)


def test_a_cancelled_batch_keeps_its_answers(client: openai.OpenAI) -> None:
    hang = lines(2, None) + lines(1, None, seed=101).replace(b"c0", b"hangs")  # seed 101: no answer
    file = client.files.create(file=hang, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    until = time.monotonic() + deadline(20)
    while client.batches.retrieve(batch.id).request_counts.completed < 2:  # type: ignore[union-attr]
        assert time.monotonic() < until
        time.sleep(0.1)
    with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    found = ended(client, batch.id)
    assert found.status == "cancelled"
    assert sorted(records(client, found.output_file_id)) == ["c0", "c1"]
    assert records(client, found.error_file_id)["hangs"]["error"]["code"] == "batch_cancelled"
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_wrong_requests_are_refused(server: Running, client: openai.OpenAI) -> None:
    for wrong in (
        {"purpose": "fine-tune", "file": lines(1)},
        {"purpose": "batch", "file": lines(1), "extra_body": {"other": "x"}},
    ):
        with pytest.raises(openai.BadRequestError):
            client.files.create(**wrong)  # type: ignore[arg-type]
    headers = {"authorization": "Bearer one"}
    assert server.http.post("/v1/files", json={}, headers=headers).status_code == 415
    form = httpx.post(server.url + "/v1/files", data={"purpose": "batch"}, files={"x": b""}, headers=headers)
    assert form.status_code == 400
    file = client.files.create(file=lines(1), purpose="batch")
    for change in ({"endpoint": "/v1/models"}, {"completion_window": "1h"}, {"metadata": {"a": "x" * 513}}):
        asked: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **change}
        with pytest.raises(openai.BadRequestError, match=next(iter(change))):
            client.batches.create(**asked)
    for path in ("/v1/batches?limit=0", "/v1/batches?after=x", "/v1/files?order=up", "/v1/files?after=x"):
        assert server.http.get(path, headers=headers).status_code == 400
    assert server.http.get("/v1/files/../../etc/content", headers=headers).status_code == 404
    client.files.delete(file.id)


def test_limits_of_a_key(server: Running) -> None:
    client = client_of(server, "two")
    file = client.files.create(file=lines(1, None, seed=101), purpose="batch")
    made = [
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h") for _ in range(3)
    ]
    with pytest.raises(openai.RateLimitError, match="batch-max-open"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    for batch in made:
        client.batches.cancel(batch.id)
    for batch in made:
        assert ended(client, batch.id).status == "cancelled"
    for _ in range(11):
        client.files.create(file=b"x", purpose="batch")
    with pytest.raises(openai.RateLimitError, match="batch-max-files"):
        client.files.create(file=b"x", purpose="batch")
    assert len(client.files.list(limit=5).data) == 5


def test_a_form_has_a_limit_besides_its_file(server: Running) -> None:
    headers = {"authorization": "Bearer three", "content-type": "multipart/form-data; boundary=b"}
    file = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
    for begin, status in ((b"", 400), (file, 413)):  # a form begins with a boundary
        data = (piece for piece in (begin, *[b"x" * 100_000] * 30))
        with contextlib.suppress(httpx.WriteError):  # the server may close before the last byte
            answer = httpx.post(server.url + "/v1/files", content=data, headers=headers)
            assert answer.status_code == status
            assert ("--batch-max-bytes" in answer.text) == (status == 413)


@pytest.mark.slow
def test_a_damaged_batch_stops_no_other(server: Running, folder: Path) -> None:
    """The contents of an input file disappear while the lines wait for a slot."""
    client = client_of(server, "three")
    hang = client.files.create(file=lines(8, None, seed=101), purpose="batch")
    slots = client.batches.create(input_file_id=hang.id, endpoint=CHAT, completion_window="24h")
    server.wait(lambda: client.batches.retrieve(slots.id).status == "in_progress", 20)
    file = client.files.create(file=lines(3, None), purpose="batch")
    bad = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    server.wait(lambda: client.batches.retrieve(bad.id).status == "in_progress", 20)
    (folder / "files" / file.id).unlink()
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    good = client.files.create(file=lines(3, None), purpose="batch")
    third = client.batches.create(input_file_id=good.id, endpoint=CHAT, completion_window="24h")
    client.batches.cancel(slots.id)
    assert ended(client, third.id).request_counts.completed == 3
    found = ended(client, bad.id)
    assert (found.status, found.request_counts.failed) == ("completed", 3)
    record = records(client, found.error_file_id)["c0"]["response"]
    assert record["body"]["error"]["code"] == "input_file_missing"


def test_outputs_have_a_limit(start_fake: Start, tmp_path: Path) -> None:
    """Lines beyond the bytes of the key fail, and the batch ends."""
    server = start_fake(batch_dir=str(tmp_path / "dir"), batch_max_bytes="8K", max_num_seqs=2)
    client = client_of(server)
    file = client.files.create(file=lines(20, None), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    found = ended(client, batch.id)
    counts = found.request_counts
    assert (found.status, counts.total) == ("completed", 20)
    assert min(counts.completed, counts.failed) > 0
    record = next(iter(records(client, found.error_file_id).values()))["response"]
    assert record["status_code"] == 413
    assert "--batch-max-bytes" in record["body"]["error"]["message"]


def test_an_unusable_folder_is_named(server: Running, folder: Path) -> None:
    client = client_of(server, "three")
    os.rename(folder / "files", folder / "away")
    try:
        with pytest.raises(openai.InternalServerError, match="folder of files and batches") as failed:
            client.files.create(file=lines(1), purpose="batch")
    finally:
        os.rename(folder / "away", folder / "files")
    assert failed.value.status_code == 503
    client.files.delete(client.files.create(file=lines(1), purpose="batch").id)


@pytest.mark.parametrize("whole", [True, False])
def test_a_download_that_nobody_reads_ends(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(file_routes, "STALL_TIMEOUT", 0.05)
    (tmp_path / "out").write_bytes(b"x" * 200_000)
    sent: list[int] = []

    async def send(message: Message) -> None:
        sent.append(len(message.get("body", b"")))
        if len(sent) == 3 and not whole:
            await asyncio.Future()  # the client does not read

    async def receive() -> Message:
        await asyncio.Future()  # the connection stays
        raise AssertionError

    scope = {"type": "http", "method": "GET", "headers": []}
    asyncio.run(file_routes.Download(tmp_path / "out")(scope, receive, send))
    assert (sum(sent) == 200_000) == whole


@pytest.mark.slow
def test_a_stopping_server_says_so(start_fake: Start, tmp_path: Path) -> None:
    server = start_fake(batch_dir=str(tmp_path / "dir"), drain_timeout=3)
    with server.http.stream(
        "POST",
        "/v1/chat/completions",
        json={
            "model": "fake",
            "messages": [{"role": "user", "content": "x"}],
            "seed": 101,
            "stream": True,
        },
    ):
        server.process.terminate()
        server.wait(lambda: server.http.get("/v1/batches").status_code != 200, 10)
        answer = server.http.get("/v1/batches")
        assert (answer.status_code, "shutting down" in answer.text) == (503, True)


@pytest.mark.parametrize(
    ("slots", "others", "quiet", "share", "wanted"),
    [
        (64, 0, 30.0, 0.0625, 64),
        (64, 0, 29.9, 0.0625, 4),
        (64, 3, 0.0, 0.0625, 4),
        (64, 62, 0.0, 0.0625, 2),
        (64, 70, 0.0, 0.0625, -6),
        (8, 1, 0.0, 0.0625, 1),
        (8, 1, 0.0, 0.0, 0),
        (8, 1, 0.0, 1.0, 7),
    ],
)
def test_batches_get_a_share_beside_online_requests(
    slots: int, others: int, quiet: float, share: float, wanted: int
) -> None:
    assert room_of(slots, others, quiet, share) == wanted


def test_a_server_without_a_folder_says_so(fake: Running) -> None:
    for answer in (fake.http.get("/v1/batches"), fake.http.post("/v1/files"), fake.http.get("/v1/files/x")):
        assert answer.status_code == 404
        assert "--batch-dir" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_restarted_server_continues(start_fake: Start, tmp_path: Path) -> None:
    """Another process takes the lease over, also after kill -9, and no line is lost or repeated."""
    folder = str(tmp_path / "dir")
    first = start_fake(batch_dir=folder)
    client = client_of(first)
    data = lines(30, None) + lines(1, None, seed=101).replace(b"c0", b"hangs")
    file = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    first.wait(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 10, 20)  # type: ignore[union-attr]
    engines = [pid for pid, words in commands(first.process.pid).items() if "fake_engine" in " ".join(words)]
    first.process.kill()
    for engine in engines:  # the fake engine does not end with its parent
        os.kill(engine, signal.SIGKILL)
    second = start_fake(batch_dir=folder)
    client = client_of(second)
    second.wait(lambda: client.batches.retrieve(batch.id).request_counts.completed == 30, 40)  # type: ignore[union-attr]
    client.batches.cancel(batch.id)
    found = ended(client, batch.id)
    assert sorted(records(client, found.output_file_id)) == sorted(f"c{n}" for n in range(30))
    second.stop()
    third = start_fake(batch_dir=folder)
    again = client_of(third).batches.retrieve(batch.id)
    assert (again.status, again.request_counts) == (found.status, found.request_counts)


@pytest.mark.slow
def test_another_api_server_takes_over(start_fake: Start, tmp_path: Path) -> None:
    """Two API servers share a folder. The one that runs batches is killed."""
    server = start_fake(batch_dir=str(tmp_path / "dir"), fronts=2, engines=2, restarts=5)
    client = client_of(server).with_options(max_retries=5)
    data = lines(30, None, max_tokens=200) + lines(1, None, seed=101).replace(b"c0", b"hangs")
    file = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    def holder() -> str:
        with sqlite3.connect(tmp_path / "dir" / "batches.sqlite") as db:
            return str(db.execute("SELECT holder FROM lease").fetchone()[0])

    server.wait(lambda: client.batches.retrieve(batch.id).status == "in_progress", 20)
    first = holder()
    # Every API server is killed in turn, so the holder is among them.
    for front in with_role(server.process.pid, "front"):
        os.kill(front, signal.SIGKILL)
        time.sleep(3)
    server.wait(lambda: holder() != first, 30)
    server.wait(lambda: client.batches.retrieve(batch.id).request_counts.completed == 30, 30)  # type: ignore[union-attr]
    client.batches.cancel(batch.id)
    found = ended(client, batch.id)
    assert sorted(records(client, found.output_file_id)) == sorted(f"c{n}" for n in range(30))


def stops_outside_a_transaction(pids: list[int], database: Path) -> bool:
    """Stop processes. If one of them has the write lock of ``database``, continue all and return False: a
    stopped process keeps the lock, and no other process can write."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=1.0, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("ROLLBACK")
    except sqlite3.OperationalError:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        return False
    return True


@pytest.mark.slow
def test_a_stopped_holder_that_comes_back_writes_nothing(start_fake: Start, tmp_path: Path) -> None:
    """Two servers share a folder. The holder of the lease stops for longer than the lease, and goes on."""
    folder = str(tmp_path / "dir")
    first = start_fake(batch_dir=folder, max_num_seqs=4)
    client = client_of(first)

    def holder() -> str:
        with sqlite3.connect(tmp_path / "dir" / "batches.sqlite", timeout=deadline(20)) as db:
            return str(db.execute("SELECT holder FROM lease").fetchone()[0])

    file = client.files.create(file=lines(60, None, max_tokens=200), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    first.wait(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3, 20)  # type: ignore[union-attr]
    before = holder()
    second = start_fake(batch_dir=folder, max_num_seqs=4)
    other = client_of(second)
    fronts = with_role(first.process.pid, "front") or [first.process.pid]
    first.wait(lambda: stops_outside_a_transaction(fronts, tmp_path / "dir" / "batches.sqlite"), 20)
    try:
        second.wait(lambda: holder() != before, 40)
    finally:
        for pid in fronts:
            os.kill(pid, signal.SIGCONT)
    found = ended(other, batch.id, 60)
    assert (found.status, found.request_counts.completed) == ("completed", 60)
    assert sorted(records(other, found.output_file_id)) == sorted(f"c{n}" for n in range(60))
    assert client.batches.retrieve(batch.id).status == "completed"
