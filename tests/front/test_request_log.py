"""The log of a server in JSON, with one line for each request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.servers import ROOT, Running
from weft.common import env


def test_the_log_has_a_line_for_each_request(tmp_path: Path) -> None:
    """In JSON, without any text of a user, whichever way a request ends."""
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"match": "hidden words", "text": "secret answer", "repeat": True}) + "\n")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--scripted", str(script)]
    command += ["--log-requests", "--log-format", "json", "--api-key", "a,b"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        )
        server = Running(process, 60)
        try:
            key = {"authorization": "Bearer b", "x-request-id": "mine"}
            body = {"model": server.model, "messages": [{"role": "user", "content": "hidden words"}]}
            made = server.http.post("/v1/chat/completions", json=body, headers=key).json()
            refused = {**body, "temperature": -1}
            answer = server.http.post("/v1/chat/completions", json=refused, headers=key)
            assert answer.status_code == 400
        finally:
            server.stop()
            server.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(set(line) >= {"ts", "level", "process", "logger", "message"} for line in lines)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"]) for line in lines)
    good, bad = [line["message"] for line in lines if line["logger"] == "weft.front.monitoring.request_log"]
    usage = made["usage"]
    assert re.fullmatch(
        rf"request {made['id']} x-request-id=mine key=1 kind=chat model={server.model} "
        rf"prompt_tokens={usage['prompt_tokens']} output_tokens={usage['completion_tokens']} "
        r"ttft=\d+\.\d{3}s duration=\d+\.\d{3}s finish=stop",
        good,
    ), good
    assert re.search(r"^request - x-request-id=mine key=1 .*ttft=- duration=\S+ finish=\w+$", bad), bad
    assert "hidden" not in log.read_text()
    assert "secret" not in log.read_text()
