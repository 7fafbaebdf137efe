"""``weft batch run`` against a real server: answers, errors, and continued runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Running
from weft.batch.lines import CHAT, BatchAnswer, record_of
from weft.batch.offline import RecordLog
from weft.cli.main import main
from weft.common.errors import ConfigError


def lines(path: Path, count: int, **changes: Any) -> Path:
    """Write an input file. Line 2 has a body that the route refuses."""
    made = []
    for n in range(count):
        body = {"messages": [{"role": "user", "content": f"n{n}"}], "max_tokens": 8, **changes}
        if n == 2:
            body["temperature"] = -1
        made.append({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": body})
    path.write_text("".join(json.dumps(one) + "\n" for one in made))
    return path


def run(*words: Any) -> int:
    with pytest.raises(SystemExit) as end:
        main(["batch", "run", *map(str, words)])
    assert isinstance(end.value.code, int)
    return end.value.code


def records(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def test_all_lines_are_answered_once(fake: Running, tmp_path: Path) -> None:
    source, target, errors = lines(tmp_path / "in", 9), tmp_path / "out", tmp_path / "errors"
    words = (source, target, "--errors", errors, "--url", fake.url, "--concurrency", 3)
    assert run(*words) == 1
    good, bad = records(target), records(errors)
    assert sorted(good) == [f"c{n}" for n in range(9) if n != 2]
    text = good["c5"]["response"]["body"]["choices"][0]["message"]["content"]
    assert text == "user\nn5"
    assert good["c5"]["response"]["status_code"] == 200
    assert good["c5"]["response"]["request_id"].startswith("req-")
    assert bad["c2"]["response"]["status_code"] == 400
    assert bad["c2"]["response"]["body"]["error"]["param"] == "temperature"
    whole = target.read_bytes()
    # A crash has cut the last record off: only its line runs again.
    target.write_bytes(whole[:-20])
    assert run(*words) == 0
    again = records(target)
    assert sorted(again) == sorted(good)
    kept = whole[: whole[:-20].rindex(b"\n") + 1]
    assert target.read_bytes().startswith(kept)
    assert run(*words) == 0
    assert records(target) == again


def test_a_wrong_file_runs_no_line(fake: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = lines(tmp_path / "in", 3, stream=True), tmp_path / "out"
    assert run(source, target, "--url", fake.url) == 2
    assert "line 1: stream must be false" in capsys.readouterr().err
    assert target.read_bytes() == b""
    assert run(source, source, "--url", fake.url) == 2
    assert "different files" in capsys.readouterr().err
    assert run(tmp_path / "none", target, "--url", fake.url) == 2
    assert run(lines(source, 1), target, "--url", "http://127.0.0.1:9") == 2
    assert "no answer from the server" in capsys.readouterr().err


def test_the_output_has_one_writer_and_only_records(tmp_path: Path) -> None:
    first = RecordLog(tmp_path / "out")
    with pytest.raises(ConfigError, match="another process writes"):
        RecordLog(tmp_path / "out")
    first.append([b'{"custom_id":"a"}\n', b'{"custom_id":"b"}\n'])
    first.close()
    whole = lines(tmp_path / "in", 1).read_text()
    # Also a file without a last line end, or a file of input lines, stays as it is.
    for text in ("my notes\n", "my notes", '{"a": 1}', whole, whole.rstrip()):
        (tmp_path / "text").write_text(text)
        with pytest.raises(ConfigError, match="not an output record"):
            RecordLog(tmp_path / "text")
        assert (tmp_path / "text").read_text() == text
    with (tmp_path / "out").open("ab") as file:
        file.write(record_of("b", "c", BatchAnswer(200, "r", b"{}"))[:-1])
    again = RecordLog(tmp_path / "out")
    assert (tmp_path / "out").read_bytes().endswith(b"\n")
    assert again.ids == {"a", "b"}
    again.close()


def test_pipes_and_devices(fake: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``weft batch run <(...) out`` works. The output must be a file that keeps its lines."""
    text = lines(tmp_path / "in", 2).read_bytes()
    readable, writable = os.pipe()
    os.write(writable, text)
    os.close(writable)
    assert run(f"/dev/fd/{readable}", tmp_path / "out", "--url", fake.url) == 0
    os.close(readable)
    assert len(records(tmp_path / "out")) == 2
    for device in ("/dev/null", "/dev/full"):
        assert run(tmp_path / "in", device, "--url", fake.url) == 2
        assert "not a regular file" in capsys.readouterr().err


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "out")
    os.close(log._file)
    log._file = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(ConfigError, match=r"No space left.*run the command again"):
        log.append([b"{}\n"])
    log.close()
